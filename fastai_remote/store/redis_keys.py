"""A dataset made of values that another program has written to Redis

Docs: page `store/redis_keys`"""

# Before this package, people wrote their own scripts to fill Redis. *Redis as a dataset for fast.ai*, a post in
# fastai's forum about the fifty million drawings of Quick, Draw!, stores one array per key (`np.savez_compressed`)
# under `train:orig:0`, `train:orig:1`, …, and one integer per key for the label. Such values need no ingest. Patterns
# of the keys and a number of samples make them a store, which works with the same blocks and loaders, and can be copied
# into a dataset of this package with `map` or `copy`.
#
# Such a dataset has no checksums. A flipped bit is not noticed if the value stays readable, or if a label turns into
# another one. `verify` says so. A copy has checksums of what was read.

import hashlib

import numpy as np

from ..codec.numbers import code_dtype
from ..core import CorruptSample, Manifest
from .connection import concealed
from .base import raise_missing
from .redis import RedisReader
from .redis_link import as_link
from .redis_parts import DatasetPart, PartRead

class _PatternLayout:
    "The names of keys that follow patterns, with the interface of `key_layout`"
    def __init__(self, patterns, splits, start): self.patterns,self.splits,self.start = patterns,splits,start
    def values(self, field, numbers):
        return [self.patterns[field].format(i-first+self.start, split=split)
                for i in numbers for split,(first,stop) in self.splits.items() if first<=i<stop]

class RedisKeysReader(RedisReader):
    "A dataset under keys that another program has written: field `x`, and `cls` for labels; it has no checksums"
    def __init__(self, url, x, y, n, codec='npz', vocab=None, start=0, image=True, **kwargs): # As in `from_keys`
        url,kwargs = concealed(url),concealed(kwargs)
        self.link = as_link(url, **kwargs)
        if y is not None and not vocab: raise ValueError('labels need a vocab: the names of 0, 1, 2, …')
        if y is None and vocab: raise ValueError(f'{x}: vocab= names labels; y=, the pattern of their keys, is missing')
        sizes = n if isinstance(n, dict) else {'':n}
        for pattern in (x,y):
            if pattern is not None: _check_pattern(pattern, list(sizes))
        if any(not isinstance(size, (int,np.integer)) or size<0 for size in sizes.values()):
            raise ValueError(f'{x}: n={n!r}: want the number of samples, or {{split: number of samples}}')
        ends = np.cumsum([0,*sizes.values()]).tolist()
        splits = {split:[first,stop] for split,first,stop in zip(sizes, ends, ends[1:])}
        self.name,self._layout,self._mean_bytes = x,_PatternLayout({'x':x, 'cls':y}, splits, start),{}
        image_codec = {'npz':'npzimg', 'npy':'npyimg'}.get(codec, codec)
        fields = {'x':{'codec':image_codec if image else codec, 'dtype':None}}
        if y: fields['cls'] = {'codec':'cls', 'dtype':code_dtype(len(vocab))}
        stored = {field:{**entry, 'dtype':None} for field,entry in fields.items()}   # labels are stored as texts
        self._parts = [DatasetPart(self._layout, stored, ends[-1], 0, {})]
        splits = {split:span for split,span in splits.items() if split}
        self._manifest = Manifest(x, ends[-1], fields, splits, {'cls':list(vocab)} if y else {})
        settings = repr((x, y, n, codec, vocab, start))
        self._uid = self._manifest.uid = hashlib.sha256(settings.encode()).hexdigest()[:32]

    def read_parts(self, requests, again=False):
        request, = requests
        numbers,read = request.numbers,PartRead(request, self.manifest, self.link, self._mean_bytes)
        result = read.parse(iter(self.link.send(read.commands)))
        if 'cls' in result:
            stored = result['cls']
            if None in stored: raise_missing(self, numbers, 'cls', stored)
            result['cls'] = np.array([self._code(i, v) for i,v in zip(numbers.tolist(), stored)],
                                     self.manifest.fields['cls']['dtype'])
        return [result]

    def _code(self, number, stored):
        "The label code of sample `number` in `stored`, the `bytes` in Redis; raises `CorruptSample`"
        if stored.isdigit() and len(stored)<16 and int(stored)<len(self.vocab): return int(stored)
        key, = self._layout.values('cls', [number])
        raise CorruptSample(f'{self.name}: sample {number}: {key} holds {stored[:20]!r}, '
                            f'not an int below {len(self.vocab)}')

    @property
    def unchecked(self)->list:
        "Names of all fields, as nothing has a checksum"
        return self.fields
    def check_rest(self):
        "Yields nothing: only values are stored"
        return iter(())
    def __getstate__(self): return dict(self.__dict__)

def _check_pattern(pattern, splits):
    """Raise `ValueError` unless `pattern` has `{}`, `{split}` if there are several `splits`, and nothing else in braces

    `{}` may have a format, such as `{:05}`. `splits` is a list of names; a single one may be '', and then `{split}` is
    an error."""
    def is_used(values):
        try: return len({pattern.format(number, split=split) for number,split in values})==2
        except (LookupError,ValueError,AttributeError): return False
    names_split = is_used([(1,'a'),(1,'b')])
    is_right = names_split if len(splits)>1 else not names_split or splits!=['']
    if is_used([(1,'a'),(2,'a')]) and is_right: return
    hint = ', and {split} where there are splits, n={split: number of samples}'
    raise ValueError(f'{pattern!r}: a pattern has {{}} for the number{hint}')
