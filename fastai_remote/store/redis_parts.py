"""The keys of a dataset in Redis, and how the values of its parts are read from them

Docs: page `store/redis_parts`"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from redis.crc import key_slot, REDIS_CLUSTER_HASH_SLOTS
from zlib_ng.zlib_ng import crc32

from ..core import Manifest, packed_crcs
from .parts import Part, PartRequest
from .redis_link import fill_places, RedisLink

# --- Packed fields

# A label in a key of its own would take 60 bytes for one byte. So numbers are packed: one key contains the values of
# 2²⁴ samples. `BITFIELD_RO` reads any of them in one command. It supports integers of up to 64 bits; floats are read as
# integers of the same width.
#
# One flipped bit changes a label into another valid label. So a crc32 follows each value, computed over the value and
# its sample number. Value and checksum are read as one integer, or as two where the value has 8 bytes. The field's
# entry in the manifest then contains `'check':'u4'`. Datasets of format 1 have no such checksums. (Decision note 0018.)

# --- Keys in a cluster

# A cluster places a key by a hash of its hash tag, the part in braces. Values that shall be read by one command must
# have the same tag. So a dataset in a cluster uses a small number of tags, at least 12, whose places are spread evenly
# over those of the cluster: `{drawings.3}:strokes:27` is sample 27, with the tag of all samples with the same
# remainder. The keys that describe the dataset are together under the tag `{drawings}`. A dataset on a single server
# has no tags.

KEY_BITS = 24   # a key of a packed field contains the values of 2**24 samples

@cache
def _bitfield_type(dtype):
    "BITFIELD's name of an integer type as wide as `dtype`, and its numpy type: `('u16', np.dtype('u2'))` for 'f2'"
    dtype = np.dtype(dtype)
    kind = 'i' if dtype.kind=='i' or dtype.itemsize==8 else 'u'
    return f'{kind}{8*dtype.itemsize}', np.dtype(f'{kind}{dtype.itemsize}')

def _even_tags(prefix, n):
    "`n` hash tags, a list of `str` such as 'pets@7c1.17', whose slots are spread evenly over those of a cluster"
    tags,number = {},0
    while len(tags)<n:
        tag = f'{prefix}.{number}'
        tags.setdefault(key_slot(tag.encode())*n//REDIS_CLUSTER_HASH_SLOTS, tag)
        number += 1
    return [tags[k] for k in range(n)]

class _KeyLayout:
    """The names of the keys of one version of a dataset

    On a single server they all begin with the same prefix. In a cluster those of values begin with one of several hash
    tags, for example `{drawings.3}`: keys with the same tag are on the same node, and one command can read several of
    them."""
    def __init__(self,
        prefix:str, # `prefix` of the manifest
        tags:int=0 # `tags` of the manifest: the number of hash tags; 0 for a single server
    ):
        self.prefix,self.tags = prefix,tags
        self.starts = [f'{{{tag}}}' for tag in _even_tags(prefix, tags)] if tags else [prefix]
        base,at,ingest = prefix.partition('@')
        home = f'{{{base}}}{at}{ingest}' if tags else prefix
        self.failures,self.gaps = f'{home}:~failures#0',f'{home}:~gaps#0' # Keys of what is known about the samples

    def values(self, field, numbers)->list:
        "The keys of the values of `field` of the samples `numbers`, a list of ints, in their order"
        starts,n = self.starts,len(self.starts)
        if n==1: return [f'{self.prefix}:{field}:{i}' for i in numbers]
        return [f'{starts[i%n]}:{field}:{i}' for i in numbers]

    def packed(self, field, chunk)->str:
        "The key of the values of a fixed-width field, for the `1<<KEY_BITS` samples from `chunk<<KEY_BITS` on"
        starts = self.starts
        return f'{starts[(crc32(field.encode())+chunk)%len(starts)]}:{field}#{chunk}'

key_layout = cache(_KeyLayout) # The names of the keys of a dataset: of the same arguments, one object is kept

def element_size(
    entry:dict # The entry of a fixed-width field in the manifest
)->int:
    "Bytes of an element of a packed field: a value, and its checksum if it has one"
    return np.dtype(entry['dtype']).itemsize+(4 if entry.get('check') else 0)

@cache
def element_dtype(dtype)->np.dtype:
    "An element of a packed field with checksums: a structure with `value` and `crc`, big-endian"
    return np.dtype([('value', np.dtype(dtype).newbyteorder('>')), ('crc', '>u4')])

def packed_reads(
    layout, # `key_layout` of the dataset
    field:str, # Name of a fixed-width field
    dtype, # Type of its values
    numbers:np.ndarray, # Sample numbers, int64, shape (n,)
    check:str=None # 'u4' if a checksum follows each value
)->tuple: # Commands for `RedisLink.send`; what `unpack_replies` needs to know about them, a list
    "The commands that read `field` of the samples `numbers`"
    kind,raw_dtype = _bitfield_type(dtype)
    width = raw_dtype.itemsize
    size = width+4 if check else width
    # BITFIELD reads integers of up to 64 bits, unsigned ones of up to 63
    if check: kind = 'i64+u32' if width==8 else 'i64' if width==4 else f'u{8*size}'
    commands,reads,chunks = [],[],numbers>>KEY_BITS
    is_one = (chunks==chunks[:1]).all()   # `unique` takes much longer
    for chunk in chunks[:1].tolist() if is_one else np.unique(chunks).tolist():   # samples that share a key
        places = np.flatnonzero(chunks==chunk)
        key,positions = layout.packed(field, chunk),(numbers[places]&((1<<KEY_BITS)-1))
        first,last = int(positions.min()),int(positions.max())
        if last-first<8*len(positions):   # close together: copying a range is faster than naming each element
            commands.append(('GETRANGE', key, first*size, (last+1)*size-1))
        else:
            commands.append(('BITFIELD_RO', key, kind, positions.tolist()))
            # elements beyond the end are read as 0; a checksum of 0 reveals them
            if not check: commands.append(('STRLEN', key))
        reads.append((places, positions, first, key))
    return commands,reads

def unpack_replies(
    reads:list, # What `packed_reads` returned with the commands
    replies, # Iterator of replies; only those to the queued commands are taken from it
    dtype, # Type of the values
    n:int, # Number of values
    crcs:np.ndarray=None # Array to fill with the checksums, uint32, shape (n,), if there are checksums
)->tuple: # The values, shape (n,); list of places in it for which there is no value
    """The values that the commands of `packed_reads` ask for

    There is no value where the key is too short. In the middle of a key, a value that was never written is read as 0.
    With checksums, it is listed as well if BITFIELD has read it, and else it does not match its checksum. Without them,
    it cannot be told from a value of 0. Where a value is missing, the array has 0."""
    raw_dtype = _bitfield_type(dtype)[1]
    width = raw_dtype.itemsize
    size = width if crcs is None else width+4
    values,missing = np.zeros(n, raw_dtype),[]
    for places,positions,first,_ in reads:
        reply = next(replies)
        if isinstance(reply, bytes):   # of GETRANGE
            element = raw_dtype.newbyteorder('>') if crcs is None else element_dtype(raw_dtype)
            elements = np.frombuffer(reply, element, len(reply)//size)
            at = positions-first
            exists = at<len(elements)
            if not exists.all():
                missing += places[~exists].tolist()
                at,places = at[exists],places[exists]
            found = elements[at]
            if crcs is not None: crcs[places],found = found['crc'],found['value']
            values[places] = found
        elif crcs is None:
            values[places] = reply
            missing += places[(positions+1)*size>next(replies)].tolist()
        else:
            reply = np.array(reply, np.int64)   # pairs of integers, or one integer for both
            found,crc = (reply[::2],reply[1::2]) if width==8 else (reply>>32, reply&0xffffffff)
            values[places],crcs[places] = found,crc
            # an element that does not exist is read as 0; the checksum of a value is 0 only by a chance of 2**-32
            if not crc.all(): missing += places[(crc==0)&(found==0)].tolist()
    return values.view(np.dtype(dtype)), missing

# --- Reading parts
#
# A part of a dataset (parts) in Redis is a prefix of keys. `PartRead` has the commands that read values of some samples
# of a part, so that the commands for all parts of a batch are sent together.

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
        numbers,places = self.request.numbers,self.request.places
        result,n = {},len(places)
        for field,reads in self._reads.items():
            entry = self.request.part.fields[field]
            if entry['dtype'] is None:
                result[field] = fill_places(n, reads, replies)
                self.mean_bytes[field] = sum(map(len, filter(None, result[field])))/n
                continue
            crcs = np.zeros(n, np.uint32) if entry.get('check') else None
            found,missing = unpack_replies(reads, replies, entry['dtype'], n, crcs)
            values = found.astype(self.fields[field]['dtype'], copy=False)
            if crcs is not None:
                # The checksums under the numbers in the dataset, and with its type. One that does not match a value in
                # the part does not match it afterwards either, as both differ by the same bits
                if numbers is not places or values is not found:
                    crcs = packed_crcs(values, numbers)^crcs^packed_crcs(found, places)
                result[f'{field}.crc'] = crcs
            if missing:
                values = list(values)
                for k in missing: values[k] = None
            result[field] = values
        return result
