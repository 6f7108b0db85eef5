"""What the commands say to a person: progress, questions, and errors

Docs: page `cli/terminal`"""

# A command is used by people and by scripts. Results go to the standard output. Progress, questions and errors go to
# the standard error, so that a pipe or a file gets the results only. Progress and questions appear only in a terminal.
#
# The exit codes are the part of the output that every script reads. They are documented in the guide and do not change.

import base64, getpass, os, re, shlex, shutil, sys
from datetime import timedelta

from ..clock import monotonic

OK,FAILED,USAGE,FOUND,INTERRUPTED,BROKEN_PIPE = 0,1,2,3,130,141

class UsageError(Exception): "The command line does not say what to do, or says something that cannot be done"

class Damage(Exception): "The command did its work, and found something wrong: exit code 3"

# --- Progress

# `run_ingest` and `verify` call a `Progress` with the records of the chunks, the number of chunks, and the report that
# counts. A record is passed on unchanged. The line is written again at most ten times a second, and removed at the end,
# because the report follows.

class Progress:
    "Passes on records of chunks, and shows the samples, the rate and the remaining time in one line of a terminal"
    def __init__(self,
        count, # `count(report)` -> `(samples to show, how many failed)`
        failed:str='failed', # What the second number counts
        file=None, # Where to show it; default: the standard error
        pause:float=.1, # Seconds between two updates, at least
    ): self.count,self.failed,self.file,self.pause = count,failed,file or sys.stderr,pause

    def __call__(self, records, total:int, report):
        """Yields `records`, and updates the line while they are processed; it is cleared at the end

        `total` is how many there are, `None` if nobody knows; `report` counts the samples."""
        self.started = monotonic()
        self.before = self.count(report)[0]   # by an earlier run that is resumed
        shown = 0.
        self._show('starting')
        try:
            for done,record in enumerate(records, 1):
                yield record
                if monotonic()-shown<self.pause and done!=total: continue
                shown = monotonic()
                self._show(self.line(report, done, total))
        finally: self._show('')

    def line(self, report, done:int, total:int)->str:
        "The text of the line, when `done` of `total` chunks are processed"
        seconds = max(monotonic()-self.started, 1e-3)
        samples,failed = self.count(report)
        parts = [f'{samples:,} samples', f'{(samples-self.before)/seconds:,.0f} samples/s']
        if total: parts = [f'{100*done//total}%', *parts, f'{timedelta(seconds=int(seconds*(total-done)/done))} left']
        if failed: parts.append(f'{failed:,} {self.failed}')
        return ', '.join(parts)

    def _show(self, line):
        "Replace the line of the terminal by `line`, cut off where the terminal ends"
        columns = shutil.get_terminal_size().columns
        print(f'\r\x1b[K{line[:columns-1]}', end='', file=self.file, flush=True)

# --- Pictures

# Some terminals draw pictures that are sent to them between control characters: kitty and those that have adopted its
# protocol, and iTerm2 and those that have adopted the other one.

def terminal_protocol()->str: # 'kitty' or 'iterm', or `None` if standard output is a file, a pipe or another terminal
    "How the terminal of the standard output draws pictures"
    program,term = os.environ.get('TERM_PROGRAM', ''),os.environ.get('TERM', '')
    if not sys.stdout.isatty() or term.startswith(('screen','tmux')): return None
    if 'kitty' in term or program in ('ghostty','WezTerm') or 'KITTY_WINDOW_ID' in os.environ: return 'kitty'
    return 'iterm' if program in ('iTerm.app','mintty') else None

def picture_codes(
    png:bytes, # The contents of a file
    protocol:str # As `terminal_protocol` returns it
)->str:
    "What to print so that a terminal draws a picture"
    text = base64.b64encode(png).decode()
    if protocol=='iterm': return f'\x1b]1337;File=inline=1;size={len(png)}:{text}\a\n'
    pieces = [text[k:k+4096] for k in range(0, len(text), 4096)]
    heads = ['a=T,f=100,', *['']*(len(pieces)-1)]
    return ''.join(f'\x1b_G{head}m={int(k<len(pieces)-1)};{piece}\x1b\\'
                   for k,(head,piece) in enumerate(zip(heads, pieces)))+'\n'

# --- Questions

# A question needs a person. Without a terminal, the answer to a question is an error that says which option or variable
# answers it.

def is_person()->bool:
    "Are standard input and standard error terminals, so that a question can be asked and answered?"
    return sys.stdin.isatty() and sys.stderr.isatty()

def confirm(question:str)->bool:
    "Ask a question; returns whether the answer is `y` or `yes`. Raises `UsageError` if nobody can be asked"
    if not is_person(): raise UsageError('nobody can be asked here, as this is not a terminal: --yes says yes')
    print(f'{question} [y/N] ', end='', file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ('y','yes')

def ask_password(server:str)->str:
    "Ask for the password of the server at URL `server`, without showing it; raises `UsageError` if nobody can be asked"
    if not is_person():
        raise UsageError(f'{server} needs a password: set FASTAI_REMOTE_PASSWORD, or FASTAI_REMOTE_URL to its URL '
                         'with the password')
    return getpass.getpass(f'Password of {server}: ', sys.stderr)

# --- Errors

# The messages of the package name arguments of Python functions. `in_shell` says the same for a command line, in one
# line.

_abandon = re.compile(r"\b(?:Redis|Shard)Store\.abandon\([^()]*\)")
_argument = re.compile(r'\b([a-z]+(?:_[a-z]+)*)=(?:True\b|(?=[\s:.,;)]|$))')

def flag(name:str)->str:
    "The option for parameter `name`, with dashes for underscores: `--num-workers`"
    return '--'+name.replace('_', '-')

def in_shell(message:str, words:list=())->str:
    "A message of the package in terms of the command line, which names the dataset by `words`; in one line"
    place = ' '.join(map(shlex.quote, words)) or 'URL [NAME]'
    message = _abandon.sub(lambda _: f'`fastai_remote abandon {place}`', message)
    message = _argument.sub(lambda argument: flag(argument[1]), message)
    message = message.replace('the same call', 'the same command')
    return '; '.join(line.strip() for line in message.splitlines() if line.strip())
