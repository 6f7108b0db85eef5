"""Which samples the page shows, and in which order: filters, sorts and searches

Docs: page `view/query`"""

import hashlib, json, sys, threading
from dataclasses import asdict, dataclass, fields
from itertools import chain
from threading import Lock

import numpy as np

from ..core import CorruptSample, size_str
from ..load.items import read_parts, SampleSelection
from ..store.base import field_codec, has_keys, Store
from .overview import typed_label

# --- Long work
#
# Filters, sorts, searches and edits run in a thread each. The page asks how far they are, and may cancel them.

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

# --- Searching
#
# A filter keeps a bit for each sample, and a sort four bytes. Both read the fields that they need in blocks, and what
# was found so far can be shown while the rest is read. Searches in texts read the texts themselves, but only those of
# samples that the other conditions have left.

BLOCK = 1<<20 # Samples whose numbers or labels are read at once
MAX_SORT_BYTES = 600_000_000 # Memory that a sort may take
_MAX_TEXTS,_TEXT_BYTES = 4096,1<<23 # Texts that are read at once, and roughly their bytes
_MAX_UNREAD = 1000 # Samples that cannot be read, after which a filter or a sort fails

# --- Query

@dataclass(frozen=True)
class Query:
    "What the user asks for: conditions, of which all must hold, and an order"
    split:str = '' # Only samples of this split
    label_field:str = '' # A field with labels
    label:str = '' # Only samples with this label, as text
    range_field:str = '' # A field of numbers
    low:float = None # The smallest number; `None`: any
    high:float = None # The largest number; `None`: any
    has:str = '' # Only samples that have this field
    text:str = '' # Only samples with these letters in a text, in upper or lower case
    key:str = '' # Only samples with this key
    sort:str = '' # A field of numbers; '': by sample number
    descending:bool = False # The largest number first?

    @classmethod
    def of(cls,
        wanted:dict # What the page has sent
    ):
        "Raises `ValueError` for what is no query"
        kinds = {f.name:float if f.name in ('low','high') else f.type for f in fields(cls)}
        known = {}
        if not isinstance(wanted, dict): raise ValueError(f'a query is an object, not {wanted!r:.40}')
        for name,value in wanted.items():
            kind = kinds.get(name)
            if kind is float and type(value) is int: value = float(value)
            if kind is None or type(value) is not kind: raise ValueError(f'a query has no {name!r:.40} = {value!r:.40}')
            known[name] = value
        return cls(**known)

    def check(self, store:Store):
        "Raises `UnknownField`, and `ValueError` for a split, a label or a field that does not fit"
        if self.split and self.split not in store.splits: raise ValueError(f'{store.name}: no split {self.split!r}')
        if self.label_field: typed_label(store, self.label_field, self.label)
        if self.has: store.may_lack(self.has)
        for field in filter(None, (self.range_field, self.sort)):
            if store.field_table.entry(field)['dtype'] is None: raise ValueError(f'{field!r} has no numbers')
        if self.text and not text_fields(store): raise ValueError(f'{store.name} has no texts')
        if self.key and not has_keys(store): raise ValueError(f'{store.name} has no keys of samples')

    def numbers(self, store:Store)->range:
        "The samples of the split"
        return range(*store.splits[self.split]) if self.split else range(len(store))

    @property
    def is_filter(self)->bool: return bool(self.label_field or self.range_field or self.has or self.text or self.key)

def text_fields(store:Store)->list:
    "The fields in which a search looks"
    return [field for field in store.fields if store.field_table.entry(field)['codec'] in ('txt','json')]

# --- What was found

