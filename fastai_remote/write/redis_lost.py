"""Finds values that a node of a cluster lost during an ingest

Docs: page `write/redis_lost`"""

# A server that crashes may come back as it was some time before. On a single server, everything goes back together: a
# chunk whose values are gone has no record any more, so it is written again. In a cluster, the records of chunks are on
# one node and most values on others. If one of those loses its data, because it restarts, a replica takes over that was
# behind, or somebody empties it, then the records still say that the chunks are written.
#
# So before the commit of a dataset in a cluster, every value is looked for. This costs one `EXISTS` per value of
# variable width, many of them in one command, and reads the packed values.

import numpy as np

from ..core import packed_crcs
from ..store.redis_layout import packed_reads, unpack_replies
from ..store.redis_link import RedisLink

def _lost_of_field(link, layout, field, spec, numbers):
    """Those of the samples `numbers` that lack a value of a field, or whose packed value does not match its checksum

    `numbers` and the result are ascending `int64` arrays; `spec` is the entry of the field in the plan."""
    if spec['dtype'] is None: return _without_key(link, layout, field, numbers)
    check = spec.get('check')
    commands,reads = packed_reads(layout, f'{field}~' if spec.get('staged') else field, spec['dtype'], numbers, check)
    crcs = np.zeros(len(numbers), np.uint32) if check else None
    values,gaps = unpack_replies(reads, iter(link.send(commands)), spec['dtype'], len(numbers), crcs)
    if check: return numbers[packed_crcs(values, numbers)!=crcs]
    # these are the checksums of the values of another field; only that of an empty value is 0, and of one in 2**32
    unsure = np.union1d(numbers[values==0], numbers[gaps])
    keys = layout.values(field.removesuffix('.crc'), unsure.tolist())
    lengths = link.send([('STRLEN', key) for key in keys])
    return unsure[np.array(lengths, np.int64)>0]

def _without_key(link, layout, field, numbers):
    "Returns those of the samples `numbers` that have no key for the value of `field`; both are ascending arrays"
    groups = [numbers[numbers%len(layout.starts)==k] for k in range(len(layout.starts))]
    groups = [group for group in groups if len(group)]
    counts = link.send([('EXISTS', *layout.values(field, group.tolist())) for group in groups])
    unsure = [group for group,count in zip(groups, counts) if count!=len(group)]
    if not unsure: return numbers[:0]
    unsure = np.sort(np.concatenate(unsure))
    exist = link.send([('EXISTS', key) for key in layout.values(field, unsure.tolist())])
    return unsure[np.array(exist)==0]

def lost_of_range(
    link:RedisLink, # The cluster or server
    layout, # `key_layout` of the dataset
    fields:dict, # `fields` of a plan
    n:int, # Sample numbers below `n` are looked for
    gaps:np.ndarray=(), # Numbers without a sample, ascending
    step:int=1<<13 # Samples that are looked for at a time
): # Iterator of arrays of sample numbers, ascending and not empty
    "Finds samples that lack a value, or have a packed one that does not match; memory does not grow with `n`"
    gaps = np.asarray(gaps, np.int64)
    for start in range(0, n, step):
        stop = min(start+step, n)
        low,high = np.searchsorted(gaps, [start,stop])
        numbers = np.setdiff1d(np.arange(start, stop), gaps[low:high], assume_unique=True)
        if not len(numbers): continue
        lost = [_lost_of_field(link, layout, field, spec, numbers) for field,spec in fields.items()]
        if any(map(len, lost)): yield np.unique(np.concatenate(lost))
