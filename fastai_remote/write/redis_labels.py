"""Replace the labels that workers have staged in Redis by codes

Docs: page `write/redis_labels`"""

# As in fastai, the vocabulary is the sorted list of the labels that occur, whether they are texts or integers. So the
# integers 3 and 7 are two classes, not eight. More than 2²⁰ distinct integers are not treated as classes; they are
# stored as numbers. If `vocab=` or the source names the classes, integers are codes of these names.

import hashlib

import numpy as np

from ..core import CorruptSample, packed_crcs, StoreError
from ..runs import GapTable
from ..store.redis_layout import element_size, key_layout, KEY_BITS, packed_reads, unpack_replies
from .redis_place import RedisPlace
from .redis_state import packed_writes

def label_hash(
    labels:list # Labels, `str`
)->np.ndarray: # `int64`, shape `(len(labels),)`
    "Returns a 64-bit hash of each label (BLAKE2b), as which it is staged"
    def digest(label): return hashlib.blake2b(label.encode(), digest_size=8).digest()
    return np.array([int.from_bytes(digest(label), 'big', signed=True) for label in labels], np.int64)

class RedisLabels:
    "Gives the labels of a dataset their codes, when its ingest is committed"
    def __init__(self,
        place:RedisPlace, # Of the dataset; its lock is held
        plan:dict, # The plan
        gaps:GapTable, # Of all places
        run:str # As in `RedisPlace.publish`
    ):
        self.place,self.plan,self.gaps,self.run = place,plan,gaps,run
        self.layout = key_layout(plan['prefix'], plan['tags'])

    def encode(self,
        field:str, # Whose labels are staged
        dtype:str, # Of the codes
        vocab:list # Labels in the order of their codes; `None`: integers that are stored as they are
    )->tuple: # Number of samples of each label, int64; places of samples whose label is not in `vocab`, int64
        """Writes the codes of a field; raises `CorruptSample` for damaged labels, and `StoreError` for lost ones

        A label that is in no record was written by another attempt than the one that has recorded its chunk. Raises
        `ValueError` if two labels have the same hash."""
        # codes of an earlier commit that did not end: it may have had a wider type
        keys = [self.layout.packed(field, key_number) for key_number in range((self.plan['n']>>KEY_BITS)+1)]
        self.place.lock.write([('UNLINK', key) for key in keys], self.run)
        spec,counts,unknown = self.plan['fields'][field],np.zeros(len(vocab or ()), np.int64),[np.zeros(0, np.int64)]
        encode = self._encoder(field, dtype, vocab)
        for places,staged in self._staged(field):
            codes,is_known = encode(staged)
            unknown.append(places[~is_known])
            first,stop = int(places[0]),int(places[-1])+1
            whole = np.zeros(stop-first, codes.dtype)   # places without a sample get zeros: one command writes all
            whole[places-first] = codes
            commands = packed_writes(self.layout, field, dtype, np.arange(first, stop), whole, spec.get('check'))
            self.place.lock.write(commands, self.run)
            if len(counts): counts += np.bincount(codes, minlength=len(counts))
        return counts,np.concatenate(unknown)

    def _encoder(self, field, dtype, vocab):
        "Returns a function that returns, for an array of staged values, their codes, and which of them have one"
        if vocab is None:
            limits = np.iinfo(dtype)
            return lambda values: (values, (values>=limits.min)&(values<=limits.max))
        hashes = label_hash(vocab) if isinstance(vocab[0], str) else np.array(vocab, np.int64)
        order = np.argsort(hashes)
        sorted_hashes = hashes[order]
        if len(np.unique(hashes))<len(hashes):
            raise ValueError(f'{self.place.name}: two labels of field {field!r} have the same hash; '
                             'name all labels in vocab=')
        def encode(values):
            at = np.searchsorted(sorted_hashes, values).clip(max=len(order)-1)
            return order[at],sorted_hashes[at]==values
        return encode

    def _staged(self, field, step=1<<19):
        """Returns an iterator of `(places, values)`, arrays, over the staged values of all samples, in parts

        A part has the samples of `step` places; `step` divides `2**KEY_BITS`, as a part is read from one key. Parts
        without samples are left out. When iterated, raises `CorruptSample` for a value that does not match its
        checksum, and `StoreError` if values are lost."""
        gaps = self.gaps
        starts = np.arange(0, gaps.n_places+step, step).clip(max=gaps.n_places)
        numbers = gaps.samples_before(starts).tolist()
        for first,stop in zip(numbers, numbers[1:]):
            if first==stop: continue
            places = gaps.places(np.arange(first, stop))
            yield places,self._read_staged(field, places)

    def _read_staged(self, field, places):
        "Returns the staged values of `places`, all in one key; raises as `_staged`"
        spec,crcs = self.plan['fields'][field],np.zeros(len(places), np.uint32)
        commands,reads = packed_reads(self.layout, f'{field}~', spec['dtype'], places, spec['check'])
        replies = iter(self.place.link.send(commands))
        values,missing = unpack_replies(reads, replies, spec['dtype'], len(places), crcs)
        advice = f'{self.place.how_to_abandon} drops what is there, then ingest again'
        if missing: raise StoreError(f'{self.place.name}: the server lost values of {field!r}: {advice}')
        bad = np.flatnonzero(packed_crcs(values, places)!=crcs)
        if not len(bad): return values
        at = int(places[bad[0]])
        key,offset = self.layout.packed(f'{field}~', at>>KEY_BITS),(at&((1<<KEY_BITS)-1))*element_size(spec)
        raise CorruptSample(f'{self.place.name}: the value of {field!r} for sample {at}, in key {key} at byte '
                            f'{offset:,}, in {self.place.url} is damaged: {advice}')
