"""The files that a writer of shards makes, and how it recognizes its own

Docs: page `write/shard_files`"""

# Shards, `labels.json`, `README.md` and `manifest.json` are in the folder of the dataset, and all else is in the folder
# `.fastai_remote` there, where other tools do not look. The files in its subfolder `.ingest` are JSON with a checksum.
# Shards are called `shard-train-000012.tar` after their split and their chunk, or `shard-train-000012-1.tar` if a chunk
# needs several; without a split, `shard-000012.tar`. Those of a dataset that replaces another begin with `shard2`, and
# so on, so that the two never share a file. Shards with values that were added or changed are in `.fastai_remote`, and
# are called `.part-3-0123abcd-000012.tar`, with the generation and random digits, so that no two calls write one file.
# An index is called as its shard, with `.fastai_remote` at the end. `labels.json` has the labels for other tools;
# without splits, `README.md` tells Hugging Face to read the tars.
#
# Other tools may have files of similar names in the folder. So a shard is ours only if it has an index, which is
# written before it.

import re, uuid

import numpy as np

from ..core import MAX_MANIFEST, parse_json
from ..store.shard_index import ADDED, FAILURES_FILE, INDEX_SUFFIX, index_name, LABELS_KIND, TABLE_FILE
from ..store.shard_index import ShardManifest, ShardTable
from ..store.storage import Storage

PLAN_FILE = '.ingest/plan.json'
# Names of our shards; group 1 is the generation. Others may have shards of such names: see `own_shards`
SHARD_FILE = re.compile(r'shard(\d*)-(?:[A-Za-z]\w*-)?\d{6,}(?:-\d+)?\.tar$', re.ASCII)
# Names of our shards in our own folder, with values that were added or changed; group 1 is the generation
_ADDED_FILE = re.compile(r'\.part-(\d+)-[0-9a-f]{8}-[\w-]*\.tar$', re.ASCII)
# Files that a process has not finished, whose names begin like those of our files
PART_FILE = re.compile(r'(?:shard\d*-[\w-]*\.tar|.*\.fastai_remote|(?:shard|index)\d*-failures\.json|'
                       r'manifest\.json|labels\.json|\.runs-\d+|\.part-[\w-]*\.tar)\.\d+\.part$', re.ASCII)
# The files in `.ingest` except the lock, and those of a process that has not finished them
STATE_FILE = re.compile(r'(?:plan|chunk-\d+)\.json(?:\.\d+\.part)?$|lock\.json\.\d+\.part$')
# The records of chunks
RECORD_FILE = re.compile(r'chunk-\d+\.json$')
MAX_STATE = 1<<33 # Bytes of memory that a plan or a record may take: it may list the labels of millions of samples

def record_number(
    name:str # Of a file that matches `RECORD_FILE`
)->int:
    "Returns the number of the chunk that a record is of"
    return int(name.removeprefix('chunk-').removesuffix('.json'))

def generation_of(
    name:str # Of a file
)->int:
    "Returns the generation in the name of a shard, its index, or a list of failures; `None` for other names"
    shard = name.removesuffix(INDEX_SUFFIX)
    found = SHARD_FILE.match(shard) or _ADDED_FILE.match(shard) or FAILURES_FILE.fullmatch(name)
    return int(found[1] or 1) if found else None

def added_prefix(
    generation:int # Of the version that adds or changes values
)->str:
    "How the names of shards with these values begin; no other call, or attempt, has the same"
    return f'{ADDED}{generation}-{uuid.uuid4().hex[:8]}'

def is_added_file(
    name:str # Of a file in our own folder
)->bool:
    "Is it a shard with values that were added or changed, or its index?"
    return bool(_ADDED_FILE.match(name.removesuffix(INDEX_SUFFIX)))

def own_shards(
    names:list, # Of the files in a folder
    hidden:list, # Of the files in our own folder in it
)->list:
    "Returns the names of the shards in a folder that we wrote: each has an index, which is written before it"
    indices = set(hidden)
    return [name for name in names if SHARD_FILE.match(name) and index_name(name) in indices]

def owns_labels(
    storage:Storage, # A folder
    manifest:ShardManifest=None # Of the dataset in it, or `None`
)->bool:
    """Returns whether `labels.json` is there, and we wrote it: its content says so

    If the dataset has such a file, one that is empty or damaged, and so no longer says whose it is, is also ours."""
    try: content = parse_json(storage.read('labels.json', MAX_MANIFEST))
    except FileNotFoundError: return False
    except ValueError: content = None
    if isinstance(content, dict) and content.get('__kind__')==LABELS_KIND: return True
    return not content and bool(manifest and manifest.prefix and manifest.vocab)

CARD_FILE = 'README.md'
# Hugging Face reads the kind of file of which there are most; where there are few tars, that would be JSON
CARD = b'''---
configs:
- config_name: default
  data_files: "*.tar"
---
Tar shards that fastai_remote wrote: `ShardStore(folder)`, WebDataset and `datasets.load_dataset(folder)` read them.
'''

# What Hugging Face takes for splits in the names of files. If there is one of them, it leaves out all other files
KNOWN_SPLITS = {'train','training','validation','valid','val','dev','test','testing','eval','evaluation'}

def needs_card(
    splits:dict # `{name: [start, stop]}` of a dataset
)->bool:
    "Returns whether Hugging Face must be told to read all tars, as one split"
    return not splits or not KNOWN_SPLITS.issuperset(splits)

def owns_card(
    storage:Storage # A folder
)->bool:
    "Returns whether `README.md` is there, as we wrote it"
    return storage.ranges([CARD_FILE], [0], [len(CARD)+1], beyond=True)[0]==CARD

def is_own_file(
    name:str # Of a file in our own folder
)->bool:
    "Is it an index of a shard, a shard of added values, a list of failures, or a table of runs?"
    if name.endswith(INDEX_SUFFIX) or is_added_file(name): return True
    return bool(FAILURES_FILE.fullmatch(name) or TABLE_FILE.fullmatch(name))

def files_of(
    manifest:ShardManifest # Of a dataset of `to_shards`, or of an index of others' shards
)->set:
    "Returns the names of everything that a dataset may need: shards, also of others, and what is in our own folder"
    parts = manifest.part_entries()
    tables = [ShardTable.unpack(part['shards']) for part in parts]
    shards = {name for table in tables for shard in np.flatnonzero(table.idx).tolist()
              for name in (table.name(shard), table.index_name(shard))}
    return shards|{part['failures'] for part in parts}|({manifest.runs['key']} if manifest.runs else set())
