"""Replace the labels that workers have staged in Redis by codes

Docs: page `write/redis_labels`"""

# As in fastai, the vocabulary is the sorted list of the labels that occur, whether they are texts or integers. So the
# integers 3 and 7 are two classes, not eight. More than 2²⁰ distinct integers are not treated as classes; they are
# stored as numbers. If `vocab=` or the source names the classes, integers are codes of these names.

import numpy as np

from ..codec.numbers import narrow
from ..core import CorruptSample, Manifest, packed_crcs, StoreError
from ..runs import GapTable
from ..store.redis_layout import element_dtype, element_size, key_layout, KEY_BITS
from .base import label_hash, labels_of_texts, MAX_CLASSES
from .redis_place import RedisPlace
from .redis_state import packed_writes, unseal_label

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

    def describe(self,
        manifest:Manifest, # Is changed: fields, vocabularies and counts of fields with labels
        known # `known(field)`: as `RedisWriter.known_labels`
    ):
        """Writes the codes of staged labels, and completes `manifest`

        Raises `CorruptSample` for damaged labels, `StoreError` for lost ones, and `ValueError` if two labels have the
        same hash."""
        for field,spec in self.plan['fields'].items():
            if spec.get('staged'): manifest.fields[field] = self._encode(field, spec, manifest, known(field))
            elif spec['codec']=='cls': manifest.counts[field] = self._count_codes(field, spec, manifest)
            elif spec['codec']=='labels' and field not in manifest.vocab:
                manifest.vocab[field] = labels_of_texts(self._labels(field))

    def _encode(self, field, spec, manifest, known):
        """Writes the codes of a staged field, and adds its vocabulary and counts to `manifest`

        Integers that get no codes, as in `_encoder`, are written themselves; then `manifest` stays as it is. `spec` is
        the entry of the field in the plan. Returns the one for the manifest, a dict of `codec`, `dtype` and, if values
        have checksums, `check`."""
        # codes of an earlier commit that did not end: it may have had a wider type
        keys = [self.layout.packed(field, key_number) for key_number in range((self.plan['n']>>KEY_BITS)+1)]
        self.place.lock.write([('UNLINK', key) for key in keys], self.run)
        vocab,dtype,encode = self._encoder(field, spec, known)
        counts = np.zeros(len(vocab or ()), np.int64)
        for places,staged in self._scan(f'{field}~', spec):
            codes = encode(staged)
            first,stop = int(places[0]),int(places[-1])+1
            whole = np.zeros(stop-first, codes.dtype)   # places without a sample get zeros: one command writes all
            whole[places-first] = codes
            commands = packed_writes(self.layout, field, dtype, np.arange(first, stop), whole, spec.get('check'))
            self.place.lock.write(commands, self.run)
            if len(counts): counts += np.bincount(codes, minlength=len(counts))
        if vocab is not None: manifest.vocab[field] = vocab
        if len(counts): manifest.counts[field] = counts.tolist()
        new_spec = dict(codec=spec['codec'], dtype=dtype, check=spec.get('check'))
        return {key:value for key,value in new_spec.items() if value}

    def _encoder(self, field, spec, known):
        """Returns `(vocab, dtype, encode)` for a staged field: the list of its labels, and the dtype of its codes

        `encode` returns the array of codes for an array of staged values. `vocab` is `None` for integers that are
        stored as they are: they are more than `MAX_CLASSES`, or the dataset that is extended stores them so. `dtype`
        is then that of the integers, and `encode` returns its argument."""
        labels = self._labels(field)
        if spec.get('text') and not labels: raise self._lost(f'labels of {field!r}')
        if not labels:
            dtype,integers = _distinct_integers(values for _,values in self._scan(f'{field}~', spec))
            if integers is None or known is None: return None,dtype,lambda values: values
            labels = integers.tolist()
        labels = list(dict.fromkeys([*known, *labels]))
        hashes = label_hash(labels) if isinstance(labels[0], str) else np.array(labels, np.int64)
        order = np.argsort(hashes)
        sorted_hashes = hashes[order]
        if len(np.unique(hashes))<len(hashes):
            raise ValueError(f'{self.place.name}: two labels of field {field!r} have the same hash; '
                             'name all labels in vocab=')
        def encode(values):
            at = np.searchsorted(sorted_hashes, values).clip(max=len(order)-1)
            if (sorted_hashes[at]!=values).any(): raise self._lost(f'labels of {field!r}')
            return order[at]
        return labels,narrow(0, len(labels)-1),encode

    def _labels(self, field):
        "Returns all labels of `field` as `put` got them, a sorted list of `str`; raises `CorruptSample`"
        key,labels = self.place.keys.labels(self.plan, field),[]
        for stored in self.place.link.call(lambda c: c.smembers(key)):
            try: labels.append(unseal_label(stored))
            except ValueError:
                raise self._damaged(f'label {stored[4:60]!r} of field {field!r}, in key {key},') from None
        return sorted(labels)

    def _count_codes(self, field, spec, manifest):
        "Returns how many samples have each label of `field`, whose vocabulary was given: a list in the order of codes"
        counts = np.zeros(len(manifest.vocab[field]), np.int64)
        for _,codes in self._scan(field, spec): counts += np.bincount(codes, minlength=len(counts))
        return counts.tolist()

    def _scan(self, field, spec, step=1<<19):
        """Returns an iterator of `(places, values)`, arrays, over the packed values of all samples, in parts

        A part has the samples of `step` places; `step` divides `2**KEY_BITS`, as a part is read from one key. Parts
        without samples are left out. `field` ends in `~` for staged values; `spec` is the entry of the field in the
        plan. When iterated, raises `CorruptSample` for a value that does not match its checksum, and `StoreError` if
        values are lost."""
        gaps = self.gaps
        starts = np.arange(0, gaps.n_places+step, step).clip(max=gaps.n_places)
        numbers = gaps.samples_before(starts).tolist()
        for start,first,stop in zip(starts.tolist(), numbers, numbers[1:]):
            if first==stop: continue
            places = gaps.places(np.arange(first, stop))
            yield places,self._read_packed(field, spec, start, places)

    def _read_packed(self, field, spec, start, places):
        "Returns the packed values of `places`, all in one key and none before place `start`; the rest is as in `_scan`"
        size,dtype,check = element_size(spec),np.dtype(spec['dtype']),spec.get('check')
        key,offset = self.layout.packed(field, start>>KEY_BITS),(start&((1<<KEY_BITS)-1))*size
        n_bytes,plain_field = (int(places[-1])+1-start)*size,field.removesuffix('~')
        raw = self.place.link.call(lambda c: c.getrange(key, offset, offset+n_bytes-1))
        if len(raw)!=n_bytes: raise self._lost(f'values of {plain_field!r}')
        elements = np.frombuffer(raw, element_dtype(dtype) if check else dtype.newbyteorder('>'))[places-start]
        values = (elements['value'] if check else elements).astype(dtype)
        bad = np.flatnonzero(packed_crcs(values, places)!=elements['crc']) if check else ()
        if not len(bad): return values
        at = int(places[bad[0]])
        raise self._damaged(f'the value of {plain_field!r} for sample {at}, in key {key} at byte '
                            f'{offset+(at-start)*size:,},')

    def _damaged(self, what):
        "The error which says that `what` is damaged, and how to abandon the ingest; `what` ends in a comma after a key"
        place = self.place
        return CorruptSample(f'{place.name}: {what} in {place.url} is damaged: {place.how_to_abandon} drops what is '
                             'there, then ingest again')

    def _lost(self, what):
        "The error which says that the server lost `what` (text), and what to do"
        place = self.place
        return StoreError(f'{place.name}: the server lost {what}; {place.how_to_abandon} drops what is there, then '
                          'ingest again')

def _distinct_integers(arrays):
    """Returns the narrowest dtype for all integers in `arrays`, a `str`, and the distinct ones, an ascending array

    The latter is `None` if there are more than `MAX_CLASSES`. `arrays` is an iterable of arrays that are not empty."""
    lowest,highest,distinct = 0,0,np.zeros(0, np.int64)
    for values in arrays:
        lowest,highest = min(lowest, int(values.min())),max(highest, int(values.max()))
        if distinct is not None: distinct = np.union1d(distinct, values)
        if distinct is not None and len(distinct)>MAX_CLASSES: distinct = None
    return narrow(lowest, highest),distinct
