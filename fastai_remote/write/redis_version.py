"""New versions of datasets in Redis, which share what has not changed with the version before

Docs: page `write/redis_version`"""

# Values are never changed after their dataset has become visible. `RedisStore.append`, `edit`, `add_fields` and
# `drop_fields` make a new version: what is new is written as a part, with keys of its own, by an ordinary ingest, which
# can be interrupted and continued. Its commit replaces the manifest. (Decision note 0027.)

import uuid

import numpy as np

from .redis_state import value_keys
from .revision import NewVersion

MAX_UNUSED = 100_000   # ranges of keys that an edit frees; what is beyond stays until the dataset is copied or deleted

class RedisVersion(NewVersion):
    "The next version of a dataset in Redis"
    def __init__(self, store):
        super().__init__(store)
        self.manifest.uid = uuid.uuid4().hex
        # Keys that only the version before uses, and those that nobody uses any more, as `value_keys` returns them
        self.before,self.dropped = [],[]
        self._mean_bytes = {}

    def mean_bytes(self,
        field:str, # A variable-width field
        n:int=256 # How many samples to look at, at most
    )->float:
        """Returns the mean bytes of a value of a field, measured on up to `n` samples; a missing value counts as empty

        Further calls for the same field return the same number."""
        if field not in self._mean_bytes:
            numbers = np.unique(np.linspace(0, len(self.store)-1, n).astype(np.int64))
            keys = [key for part,_,places in self.store.groups(numbers, field)
                    for key in part.layout.values(field, places.tolist())]
            self._mean_bytes[field] = sum(self.store.link.send([('STRLEN', key) for key in keys]))/len(keys)
        return self._mean_bytes[field]

    def free(self,
        numbers:np.ndarray, # Sample numbers of the version before, ascending
        fields # Fields whose values are not needed any more
    ):
        """Adds the keys of values that are not needed any more to `before`, as long as `MAX_UNUSED` allows

        Subtracts about their bytes from `manifest.nbytes`. Fixed-width values stay where they are."""
        for field in fields:
            if self.fields[field]['dtype'] is not None: continue
            self.subtract_bytes(round(self.mean_bytes(field)*len(numbers)))
            for part,_,places in self.store.groups(numbers, field):
                self._free_values(part.layout, field, np.sort(places))

    def _free_values(self, layout, field, numbers):
        """Adds the keys of `field` at the places `numbers` of a part, ascending and not empty, to `before`

        Does nothing if there would be more than `MAX_UNUSED` ranges. `layout` is the `key_layout` of the part."""
        ends = np.flatnonzero(np.diff(numbers)!=1)+1
        firsts,stops = numbers[[0,*ends]],numbers[[*(ends-1), len(numbers)-1]]+1
        if len(self.before)+len(firsts)*len(layout.starts)>MAX_UNUSED: return
        n_tags = len(layout.starts)
        for first,stop in zip(firsts.tolist(), stops.tolist()):
            for k,start in enumerate(layout.starts):
                begin = first+(k-first)%n_tags   # a tag has every n-th number
                if begin<stop: self.before.append([f'{start}:{field}:', begin, stop, n_tags])

    def forget(self, fields):
        for field in fields:
            n,dtype = len(self.store),self.fields[field]['dtype']
            if dtype is None: self.subtract_bytes(round(self.mean_bytes(field)*n))
            elif not field.endswith('.crc'): self.subtract_bytes(n*np.dtype(dtype).itemsize)
        for part in self.store.parts:
            dropped = {field:spec for field,spec in part.fields.items() if field in fields}
            self.dropped += value_keys(part.layout, dropped, part.n_places)[2:]   # without its failures and gaps

    @property
    def tables_key(self): return f"{self.store.manifest_key.removesuffix(':meta')}:~runs@{self.manifest.uid}#0"
