"""Checks that every byte of a dataset in shards is the one that was written

Docs: page `store/shard_check`"""

# Each value has a checksum, which is compared when the value is read. A tar contains more than values: headers,
# padding, and members that no sample uses. A dataset has more files than tars, and the cache contains copies.
# `damaged_parts` reads all of it, part by part, and compares it with the checksums in the manifest.

import os

import numpy as np
from zlib_ng.zlib_ng import crc32, crc32_combine

from ..core import CorruptSample, MissingSample, StoreError
from .parts import PartRequest
from .shard_index import decompressor, pack_labels
from .shard_part import read_shards

# --- Damage within values, or outside of them

# The checksum of a tar says that something in it is damaged, but not what. `verify` reports damaged values by sample,
# so the question here is whether there is other damage as well.
#
# A crc32 answers this without further checksums, because it is linear. If two contents of the same length differ by `d`
# (an exclusive or), their checksums differ by a value that depends only on `d`. So the differences of the checksums of
# damaged values, each moved to its place in the file (a multiplication by a power of x), must add up to the difference
# of the checksum of the whole file. If they do not, other bytes are damaged too. `crc32_combine` moves a difference: it
# is that of the checksums of two contents, after the same bytes are appended to both.

# --- All files

_PART_BYTES = 1<<22   # bytes read at a time

def damaged_parts(
    part # A `ShardPart`
): # Iterator of `(what, reason)`: the name of a file, and a text
    """Finds files of a dataset that are damaged or missing, and damaged copies in the cache

    In an uncompressed shard whose index is intact, damage within values is left out: reading the samples finds it.
    Damaged copies are removed from the cache. Raises `StoreUnavailable`, and `StoreNotFound` if the dataset was
    replaced."""
    for shard in np.flatnonzero(part.table.idx).tolist():   # those whose files are needed
        yield from _check_index(part, shard)
        try: key = part.shard_key(shard)
        except CorruptSample:   # it has changed since it was indexed
            key = part.cache_key(part.file(shard), int(part.table.crc[shard]))
        fd = None if part.cache is None else part.cache.open(key)
        try:
            expected = yield from _check_shard(part, shard, fd is not None)
            if fd is not None and expected is not None: yield from _check_copy(part, shard, key, fd, expected)
        finally:
            if fd is not None: os.close(fd)

def check_labels(
    store # A `ShardReader`
): # As from `damaged_parts`
    """Finds out whether `labels.json` is missing or is not as it was written

    Nothing is yielded if there are no labels, or if others have written the shards."""
    manifest,name = store.manifest,'labels.json'
    expected = pack_labels(manifest.vocab) if manifest.prefix else b''
    if not expected: return
    stored = store.storage.ranges([name], [0], [len(expected)+1], beyond=True)[0]
    if stored==expected: return
    reason = 'it is not there' if stored is None else 'it is not as it was written'
    yield name,f'{store.name}: {name}: {reason}; only other tools read it'

def _check_index(part, shard):
    """Yields `(what, reason)`, as `damaged_parts`, if the index of a shard is missing or damaged where it is stored

    Also if its copy in the cache is damaged; the copy is removed then."""
    indices = part.indices
    name = indices.file(shard)
    if not part.storage.local and part.cache is not None:
        try: indices.cached(shard)
        except CorruptSample as e: yield name,f'{e}; it was removed there, and is fetched again'
    try: indices.stored([shard])
    except (CorruptSample,MissingSample) as e: yield name,str(e)

def _check_shard(part, shard, has_copy):
    """Yields `(what, reason)`, as `damaged_parts`, if shard number `shard` is missing or damaged where it is stored

    `has_copy` says whether it is in the cache, too. The value of `yield from` is the checksum that this copy, which is
    decompressed, must have; `None` if it is unknown, as the shard is missing, or compressed and damaged."""
    table,name,size = part.table,part.file(shard),int(part.table.size[shard])
    compressed = table.compression(shard)
    unpack = decompressor(compressed) if has_copy else None
    crc = unpacked_crc = received = 0
    try:
        for content in part.whole_shards.pieces(shard):
            crc,received = crc32(content, crc),received+len(content)
            for piece in unpack(content) if unpack else (): unpacked_crc = crc32(piece, unpacked_crc)
    except MissingSample as e:
        yield name,str(e)
        return
    if crc==table.crc[shard]: return unpacked_crc if unpack else crc
    where = f'{part.name}: shard {name}, with {part.samples(shard)}'
    wrong = f'{where}: its {size:,} bytes do not match their checksum'
    try: part.whole_shards.check(shard)
    except CorruptSample as e:
        yield name,str(e)
        return None
    if received<size: yield name,f'{where}: {received:,} of {size:,} bytes: it is cut off'
    elif compressed: yield name,f'{wrong}; it is compressed, so that all of it is suspect'
    elif (change := _damage_of_values(part, shard)) is None:
        yield name,f'{wrong}; its index is damaged, too, or cannot be read, so that all of it is suspect'
    elif change!=crc^int(table.crc[shard]):
        yield name,(f"{wrong}, some of them outside the samples' values (headers, padding, members that are not used, "
                    'or labels and numbers, which are read from the index): samples are read all the same, with the '
                    'labels and numbers of the index, which may be others than in the shard; `tar` and WebDataset '
                    'may not read it')
    return None if compressed else int(table.crc[shard])

def _damage_of_values(part, shard, batch=256):
    """How damaged values change the checksum of a shard: an `int`, the exclusive or of the checksums with and without

    It is 0 if no value is damaged, and None if the index of the shard is damaged or cannot be read. Reads `batch`
    values at a time."""
    table,change = part.table,0
    try: index = part.indices.get([shard])[shard]
    except StoreError: return None
    for field in [f for f in part.fields if f'{f}@' in index.columns and f'{f}.crc' in part.fields]:
        for first in range(0, index.n, batch):
            positions = np.arange(first, min(first+batch, index.n))
            starts,lengths = index.spans(field, positions)
            exists = lengths>=0
            positions,starts,ends = positions[exists],starts[exists],(starts+lengths)[exists]
            if (starts<0).any() or (ends>table.size[shard]).any(): return None
            places = table.starts[shard]+positions
            got, = read_shards([PartRequest(part, [field,f'{field}.crc'], places, places, slice(None))], whole=False)
            for value,expected,end in zip(got[field], got[f'{field}.crc'].tolist(), ends.tolist()):
                change ^= crc32_combine(crc32(value)^expected, 0, int(table.size[shard])-end)
    return change

def _check_copy(part, shard, key, fd, expected):
    """Yields `(what, reason)`, as `damaged_parts`, unless the copy of a shard in the cache has the checksum `expected`

    It is open as `fd`, its name there is `key`, and it is removed if it is damaged."""
    name,crc,size = part.file(shard),0,0
    while content:=os.pread(fd, _PART_BYTES, size): crc,size = crc32(content, crc),size+len(content)
    if crc==expected and size==part.table.whole(shard): return
    removed = part.cache.drop(key, fd)
    then = 'it was removed there, and is fetched again' if removed else 'it cannot be removed there'
    what = f'{part.name}: {name} in the cache {part.cache.folder}: its {size:,} bytes do not match their checksum'
    yield name,f'{what}; {then}'
