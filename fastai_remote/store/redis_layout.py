"""The names of the keys of a dataset, and how fixed-width values are packed into them

Docs: page `store/redis_layout`"""
from functools import cache

import numpy as np
from redis.crc import key_slot, REDIS_CLUSTER_HASH_SLOTS
from zlib_ng.zlib_ng import crc32

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
    def __init__(self, prefix, tags):
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

@cache
def key_layout(
    prefix:str, # `prefix` of the manifest
    tags:int=0 # `tags` of the manifest: the number of hash tags; 0 for a single server
)->_KeyLayout:
    "The names of the keys of a dataset"
    return _KeyLayout(prefix, tags)

def element_size(
    entry:dict # The entry of a fixed-width field in the manifest
)->int:
    "Bytes of an element of a packed field: a value, and its checksum if it has one"
    return np.dtype(entry['dtype']).itemsize+(4 if entry.get('check') else 0)

def element_dtype(dtype)->np.dtype:
    "An element of a packed field with checksums: a structure with `value` and `crc`, big-endian"
    return np.dtype([('value', np.dtype(dtype).newbyteorder('>')), ('crc', '>u4')])

def _by_chunk(numbers):
    "List of `(chunk, places in numbers)` for samples that share a key, as in `packed`; the places are an int array"
    chunks = numbers>>KEY_BITS
    if len(chunks) and (chunks==chunks[0]).all(): return [(int(chunks[0]), np.arange(len(numbers)))]   # much faster
    return [(chunk, np.flatnonzero(chunks==chunk)) for chunk in np.unique(chunks).tolist()]

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
    commands,reads = [],[]
    for chunk,places in _by_chunk(numbers):
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
            found,crc = _split_elements(np.array(reply, np.int64), width)
            values[places],crcs[places] = found,crc
            # an element that does not exist is read as 0; the checksum of a value is 0 only by a chance of 2**-32
            if not crc.all(): missing += places[(crc==0)&(found==0)].tolist()
    return values.view(np.dtype(dtype)), missing

def _split_elements(reply, width):
    """Values of `width` bytes, and their checksums: two int64 arrays of the same length

    In `reply`, an int64 array of what BITFIELD returned, they are pairs of integers, or one integer for both."""
    return (reply[::2],reply[1::2]) if width==8 else (reply>>32, reply&0xffffffff)