class Found(SampleSelection):
    "Samples of a range that were found so far, in ascending order"
    def __init__(self,
        among:range # Sample numbers
    ):
        super().__init__(np.zeros(min(BLOCK, stop), bool) for stop in range(len(among), 0, -BLOCK))
        self.start = among.start

    def add(self,
        first:int, # A sample number of the range, a multiple of 8 after its start; those before it were added before
        mask:np.ndarray # bool: which of the samples from `first` on were found
    ):
        packed,at = np.packbits(mask),first-self.start
        self.bits.reshape(-1)[at//8:at//8+len(packed)] = packed
        blocks = (np.flatnonzero(mask)+at)//(8*self.bits.shape[1])
        # in place of the numbers that another thread may be reading; those before the blocks stay the same
        self.starts = self.starts+np.cumsum(np.bincount(blocks+1, minlength=len(self.starts)))

    def numbers(self,
        first:int, # Position among those that were found
        n:int # How many at most
    )->np.ndarray: # Sample numbers, int64
        return self.start+self[np.arange(first, min(first+n, len(self)))]

    def position(self, number:int)->int:
        "The position of a sample; -1 if it was not found"
        first,after = self.before(np.clip([number-self.start, number+1-self.start], 0, self.n)).tolist()
        return first if first<after else -1

class Whole:
    "All samples of a range"
    def __init__(self, among:range): self.among = among
    def __len__(self): return len(self.among)
    def position(self, number): return number-self.among.start if number in self.among else -1
    def numbers(self, first, n):
        some = self.among[first:first+n]
        return np.arange(some.start, some.stop)

class Sorted:
    "Samples in the order of a field"
    def __init__(self, order:np.ndarray): self.order = order
    def __len__(self): return len(self.order)
    def position(self, number):
        for k in range(0, len(self), BLOCK):
            same = np.flatnonzero(self.order[k:k+BLOCK]==number)
            if len(same): return k+int(same[0])
        return -1
    def numbers(self, first, n): return self.order[first:first+n].astype(np.int64)

# --- Answer

class Answer:
    "Finds the samples of a query in a thread, its `job`; `samples` are those that were found so far"
    def __init__(self,
        store:Store,
        query:Query # Raises what `Query.check` raises
    ):
        query.check(store)
        self.store,self.query = store,query
        among = query.numbers(store)
        self.samples = Found(among) if query.is_filter else Whole(among)
        self.unread = [] # Numbers of samples that could not be read
        # Bytes of what a search reads of a sample: at most those of the whole sample, until values were read
        self.mean = max(store.manifest.nbytes/max(len(store), 1), 1)
        self.job = Job(self._find) if query.is_filter or query.sort else None

    def progress(self)->dict:
        "What the page shows: number of samples so far, and how far the work is"
        job = self.job.progress() if self.job else dict(state='done', done=0, of=0, error='', note='')
        return {**job, 'n':len(self.samples), 'note':job['note'] or self._unread_text()}

    def _unread_text(self):
        if not self.unread: return ''
        some = ', '.join(f'{number:,}' for number in self.unread[:5])
        more,s = ', …' if len(self.unread)>5 else '','s' if len(self.unread)>1 else ''
        return f'{len(self.unread):,} sample{s} could not be read: {some}{more}'

    def _find(self, job):
        if self.query.is_filter: self._filter(job)
        if self.query.sort: self.samples,job.note = Sorted(self._sort(job)),''

    def _filter(self, job):
        query,store,among = self.query,self.store,self.query.numbers(self.store)
        of_numbers,of_values = self._conditions()
        for start in range(among.start, among.stop, BLOCK):
            job.step(start-among.start, len(among))
            numbers = np.arange(start, min(start+BLOCK, among.stop))
            mask = np.ones(len(numbers), bool)
            if query.has: mask = np.concatenate([*store.presence(query.has, start, start+len(numbers))])
            for field,condition in of_numbers:
                values,present = self._column(field, numbers)
                mask &= condition(values)&present
            if of_values: self._search(job, numbers, mask, of_values)
            else: self.samples.add(start, mask)

    def _conditions(self):
        "Lists of `(field, function of an array of numbers or codes)`, and of `(fields, function of a stored value)`"
        query,store,of_numbers,of_values = self.query,self.store,[],[]
        if query.range_field: of_numbers.append((query.range_field, self._in_range))
        if query.label_field:
            field,label = query.label_field,typed_label(store, query.label_field, query.label)
            vocab,codec = store.manifest.vocab.get(field),field_codec(store, field)
            code = vocab.index(label) if vocab else label
            if codec.name=='labels': of_values.append(([field], lambda value: label in codec.from_bytes(value)))
            else: of_numbers.append((field, lambda codes: codes==code))
        text = query.text.casefold()
        if text: of_values.append((text_fields(store), lambda value: text in value.decode(errors='replace').casefold()))
        if query.key: of_values.append((['__key__'], lambda key: key==query.key))
        return of_numbers,of_values

    def _in_range(self, values):
        low,high = self.query.low,self.query.high
        return (values>=(-np.inf if low is None else low))&(values<=(np.inf if high is None else high))

    def _search(self, job, numbers, mask, conditions):
        "Adds those of `numbers` with `mask` whose values fit"
        among,k = self.query.numbers(self.store),0
        while k<len(numbers):
            job.step(int(numbers[k])-among.start, len(among))
            step = max(8, int(min(_MAX_TEXTS, _TEXT_BYTES//max(self.mean, 1)))//8*8)
            found = mask[k:k+step].copy()
            for names,condition in conditions:
                found[found] = self._fit(numbers[k:k+step][found], names, condition)
            self.samples.add(int(numbers[k]), found)
            k += step

    def _fit(self, numbers, fields, condition):
        "Which samples have a value in one of `fields` that fits, bool; those that cannot be read do not"
        result,n_bytes = np.zeros(len(numbers), bool),0
        for field in fields if len(numbers) else ():
            for k,value in enumerate(chain.from_iterable(self._values(field, numbers))):
                n_bytes += len(value or b'')
                try: result[k] |= value is not None and condition(value)
                except ValueError as e: self._note_unread(numbers[k], e)
        if n_bytes: self.mean = n_bytes/len(numbers)
        return result

    def _values(self, field, numbers):
        "Yields the values of a field, or keys for `__key__`, in parts; `None` for one that is missing or damaged"
        store,spec = self.store,f'{field}?' if field!='__key__' and self.store.may_lack(field) else field
        def read(some): return store.keys(some) if field=='__key__' else store.get_many(some, spec)[spec]
        for some,found in read_parts(read, numbers):
            if isinstance(found, Exception): self._note_unread(some[0], found)
            yield [None] if isinstance(found, Exception) else found

    def _column(self, field, numbers):
        "The numbers of a field, and which samples have one, bool; a number that is missing or damaged is none"
        dtype = self.store.field_table.entry(field)['dtype']
        parts = [_present(part, dtype) for part in self._values(field, numbers)]
        return tuple(map(np.concatenate, zip(*parts)))

    def _note_unread(self, number, error):
        "Notes a sample that cannot be read; raises `CorruptSample` if there are too many"
        if number in self.unread: return
        if len(self.unread)==_MAX_UNREAD:
            raise CorruptSample(f'{self._unread_text()}: `store.verify()` says which others, and where they are; the '
                                f'last one: {error}')
        self.unread.append(int(number))

    def _sort(self, job):
        "Sample numbers in the order of `query.sort`, uint32; equal ones in their order, those without it at the end"
        store,field,n = self.store,self.query.sort,len(self.samples)
        is_narrow = np.dtype(store.field_table.entry(field)['dtype']).itemsize<=4
        needed = n*(8 if is_narrow else 24)
        if needed>MAX_SORT_BYTES or len(store)>1<<32:
            raise ValueError(f'{store.name}: to sort {n:,} samples by {field!r} takes {size_str(needed)} of memory, '
                             f'and the limit is {size_str(MAX_SORT_BYTES)}: choose fewer samples with a filter first')
        # samples without a number are gathered at the end
        keys,stop,end = np.empty(n, np.uint64),0,n
        numbers = None if is_narrow else np.empty(n, np.uint32)
        for k in range(0, n, BLOCK):
            job.step(k, n)
            some = self.samples.numbers(k, BLOCK)
            key,present = _sort_keys(*self._column(field, some), self.query.descending)
            rest,some,start = some[~present],some[present],stop
            stop,end = stop+len(some),end-len(rest)
            key = key[present].astype(np.uint64)
            keys[start:stop] = (key<<np.uint64(32))|some.astype(np.uint64) if is_narrow else key
            if not is_narrow: numbers[start:stop] = some
            (keys if is_narrow else numbers)[end:end+len(rest)] = rest
        job.step(n, n)
        job.note = 'sorting'
        if is_narrow:
            keys[:stop].sort()
            keys[stop:].sort()
            return _low_halves(keys)
        numbers[:stop] = numbers[:stop][np.argsort(keys[:stop], kind='stable')]
        numbers[stop:].sort()
        return numbers

class Answers:
    "The answers to the last queries about one version of a dataset"
    def __init__(self, store:Store): self.store,self._answers,self._lock = store,{},Lock()

    def ask(self, query:Query)->str: # Names the answer; the same for the same query
        "Begin to find an answer, unless there is one; raises what `Query.check` raises"
        id = hashlib.sha256(json.dumps([self.store.manifest.uid, asdict(query)]).encode()).hexdigest()[:16]
        with self._lock:
            known = self._answers.get(id)
            if known is None or known.job and known.job.state in ('failed','cancelled'):
                query.check(self.store)
                self._make_room(query)
                self._answers[id] = Answer(self.store, query)
        return id

    def of(self, id:str)->Answer: # '': that of all samples
        "The answer of this name; raises `KeyError` if it is not kept any more"
        return self._answers[id] if id else Answer(self.store, Query())

    def _make_room(self, query):
        "Drops answers before one to `query`: only one sort may be in memory, and few filters"
        for id,answer in list(self._answers.items()):
            if query.sort and answer.query.sort or len(self._answers)>3:
                if answer.job: answer.job.cancel()
                del self._answers[id]

# --- Packed fields

def _present(values, dtype):
    "An array or a list of numbers as an array of `dtype`, with 0 for `None`, and which of them are not `None`, bool"
    if isinstance(values, np.ndarray): return values,np.ones(len(values), bool)
    present = np.array([value is not None for value in values], bool)
    return np.array([0 if value is None else value for value in values], dtype),present

def _sort_keys(values, present, is_descending):
    "Unsigned numbers in the order of `values`, and which samples have a number, bool"
    if values.dtype==np.float16: values = values.astype(np.float32)
    kind = np.uint64 if values.dtype.itemsize==8 else np.uint32
    sign = kind(1)<<kind(np.dtype(kind).itemsize*8-1)
    if values.dtype.kind=='f':
        bits = (values+values.dtype.type(0)).view(kind)   # -0.0 becomes 0.0
        keys,present = np.where(bits&sign, ~bits, bits|sign),present&~np.isnan(values)
    elif values.dtype.kind=='i': keys = values.astype(np.dtype(kind).str.replace('u', 'i')).view(kind)^sign
    else: keys = values.astype(kind)
    return ~keys if is_descending else keys,present

def _low_halves(keys):
    "The lower 32 bits of each of `keys`, in the memory of `keys`, half of which is freed"
    halves,n = keys.view(np.uint32),len(keys)
    low = halves[0 if sys.byteorder=='little' else 1::2]
    for k in range(0, n, BLOCK): halves[k:min(k+BLOCK, n)] = low[k:k+BLOCK].copy()
    del halves,low
    keys.resize((n+1)//2, refcheck=False)
    return keys.view(np.uint32)[:n]
