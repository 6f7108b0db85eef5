"""A sequence of samples that is divided between ranks and workers, with the methods of WebDataset

Docs: page `load/stream`"""

# A dataset with an index has one result for each sample. Methods such as `select`, `unbatched` and `repeat` change the
# number of samples, so their result is a stream: a torch `IterableDataset`. This module defines the methods that
# datasets and streams have in common, and the stream. `RemoteDataset` is in the next notebook.

import itertools, warnings
from dataclasses import dataclass

import numpy as np
from torch.utils.data import default_collate, IterableDataset

from .epochs import Consumer, EpochIterator, Epochs, share_of, SharedNumbers, this_worker
from .seeds import key_of
from .steps import decode_step, Dropped, run_steps, Step

# --- Stages

# A stage gets all samples of a process and makes others of them. It is a function of `upstream`, which starts what
# comes before it, and of the `Run`. `upstream(k)` is the `k`-th pass: it has another random order. A sample travels as
# `(origin, sample)`. The origin is its store and its number, which later steps name in errors and need to decode. It is
# `None` for what was made of several samples.

@dataclass
class Run:
    "One epoch of a stage in one process"
    consumer:Consumer
    key:tuple # What the random numbers of the epoch depend on, ints; the same in all processes
    depth:int # Number of stages before this one
    size:int=None # Results of all ranks that this stage gets in one pass; `None` if that is not known

    def rng(self)->np.random.Generator:
        "Random numbers of this process, stage and epoch"
        return np.random.default_rng(key_of(*self.key, self.depth, self.consumer.rank, self.consumer.worker))

# A stage is called with `upstream`, a `Run` and its own arguments. `upstream(k)` is an iterator of the pairs
# `(origin, sample)` of the stages before, in pass `k`. Only `repeat` asks for other passes than 0.

def _slice_stage(upstream, run, *bounds):
    "`islice` of the pairs of `upstream(0)` by `bounds`; raises `ValueError` if several processes read"
    if run.consumer.count>1:
        raise ValueError('slice after a step that may leave out samples, or after a method of streams, counts what '
                         'comes, and several workers or ranks cannot do that together: call slice before that step, '
                         'use with_epoch(n), or read with at most one worker')
    return itertools.islice(upstream(0), *bounds)

def _is_limited(size, nepochs, nresults):
    """May a repeat of `size` samples (`None`: unknown) end because of `nresults`, and not after `nepochs` passes?

    If not, no process has a limit: their limits differ by one at most, and their numbers of samples by more."""
    return nresults>0 and (nepochs<1 or size is None or size*nepochs>nresults)

def _repeat_stage(upstream, run, nepochs, nresults):
    """The pairs `(origin, sample)` of `upstream(k)`, which is pass `k`, for `nepochs` passes; below 1: endlessly

    Unless `nresults` is below 1, all processes together yield at most so many. Raises `ValueError` if an endless repeat
    has an empty pass."""
    limit = run.consumer.share(nresults) if _is_limited(run.size, nepochs, nresults) else None
    if nepochs<1: pairs = endless(upstream, run.consumer)
    else: pairs = itertools.chain.from_iterable(map(upstream, range(nepochs)))
    return itertools.islice(pairs, limit)

def endless(
    upstream, # `upstream(k)` is an iterator of the samples of pass `k`
    consumer:Consumer,
    what:str='' # What is repeated, for the message
): # Yields samples
    "One pass after the other, without end; raises `ValueError` for an empty one"
    for k in itertools.count():
        sample = None
        for sample in upstream(k): yield sample
        if sample is None:
            raise ValueError(f'nothing to repeat{what} for worker {consumer.worker} of rank {consumer.rank}: no sample '
                             'of its share is left; are there fewer samples than workers and ranks together?')

def _shuffle_stage(upstream, run, bufsize, initial):
    "Yields the pairs of `upstream(0)`, drawn from a buffer that starts with `initial` of them and grows to `bufsize`"
    rng,buffer = run.rng(),[]
    wanted = min(initial, bufsize)   # results in the buffer before the next one is given
    for pair in upstream(0):
        buffer.append(pair)
        if len(buffer)<wanted: continue
        yield _drawn(buffer, rng)
        wanted = min(wanted+1, bufsize)
    while buffer: yield _drawn(buffer, rng)

