"""Datasets in Redis that consist of several parts, because they were appended to or edited

Docs: page `store/redis_parts`"""

# A part of a dataset (parts) in Redis is a prefix of keys. `PartRead` has the commands that read values of some samples
# of a part, so that the commands for all parts of a batch are sent together.

from dataclasses import dataclass

import numpy as np

from ..core import Manifest, packed_crcs
from .parts import Part, PartRequest
from .redis_layout import element_size, KEY_BITS, key_layout, packed_reads, unpack_replies
from .redis_link import fill_places, RedisLink

# --- Parts

@dataclass(frozen=True)
class DatasetPart(Part):
    "Some samples of a dataset in Redis, or some of their fields, which were written at the same time"
    layout:object # `key_layout` of its keys
    fields:dict # As in the manifest
    n:int # Samples in it, also those that no run has any more
    failed:int # Samples of its source that could not be converted
    gaps:dict # As in the manifest

    @property
    def gaps_key(self)->str:
        "Key of the gap table"
        return self.layout.gaps

    def location(self, place, field):
        entry = self.fields[field]
        if entry['dtype'] is None: return f' in key {self.layout.values(field, [place])[0]}'
        offset = (place&((1<<KEY_BITS)-1))*element_size(entry)
        return f' in key {self.layout.packed(field, place>>KEY_BITS)} at byte {offset:,}'

    @property
    def n_places(self)->int:
        "Places in it, with and without a sample: values have these numbers"
        return self.gaps.get('places', self.n)

def parts_of(
    manifest:Manifest
)->list: # Of `DatasetPart`
    "The parts of a dataset; one, unless samples or fields were added or changed"
    return [DatasetPart(key_layout(part['prefix'], part['tags']), part['fields'], part['n'], part['failed'],
                        part.get('gaps', {})) for part in manifest.part_entries()]

# --- Reading fixed-width fields from several parts

# The checksum of a number includes its sample number, and its type may be narrower in one part than in another, as
# codes are when a dataset has more classes later. So checksums are translated when values are read.

class PartRead:
    "Reads fields of samples that are in the same part: the commands for it, and what becomes of their replies"
    def __init__(self,
        request:PartRequest, # What to read of a `DatasetPart`
        manifest:Manifest, # Of the dataset
        link:RedisLink, # The server
        mean_bytes:dict # `{field: mean bytes of the values that were read last}`, changed by `parse`
    ):
        self.request,self.fields,self.mean_bytes = request,manifest.fields,mean_bytes
        self.commands,self._reads = [],{} # For `RedisLink.send`; what is needed to understand the replies to them
        part,places,fields = request.part,request.places,manifest.fields
        usual = manifest.nbytes/max(manifest.n, 1) or 10_000   # not known if others wrote the values
        for field in dict.fromkeys(f if f in fields else f.removesuffix('.crc') for f in request.fields):
            entry = part.fields[field]
            dtype,check = entry['dtype'],entry.get('check')
            if dtype is not None: commands,reads = packed_reads(part.layout, field, dtype, places, check)
            else:
                keys = part.layout.values(field, places.tolist())
                commands,reads = link.value_reads(keys, mean_bytes.get(field, usual))
            self.commands += commands
            self._reads[field] = reads

    def parse(self,
        replies # Iterator of replies; only those to `commands` are taken from it
    )->dict: # `{field: values}`; lists with `None` where one is missing, also of a fixed-width field
        "The values that were read, and the checksums of fields that have them beside their values"
        result,n = {},len(self.request.places)
        for field,reads in self._reads.items():
            entry = self.request.part.fields[field]
            if entry['dtype'] is None:
                result[field] = fill_places(n, reads, replies)
                self.mean_bytes[field] = sum(map(len, filter(None, result[field])))/n
                continue
            crcs = np.zeros(n, np.uint32) if entry.get('check') else None
            found,missing = unpack_replies(reads, replies, entry['dtype'], n, crcs)
            values = found.astype(self.fields[field]['dtype'], copy=False)
            if crcs is not None: result[f'{field}.crc'] = self._translated(found, crcs, values)
            if missing:
                values = list(values)
                for k in missing: values[k] = None
            result[field] = values
        return result

    def _translated(self, found, crcs, values):
        """The checksums that values have under their numbers in the dataset, and with its type: uint32, shape (k,)

        `found` and `crcs` are the values and checksums of the part, and `values` those of the dataset, all of shape
        (k,). A checksum that does not match a value in the part does not match it afterwards either, as both differ by
        the same bits."""
        numbers,places = self.request.numbers,self.request.places
        if numbers is places and values is found: return crcs   # under the same numbers, and with the same type
        return packed_crcs(values, numbers)^crcs^packed_crcs(found, places)
