"""Keys and files of datasets that nothing needs, and that no clean-up finds

Docs: page `write/leftovers`"""

# A clean-up removes what the register names, and never searches for keys. So a server that came back with older data,
# or a register that somebody has removed, can leave keys that nobody knows of. Their names have the ID of a part or of
# an ingest, and that ID is nowhere. Finding them takes a look at the name of each key of a server.

import re

from ..core import StoreNotFound
from ..store.redis import NAMES_KEY, read_manifest, USED_KEY
from ..store.redis_link import RedisLink
from ..store.redis_parts import parts_of
from .redis_state import IngestKeys, INGESTS_KEY

# `NAME@ID:…`, in a cluster `{NAME@ID.3}:…` and `{NAME}@ID:…`; and `NAME:ingest:ID:…`
_WITH_ID = re.compile(r'\{?(?P<name>[^{}:@]+)\}?(?:@|:ingest:)(?P<id>[0-9a-f]{16})(?:\.\d+\})?:')

def leftover_keys(
    link:RedisLink, # The server
): # Iterator of `str`
    """Finds keys with an ID that no register, manifest or plan has; those of other programs are left out

    Raises `CorruptSample` or `UnsupportedFormat` if a manifest is damaged: nobody knows then what its dataset needs."""
    names,known = _known_ids(link)
    for master in link.call(lambda _: link.servers.masters()):
        cursor = None
        while cursor!=0:
            cursor,keys = link.call(lambda _: master.scan(cursor or 0, count=1000))
            found = [match for match in (_WITH_ID.match(key.decode(errors='replace')) for key in keys) if match]
            # what is written is registered before, so an ID that is new is known if all are read once more
            if any(match['id'] not in known for match in found): names,known = _known_ids(link)
            for match in found:
                if match['name'] in names and match['id'] not in known: yield match.string

def _known_ids(link):
    "Returns two sets: all names of datasets that are or were there; IDs of parts and ingests, registered or needed"
    names,known = set(),set()
    for key in NAMES_KEY,INGESTS_KEY,USED_KEY:
        names |= {name.decode() for name in link.call(lambda c: c.smembers(key))}
    for name in names:
        register = IngestKeys(name, int(link.is_cluster)).register
        known |= {entry.decode(errors='replace').rpartition('@')[2] for entry in link.call(lambda c: c.hkeys(register))}
        try: parts = parts_of(read_manifest(link, name))
        except StoreNotFound: continue
        known |= {part.layout.prefix.rpartition('@')[2] for part in parts}
    return names,known