def _drawn(buffer, rng):
    "Removes an element of the list `buffer`, drawn at random, and returns it; changes the order of the others"
    k = int(rng.integers(len(buffer)))
    buffer[k],buffer[-1] = buffer[-1],buffer[k]
    return buffer.pop()

def _rsample_stage(upstream, run, p):
    rng = run.rng()
    return (pair for pair in upstream(0) if rng.random()<p)

def batches_of(
    samples, # Iterator
    bs:int, # Samples per batch
    collate, # `collate(list)` -> batch; `None` leaves lists
    partial:bool # Keep a last batch that is smaller?
): # Yields batches
    "The samples in batches"
    while batch:=list(itertools.islice(samples, bs)):
        if len(batch)==bs or partial: yield batch if collate is None else collate(batch)

def _batched_stage(upstream, run, *options):
    return ((None,batch) for batch in batches_of((sample for _,sample in upstream(0)), *options))

def _unlisted_stage(upstream, run):
    "Yields `(None, element)` for each element of the lists of `upstream(0)`; raises `TypeError` for what is no list"
    for _,samples in upstream(0):
        if not isinstance(samples, list):
            raise TypeError(f'unlisted takes lists of samples, as listed makes them, not a {type(samples).__name__}')
        yield from ((None,sample) for sample in samples)

def _unbatched_stage(upstream, run):
    """Yields `(None, sample)` for each sample of the batches of `upstream(0)`: tuples, lists or dicts of columns

    A sample is a tuple or a dict. Raises `TypeError` for other batches, `ValueError` if columns differ in length."""
    def is_column(o): return not isinstance(o, (str,bytes,dict)) and hasattr(o, '__len__') and getattr(o, 'ndim', 1)>0
    for _,batch in upstream(0):
        is_dict = isinstance(batch, dict)
        if not is_dict and not isinstance(batch, (list,tuple)):
            raise TypeError(f'unbatched takes a tuple, list or dict of columns, not a {type(batch).__name__}')
        columns = list(batch.values() if is_dict else batch)
        wrong = [column for column in columns if not is_column(column)]
        if wrong: raise TypeError(f'unbatched takes batches; a {type(wrong[0]).__name__} is no column of one')
        sizes = {len(column) for column in columns}
        if len(sizes)>1: raise ValueError(f'unbatched: columns of different lengths {sorted(sizes)}')
        for row in zip(*columns): yield None,dict(zip(batch, row)) if is_dict else row

def _log_keys_stage(upstream, run, path):
    """Yields the pairs of `upstream(0)`, and appends a line for each to the file at `path`

    The line has, separated by tabs, the position of the sample, from 0 in each iteration of this process; the worker;
    the rank; and the key of the sample, or else its number, or 'None' if that is not known either."""
    with open(path, 'a', encoding='utf-8', buffering=1) as f:   # line by line
        for k,(origin,sample) in enumerate(upstream(0)):
            key = sample.get('__key__') if isinstance(sample, dict) else None
            if key is None and origin is not None: key = origin[1]
            f.write(f'{k}\t{run.consumer.worker}\t{run.consumer.rank}\t{key}\n')
            yield origin,sample

def _compose_stage(upstream, run, f):
    """Iterator of `(None, result)` for each result of `f` for the samples of `upstream(0)`

    `f` is a function of an iterator that returns an iterator, or a `PipelineStage` of WebDataset."""
    samples = (sample for _,sample in upstream(0))
    return ((None,result) for result in (f(samples) if callable(f) else f.run(samples)))

_stages = dict(slice=_slice_stage, repeat=_repeat_stage, shuffle=_shuffle_stage, rsample=_rsample_stage,
               batched=_batched_stage, unlisted=_unlisted_stage, unbatched=_unbatched_stage, log_keys=_log_keys_stage,
               compose=_compose_stage)

def _sample_stage(upstream, step):
    "Yields the pairs of `upstream(0)` with the results of `step`, without those it leaves out; a handler may end it"
    for origin,sample in upstream(0):
        store,number = origin or (None,None)
        result = run_steps(store, number, sample, (step,))
        if not isinstance(result, Dropped): yield origin,result
        elif result.stops: return

