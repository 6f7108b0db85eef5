"""What a user has marked in one version of a dataset, until it is applied

Docs: page `view/marks`"""

# Marks are kept in a file, a line for each step, so they survive a reload and a restart. The file belongs to one
# version of a dataset, as sample numbers of another version may be other samples. So each step also has the key of its
# sample, or the checksum and a digest of a value, by which the sample is found again in a later version.

import hashlib, json, os, threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np

from .query import BLOCK
from ..core import StoreError
from ..store.base import has_keys, Store

_KEYS = 4096 # Keys that are read at once

def state_folder()->Path:
    "Where marks are kept: a folder of the user"
    return Path(os.environ.get('XDG_STATE_HOME') or Path.home()/'.local/state')/'fastai_remote'/'marks'

def marks_file(store:Store)->Path:
    "The file for the marks of this version of a dataset"
    version = json.dumps([store.origin, store.name, store.manifest.uid, len(store)]).encode()
    return state_folder()/f'{hashlib.sha256(version).hexdigest()[:32]}.jsonl'

class Marks:
    """Marks of samples in a file: to be dropped, or to get another label

    A step is a dict: `number`; `field`, '' for a sample that is to be dropped; `value`, the new label or `True`, `None`
    to take the mark back; and the entries of `identity`."""
    def __init__(self,
        path:Path # The file, which need not exist
    ):
        self.path,self._lock = path,threading.Lock()

    def _lines(self):
        "The lines of the file, of which each is a step"
        try: lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError: return []   # also if another process has just removed it
        if lines and not lines[-1].endswith(b'\n'): lines.pop()   # a process was killed while it wrote
        return lines

    def steps(self)->list: # Of dicts, in the order in which they were made
        "All steps"
        with self._lock: return list(map(json.loads, self._lines()))

    def add(self, steps:list):
        "Append steps to the file"
        with self._lock:
            end = sum(map(len, self._lines()))
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(self.path, os.O_RDWR|os.O_CREAT, 0o600), 'r+b') as file:
                file.truncate(end)
                file.seek(end)
                file.writelines(json.dumps(step).encode()+b'\n' for step in steps)

    def undo(self)->dict: # The step; `None` if there is none
        "Take back the last step"
        with self._lock:
            lines = self._lines()
            if not lines: return None
            os.truncate(self.path, sum(map(len, lines[:-1])))
            return json.loads(lines[-1])

    def clear(self):
        "Remove all marks, and the file"
        with self._lock, suppress(FileNotFoundError): self.path.unlink()

    def current(self)->list: # Of steps
        "The marks that hold; a sample that is to be dropped has no others"
        found = {}
        for step in self.steps():
            found.pop((step['number'],step['field']), None)
            if step['value'] is not None: found[step['number'],step['field']] = step
        return [step for (number,field),step in found.items() if not field or (number,'') not in found]

    def changes(self)->dict: # `{'drop': [number, …], 'set': {field: {number: label}}}`
        "The arguments with which `store.edit` makes these changes"
        drop,labels = [],defaultdict(dict)
        for step in sorted(self.current(), key=lambda step: step['number']):
            if step['field']: labels[step['field']][step['number']] = step['value']
            else: drop.append(step['number'])
        return dict(drop=drop, set=dict(labels))

# --- Another version

def identity(
    store:Store,
    number:int # Sample number
)->dict: # `key`; or `of`, a field, with `crc` and `digest` of its value; empty if nothing identifies the sample
    "What identifies a sample in a later version of its dataset"
    if has_keys(store): return dict(key=store.key(number))
    for field in store.fields:
        if f'{field}.crc' not in store.manifest.fields or store.may_lack(field): continue
        with suppress(StoreError):   # a damaged value identifies nothing
            found = store.get_many([number], [field, f'{field}.crc'])
            return dict(of=field, crc=int(found[f'{field}.crc'][0]), digest=_digest(found[field][0]))
    return {}

def _digest(value): return hashlib.sha256(value).hexdigest()

def found_again(
    store:Store, # The later version
    steps:list, # Marks of the version before
    job # Gets the progress
)->list: # The steps whose samples were found, with their numbers in this version
    "Finds samples by their keys or values; those that are gone, or are there several times, are left out"
    wanted,numbers = defaultdict(list),defaultdict(list)
    for step in steps:
        if 'key' in step or step.get('of') in store.fields: wanted[step.get('key') or step['digest']].append(step)
    if any('key' in step for step in steps):
        for some in _blocks(store, _KEYS, job):
            for number,key in zip(some.tolist(), store.keys(some)):
                if key in wanted: numbers[key].append(number)
    for field in {step['of'] for step in steps if step.get('of') in store.fields}:
        crcs = np.array([step['crc'] for step in steps if step.get('of')==field], np.uint32)
        for some in _blocks(store, BLOCK, job):
            stored = store.get_many(some, f'{field}.crc')[f'{field}.crc']
            for number in some[np.isin(stored, crcs)].tolist():
                with suppress(StoreError): numbers[_digest(store.get_many([number], field)[field][0])].append(number)
    return [{**step, 'number':numbers[name][0]} for name,same in wanted.items() if len(numbers[name])==1
            for step in same]

def _blocks(store, step, job):
    for start in range(0, len(store), step):
        job.step(start, len(store))
        yield np.arange(start, min(start+step, len(store)))
