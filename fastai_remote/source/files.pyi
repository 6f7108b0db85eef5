"""A source of image files, which are stored as they are"""
from typing import Any
__all__: Any
from contextlib import contextmanager
from pathlib import Path
from .base import IndexedSource, Samples

def list_files(files: str | Path | list, extensions: tuple) -> list:
    ...

def file_stamps(paths: list) -> list:
    ...
_MAX_LINE: Any

def _lines_of(file):
    ...

@contextmanager
def open_text(path: Path, **kwargs):
    ...

class PathList:
    root: Any
    blob: Any
    ends: Any

    def __init__(self, root: str | Path='.'):
        ...

    def append(self, path: str):
        ...

    def __len__(self):
        ...

    def __getitem__(self, i: int) -> Path:
        ...

    def __repr__(self):
        ...

    def fingerprint(self) -> str:
        ...

class SortedNames:
    names: Any
    packed: Any

    def __init__(self):
        ...

    def append(self, name: str):
        ...

    def _pack(self):
        ...

    def __bool__(self):
        ...

    def __iter__(self):
        ...

def _unpacked(packed, size=4096):
    ...
_image_fields: Any

def image_extensions() -> set:
    ...

def _extensions_of(transforms):
    ...

def image_field(name: str) -> str:
    ...

def _image_files(folder, left_out, prefix='', above=(), without=()):
    ...
_hidden: Any
_of_no_split: Any

def _identity(folder):
    ...

def _is_folder(entry, above, without):
    ...

class image_samples(Samples, IndexedSource):
    opens_images: Any
    notes: Any
    field: Any
    label: Any
    keep: Any
    paths: Any
    splits: Any

    def __init__(self, files: str | Path | list, label=None, field: str | None=None, path: bool=False, splits: list | dict | None=None):
        ...

    def __len__(self):
        ...

    def _raw(self, i):
        ...

    def read(self, numbers) -> list:
        ...

    @property
    def load(self):
        ...

    @property
    def iloc(self):
        ...

    def itertuples(self):
        ...

    def fingerprint(self):
        ...

    def __repr__(self):
        ...

    def _add(self, paths, where, fields):
        ...

    def _add_splits(self, folder, splits, fields, left_out):
        ...

def _local(paths):
    ...

class _LoadFile:

    def __init__(self, field: str, root: str):
        ...

    def __call__(self, raw):
        ...