# --- Methods

# `Pipeline` has the methods of datasets and streams. Steps that process one sample are added by `_then`. All others
# need a stream, which `as_stream` returns.
#
# The arguments are those of WebDataset. What differs is described in the guide: see the table in training.

def _group(field):
    "`field`, which is a group such as `jpg;png` or a list of names, as a group; raises `TypeError` for anything else"
    names = field if isinstance(field, (list,tuple)) else [field]
    if all(isinstance(name, str) for name in names): return ';'.join(names)
    raise TypeError(f"a field is a name such as 'jpg', or a list of names, not {field!r:.100}")

def _checked_pairs(pairs, what):
    "`pairs` as a list; raises `TypeError`, which begins with `what`, for one that is no tuple or list of two"
    wrong = [pair for pair in pairs if not isinstance(pair, (tuple,list)) or len(pair)!=2]
    if wrong: raise TypeError(f'{what}, not {wrong[0]!r}')
    return list(pairs)

class Pipeline:
    "The methods of WebDataset, for `RemoteDataset` and for streams. Each returns a new dataset or stream."
    def _then(self, step): raise NotImplementedError
    def as_stream(self)->'RemoteStream':
        "The stream that the methods add steps to"
        raise NotImplementedError

    def __enter__(self): return self
    def __exit__(self, *exc): "Nothing has to be closed: WebDataset's `with` is accepted"

    # Each sample by itself

    def decode(self,
        # What images become: `pil`, `pill`, `rgb8`, `torchrgb`, …; or functions `decoder(key, data)`, of which the
        # first result that is not `None` is used; default: what the codec of the field makes
        *decoders,
        pre:list=None, # Decoders that are called before these; default: one that decompresses `.gz` fields
        post:list=None, # Decoders that are called after these; default: the codecs of the fields
        only=None, # Names of the fields to decode, a list or separated by spaces; default: all
        partial:bool=False, # For WebDataset's scripts: values that are decoded already are always left as they are
        handler=None # `handler(error)`, called if a value cannot be decoded; default: raise the error
    ):
        "Turn bytes into objects. Labels stay numbers. Raises `ValueError` for an unknown spec."
        return self._then(decode_step(decoders, pre, post, only, handler))

    def to_tuple(self,
        *fields:str, # Names of fields; for `jpg;png` the first that a sample has; for `txt?` `None` if it has none
        handler=None, # `handler(error)`, called if a sample lacks a field; default: raise the error
        missing_is_error:bool=True, # Otherwise a field that a sample lacks is `None`
        none_is_error:bool=False # Is a value that is `None` an error, too?
    ):
        """Make a tuple of `fields`, or of `__key__` and `__url__`

        If it is the first step, or only `decode` comes before, only these are read, and a field that the store has not
        raises `UnknownField`."""
        if len(fields)==1 and isinstance(fields[0], str): fields = fields[0].split()
        options = {} if missing_is_error else dict(missing_is_error=False)
        if none_is_error: options['none_is_error'] = True
        return self._then(Step('to_tuple', *map(_group, fields), handler=handler, **options))

    def map_tuple(self,
        *fs, # One function for each element of the tuple; `None` leaves an element as it is
        handler=None # `handler(error)`, called if a function fails; default: raise the error
    ):
        "Call each of `fs` with its element of the tuple"
        return self._then(Step('map_tuple', *fs, handler=handler))

    def map(self,
        f, # `f(sample)`; samples for which it returns `None` are left out
        handler=None # `handler(error)`, called if `f` fails; default: raise the error
    ):
        """Call `f` with the sample: a dict, or what the steps before made of it

        The length of a `RemoteDataset` still counts samples that are left out. They are left out when it is iterated
        over or loaded in batches. `dataset[i]` raises `ValueError` for one of them."""
        return self._then(Step('map', f, handler=handler))

    def map_dict(self,
        handler=None, # `handler(error)`, called if a function fails; default: raise the error
        **functions # A function for each of some fields
    ):
        "Call the function of each field with its value. Raises `KeyError` for a sample without the field."
        if not functions: raise ValueError('map_dict takes functions by name, such as map_dict(jpg=f)')
        shown = [f"{field}={getattr(f, '__name__', f)}" for field,f in functions.items()]
        return self._then(Step('map_dict', functions, handler=handler, shown=shown))

    def rename(self,
        handler=None, # `handler(error)`, called if a sample lacks a field; default: raise the error
        keep:bool=True, # Keep the other fields?
        **names # New names and the fields to rename: `image='jpg;png'` takes the first that a sample has
    ):
        "Rename fields. Raises `UnknownField`, and `MissingSample` for a sample that has none of the fields."
        names = {new:_group(field) for new,field in names.items()}
        shown = [f'{new}={group!r}' for new,group in names.items()]
        return self._then(Step('rename', keep, names, handler=handler, shown=shown))

    def rename_keys(self,
        *patterns, # Pairs of a new name and a pattern, such as `('image', 'jp*g')`; the last that matches is used
        keep_unselected:bool=False, # Keep the other fields?
        must_match:bool=True, # Is it an error if no field matches a pattern?
        duplicate_is_error:bool=True, # Is it an error if two fields get the same name? Otherwise the first is kept
        handler=None, # `handler(error)`; default: raise the error
        **names # New names and patterns
    ):
        "Rename the fields whose names match patterns of `fnmatch`. Raises `ValueError`."
        pairs = [*_checked_pairs(patterns, "rename_keys takes pairs such as ('image', 'jp*g')"), *names.items()]
        return self._then(Step('rename_keys', pairs, keep_unselected, must_match, duplicate_is_error, handler=handler))

    def extract_keys(self,
        *patterns:str, # Patterns of `fnmatch`, with alternatives: `*.jpg;*.png`
        duplicate_is_error:bool=True, # Is it an error if several fields match a pattern? Otherwise the first is used
        ignore_missing:bool=False, # Leave out patterns that match no field?
        handler=None # `handler(error)`; default: raise the error
    ):
        "Make a tuple of the values whose fields match `patterns`. Raises `ValueError` as these arguments say."
        return self._then(Step('extract_keys', *patterns, duplicate_is_error=duplicate_is_error,
                               ignore_missing=ignore_missing, handler=handler))

    def xdecode(self,
        # Pairs of a pattern of `fnmatch` and a function of a binary file, or `False`, which leaves the bytes; the last
        # that matches is used
        *decoders,
        must_decode:bool=True, # Is it an error if bytes have neither a decoder nor a codec?
        handler=None, # `handler(error)`; default: raise the error
        **functions # The same by extension: `png=imread`
    ):
        "Decode bytes by the name of their field, or else by the codec of that name. Raises `ValueError` without both."
        pairs = _checked_pairs(decoders, "xdecode takes pairs such as ('*.png', imread)")
        pairs += [(f'*.{extension}', f) for extension,f in functions.items()]
        return self._then(Step('xdecode', pairs, must_decode, handler=handler))

    # The samples together

    def select(self,
        predicate, # `predicate(sample)` -> keep it?
        handler=None # `handler(error)`, called if `predicate` fails; default: raise the error
    ):
        "A stream of the samples for which `predicate` is true"
        return self.as_stream()._then(Step('select', predicate, handler=handler))

    def shuffle(self,
        bufsize:int=1000, # Results that are drawn from together, where a buffer is needed; below 1: no shuffling
        initial:int=100, # Results in the buffer before the first is given
        seed:int=None, # Seed of the stream's orders, one for all ranks; default: that of the dataset
        rng=None, # As `seed`: a `random.Random` from which it is drawn, in the same state on all ranks
        interleave:int=4, # If the store has shards: number of them that are shuffled together; `None`: all
    ):
        """A stream in random order, another one in each epoch

        The samples of a store are shuffled before they are read, all of them, or all of `interleave` shards, so the
        buffer is not used. After methods such as `unbatched` there are other samples, which are shuffled in a buffer
        of `bufsize`, as in WebDataset."""
        if bufsize<1: return self
        if rng is not None: seed = rng.getrandbits(62)
        stream = self.as_stream()
        if seed is not None: stream = stream._with(seed=seed)
        source = None if stream.stages else stream.source.shuffled(interleave)
        if source is not None: return stream._with(source=source)
        return stream._staged('shuffle', bufsize, initial)

    def slice(self,
        *bounds:int # `stop`, or `start, stop`, or `start, stop, step`; start and stop at least 0, `None` for no bound
    ):
        """Some of the samples of an epoch, by their positions

        The positions count all ranks and workers together. Once a step may leave out samples, and after a method other
        than `shuffle` that has made a stream, such as `repeat`, samples are counted as they come. That needs a single
        process that reads, otherwise iterating raises `ValueError`."""
        bounds = _checked_bounds(bounds)
        stream = self.as_stream()
        source = None if stream.stages else stream.source.sliced(slice(*bounds))
        return stream._staged('slice', *bounds) if source is None else stream._with(source=source)

    def repeat(self,
        nepochs:int=-1, # Passes over the samples, each in its own random order; below 1: endless
        nbatches:int=-1 # At most this many results, of all ranks and workers together; below 1: all
    ):
        "A stream that goes over the samples several times in an epoch"
        return self.as_stream()._staged('repeat', nepochs, nbatches)

    def with_epoch(self,
        nsamples:int=-1, # Results per epoch, of all ranks and workers together
        nbatches:int=-1 # The same, for streams of batches
    ):
        """A stream with an epoch of exactly so many results: the samples are repeated, or the rest is left out

        Each epoch begins with a new pass. All ranks give equally many results if the number of ranks divides the
        number of results. A worker without any sample raises `ValueError`."""
        n = max(nsamples, nbatches)
        if n<1: raise ValueError(f'with_epoch takes a number of results of at least 1, not {n}')
        return self.as_stream()._staged('repeat', -1, n, shown=(n,), name='with_epoch')

    def with_length(self,
        n:int, # What `len` returns
        silent:bool=True # For WebDataset's scripts: there is no warning
    ):
        "A stream of the same samples, whose `len` is `n` whatever its number of samples"
        return self.as_stream()._with(length=n)

    def batched(self,
        bs:int=64, # Results per batch
        collate=default_collate, # `collate(list)` -> batch; `None` leaves lists
        partial:bool=True, # Keep a last batch that is smaller? Each worker has one
        collation_fn=default_collate, # WebDataset's name for `collate`
        batchsize:int=None, # WebDataset's name for `bs`
    ):
        "A stream of batches, which each worker makes of its own samples"
        bs,collate = batch_arguments(bs, collate, collation_fn, batchsize)
        stream = self.as_stream()
        known = None if stream.stages else stream.source.in_batches(stream, bs, collate, partial)
        return stream._staged('batched', bs, collate, partial) if known is None else known

    def listed(self,
        batchsize:int, # Results per list
        partial:bool=True # Keep a last list that is shorter?
    ):
        "A stream of lists, which are not collated"
        bs,_ = batch_arguments(batchsize, None, default_collate, None)
        return self.as_stream()._staged('batched', bs, None, partial, shown=(bs,), name='listed')

    def unbatched(self):
        "A stream of the samples of batches, which are tuples, lists or dicts of columns"
        return self.as_stream()._staged('unbatched')

    def unlisted(self):
        "A stream of the elements of lists"
        return self.as_stream()._staged('unlisted')

    def rsample(self,
        p:float=.5 # Probability of keeping a sample
    ):
        "A stream of samples that are drawn at random, without repeats"
        if not 0<=p<=1: raise ValueError(f'rsample takes a probability in 0..1, not {p}')
        return self.as_stream()._staged('rsample', p)

    def log_keys(self,
        logfile:str=None # A file, to which all processes append; default: none
    ):
        "A stream that writes a line for each sample: its position in the worker, worker, rank and key"
        return self.as_stream()._staged('log_keys', str(logfile)) if logfile else self

    def compose(self,
        *stages # Functions of an iterator of samples that return an iterator, or stages of WebDataset
    ):
        "A stream that passes through functions of your own; each process calls them with its share of the samples"
        stream = self.as_stream()
        for stage in stages:
            if not callable(stage) and not callable(getattr(stage, 'run', None)):
                raise TypeError(f'compose takes functions of an iterator, not a {type(stage).__name__}')
            stream = stream._staged('compose', stage)
        return stream

