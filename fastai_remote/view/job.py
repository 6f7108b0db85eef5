"""Work that takes longer than a request: its progress, and an end that the user can ask for

Docs: page `view/job`"""

# Filters, sorts, searches and edits run in a thread each. The page asks how far they are, and may cancel them.

import threading

class Cancelled(Exception): "The user has cancelled the work"

class Job:
    "Runs `work(job)` in a thread; the page sees `state`, `done`, `of`, `error` and `note`"
    def __init__(self,
        work # A function of this object; what it returns becomes `result`
    ):
        self.state,self.done,self.of,self.error,self.note,self.result = 'running',0,0,'','',None
        self._is_cancelled = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work):
        try: self.result = work(self)
        except Cancelled: self.state = 'cancelled'
        except Exception as e: self.error,self.state = f'{e}' or type(e).__name__,'failed'
        else: self.state = 'done'

    def step(self,
        done:int, # What is done
        of:int # What there is to do, in the same unit
    ):
        "Notes how far the work is; raises `Cancelled` if the user has asked for its end"
        self.done,self.of = done,of
        if self._is_cancelled.is_set(): raise Cancelled

    def cancel(self): self._is_cancelled.set()

    def progress(self)->dict:
        "What the page shows of the work"
        return dict(state=self.state, done=self.done, of=self.of, error=self.error, note=self.note)
