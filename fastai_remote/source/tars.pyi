"""WebDataset tars, read once from front to back"""
from typing import Any
__all__: Any
import tarfile
from collections import Counter
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from .base import StreamedSource

class Uncompressed:
    content: Any
    decompress: Any
    position: Any
    rest: Any

    def __init__(self, pieces, decompress=None):
        ...

    @property
    def damage(self):
        ...

    def peek(self):
        ...

    def take(self, n: int):
        ...

    def read(self, n: int) -> bytes:
        ...

    def tell(self) -> int:
        ...

    def seek(self, position: int):
        ...

    def stop(self, error: Exception):
        ...

    def drain(self):
        ...

class DamagedTar(OSError):
    ...

class TarMember(NamedTuple):
    name: str
    start: int
    size: int
    content: bytes | None
    error: Exception | None
    is_first: bool
_HEADERS: Any
_MAX_HEADER: Any
_MAX_HEADERS: Any
_MAX_ZEROS: Any
MAX_MEMBER: Any

class _StrictTarInfo(tarfile.TarInfo):

    @classmethod
    def fromtarfile(cls, tar):
        ...

    def _proc_member(self, tar):
        ...

class _StrictTarFile(tarfile.TarFile):
    tarinfo: Any
    zeros_at: Any
    headers: Any
    n_zeros: Any
    offset: Any

    def skip_zeros(self):
        ...

def tar_members(file, contents: bool=True):
    ...

def _member(file, info, length, is_first):
    ...

def group_members(members, is_complete=None, left_out: Counter | None=None):
    ...

def _by_field(members):
    ...

def _add_member(fields, extension, member):
    ...

def _kind_of(name):
    ...
TAR_EXTENSIONS: Any
_NESTED_BRACES: Any

def expand_braces(names):
    ...

def _listed(names):
    ...
_PART_BYTES: Any

class tar_samples(StreamedSource):
    opens_images: Any
    chunk_size: Any
    files: Any
    key: Any
    implicit_keys: Any

    def __init__(self, files: str | Path | list, key: bool | None=None):
        ...

    @cached_property
    def _first(self):
        ...

    @property
    def raw_bytes(self) -> int:
        ...

    def stream(self, size):
        ...

    @property
    def load(self):
        ...

    def fingerprint(self):
        ...

    def __repr__(self):
        ...

    def _samples(self):
        ...

    def _raw(self, path, key, fields, text_fields):
        ...

def _is_label(field):
    ...

def _has_text_label(file, field, member):
    ...

@contextmanager
def _opened(path):
    ...

def _check_compressed(path, content):
    ...

def _load_members(raw):
    ...

def _read_at(tar, start, size):
    ...