def batch_arguments(bs, collate, collation_fn, batchsize):
    """`(bs, collate)` of `batched`, which both have two names: `batchsize` and `collation_fn` come first if given

    Raises `ValueError` if `bs` is below 1."""
    bs = bs if batchsize is None else batchsize
    if bs<1: raise ValueError(f'want bs of at least 1, not {bs}')
    return bs,collate if collation_fn is default_collate else collation_fn

def _checked_bounds(bounds):
    """`bounds`, the tuple of arguments of `slice`

    Raises `ValueError` unless each of 1 to 3 is `None` or an int of at least 0, and a step of at least 1."""
    is_good = all(bound is None or isinstance(bound, (int,np.integer)) and bound>=0 for bound in bounds)
    if not 1<=len(bounds)<=3 or not is_good or bounds[2:]==(0,):
        raise ValueError(f'slice takes stop, or start, stop and step, ints of at least 0, or 1 for step, not {bounds}')
    return bounds

# --- The stream

# A stream has a source and stages. The source knows its random order for each epoch, and its share for each process. An
# epoch's order depends on the seed, the number of the epoch, the ranks and the workers only, so all processes agree
# without speaking to each other.
#
# Without a `seed`, torch's generator decides: each epoch has a new order, and `torch.manual_seed` repeats it. With a
# `seed` or several ranks, the order depends on the seed and on the number of the epoch, which `set_epoch` sets before
# each epoch. If that was forgotten, the second epoch would repeat the first one. Then there is an error if there are
# several ranks, and a warning otherwise. The number of the epoch is in shared memory, where persistent workers see it.

_changes_number = 'slice','rsample','batched','unlisted','unbatched','compose'
_SLOTS = 512   # workers of a rank of which a stream notices that they begin an epoch again

class StreamInput:
    "Where the samples of a stream come from"
    is_random = False # Does its order depend on the key?
    vocabs = {} # `{field: labels in the order of their codes}` of the samples; `None` for fields of whole numbers

    def run(self, key:tuple, consumer:Consumer):
        """The share of `consumer`: an iterator of `(origin, sample)`; the random order depends on `key`, ints

        `origin` is `(store, sample number)`, or `None` if it is not known."""
        raise NotImplementedError

    def count(self, rank:int, world_size:int)->int:
        "The number of samples of a rank in an epoch; `None` if it is not known, infinity if there is no end"

    def then(self, step:Step):
        "A source with one more step for each sample, or `None`: the step becomes a stage"
    def shuffled(self, interleave:int):
        "A source in random order, or `None`: a buffer is used"
    def sliced(self, part:slice):
        "A source of a part of the samples, or `None`: they are counted as they come"

    def in_batches(self, stream, *args):
        "A dataset of batches whose number is known, or `None`: batches are a stage. `args` are `bs, collate, partial`."

class RemoteStream(Pipeline, Epochs, IterableDataset):
    """Samples one after the other, for a torch `DataLoader`: every sample once in an epoch, over all ranks and workers

    Methods of a `RemoteDataset` make it, and `mix`."""
    def __init__(self,
        source:StreamInput, # Where its samples come from
        seed:int=None, # Seed of the orders, one for all ranks; default: 0 on several ranks, else drawn from torch
        rank:int=None, # This rank; default: as `torch.distributed` or the environment of `torchrun` says
        world_size:int=None # Number of ranks; default: as `rank`
    ):
        super().__init__(seed, rank, world_size)
        self.source,self.stages,self.length = source,(),None
        # For each worker: how many calls of `set_epoch`, plus 1, there were when it last began an epoch; 0: it has none
        self.begun = SharedNumbers(_SLOTS)

    def __repr__(self): return repr(self.source)+''.join(map(repr, self.stages))

    def __getitem__(self, i):
        raise TypeError(f'{self!r} has no positions: iterate over it, or take dataset[i] before the method that made a '
                        'stream of the dataset')

    def as_stream(self): return self

    def _with(self, **attributes):
        """A copy with other `attributes`; its `length` is unknown, unless `attributes` contain it

        Both have the same seed, and share the number of the epoch: `set_epoch` of one of them holds for the other."""
        result = RemoteStream.__new__(RemoteStream)
        result.__dict__.update(vars(self) | dict(length=None, begun=SharedNumbers(_SLOTS)) | attributes)
        return result

    def _then(self, step):
        source = None if self.stages else self.source.then(step)
        change = dict(stages=(*self.stages, step)) if source is None else dict(source=source)
        return self._with(length=None if step.may_drop else self.length, **change)

    def _staged(self, stage, *args, name=None, shown=None):
        "A copy with one more stage, a key of `_stages`, and its arguments; `name` and `shown` are what `repr` shows"
        return self._with(stages=(*self.stages, Step(stage, *args, shown=shown, label=name)))

    def __iter__(self):
        worker,num_workers = this_worker()
        self._check_epoch(worker)
        return EpochIterator(self, worker, num_workers)

    def results(self, key, consumer, first):
        "Yields results; those before number `first` are read again, as nobody knows which samples they had"
        results = (sample for _,sample in self.start(key, consumer))
        given = sum(1 for _ in itertools.islice(results, first))
        if given<first:
            raise ValueError(f'{self!r}: this state is of an epoch that had at least {first} results in this process, '
                             f'and now there are {given}')
        yield from results

    def _check_epoch(self, worker):
        "If `set_epoch` was forgotten, raise `ValueError` if there are several ranks, and warn otherwise"
        slot,now = worker%_SLOTS,self.numbers[1]+1
        is_again,self.begun[slot] = self.begun[slot]==now,now
        if not is_again or not self.is_random or self.seed is None and self.world_size==1: return
        text = (f'{self!r}: this epoch has the same random order as the last one: call set_epoch(epoch) before each '
                'epoch')
        if self.world_size>1: raise ValueError(f'{text}, as there are {self.world_size} ranks')
        warnings.warn(f'{text}, as the stream has a seed', stacklevel=3)

    @property
    def is_random(self)->bool:
        "Does the order of an epoch depend on random numbers?"
        return self.source.is_random or any(stage.name in ('shuffle','rsample') for stage in self.stages)

    def start(self,
        key:tuple, # What random numbers depend on
        consumer:Consumer,
        depth:int=None # Stages to run; default: all
    ): # Iterator of `(origin, sample)`, as of `StreamInput.run`
        "The results of one process in an epoch"
        depth = len(self.stages) if depth is None else depth
        if not depth: return iter(self.source.run(key, consumer))
        stage = self.stages[depth-1]
        def upstream(k): return self.start((*key, depth, k) if k else key, consumer, depth-1)
        if stage.is_for_samples: return _sample_stage(upstream, stage)
        run = Run(consumer, key, depth, self._size(consumer.world_size, depth-1))
        return iter(_stages[stage.name](upstream, run, *stage.args))

    def __len__(self):
        "The number of results of this rank in an epoch; raises `TypeError` if it is not known"
        if self.length is not None: return self.length
        n = self.count(*self.ranks)
        if n is None or n==float('inf'):
            raise TypeError(f'the length of {self!r} is not known before the epoch has ended; with_length(n) sets '
                            'what len returns, and with_epoch(n) makes epochs of n results')
        return n

    def _size(self, world_size, depth):
        "The number of results of all ranks together after `depth` stages, in one pass; `None` if it is not known"
        counts = [self.count(rank, world_size, depth) for rank in range(world_size)]
        return None if None in counts else sum(counts)

    def count(self,
        rank:int, # A rank
        world_size:int, # Number of ranks
        depth:int=None # Stages that count; default: all
    )->int:
        "The number of results of a rank in an epoch; `None` if it is not known, infinity if there is no end"
        n = self.source.count(rank, world_size)
        for k,stage in enumerate(self.stages[:depth]):
            if stage.name=='repeat':
                nepochs,limit = stage.args
                n = float('inf') if nepochs<1 else None if n is None else n*nepochs
                # With a limit and an end, a worker may have fewer samples than its part of the limit
                if _is_limited(self._size(world_size, k), nepochs, limit):
                    n = share_of(limit, rank, world_size) if n==float('inf') else None
            elif stage.may_drop or stage.name in _changes_number: n = None
        return n
