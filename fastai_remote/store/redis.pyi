"""A dataset in Redis, with one value per sample and field, read in one round trip per batch"""
from typing import Any
__all__: Any
from ..core import Manifest, StoreNotFound
from .parts import StoredDataset
from .redis_link import RedisLink
NAMES_KEY: Any
USED_KEY: Any

def home_of(name: str, tags: int=0) -> str:
    ...

def parse_failures(chunk: int, stored: bytes, where: str) -> list:
    ...

def read_failures(link: RedisLink, layout, name: str, advice: str=''):
    ...

def _stored_manifest(link, key):
    ...

def find_manifest(link: RedisLink, name: str, may_be_cluster: bool=True) -> tuple:
    ...

def read_manifest(link: RedisLink, name: str) -> Manifest:
    ...

def _why_gone(link: RedisLink) -> str:
    ...

def _names(link):
    ...

class RedisReader(StoredDataset):
    for_users: Any
    name: Any
    _parts: Any
    link: Any
    _mean_bytes: Any
    _uid: Any
    _manifest: Any

    def __init__(self, url: str | RedisLink, name: str, **kwargs):
        ...

    def read_manifest(self):
        ...

    @property
    def parts(self) -> list:
        ...

    @property
    def manifest_key(self) -> str:
        ...

    def part(self, number):
        ...

    def place_of(self, key):
        ...

    def stored_bytes(self, key, n):
        ...

    @property
    def why_missing(self):
        ...

    @property
    def place_rows(self):
        ...

    @property
    def not_read(self):
        ...

    def __getstate__(self):
        ...

    @classmethod
    def names(cls, url: str, **kwargs) -> list:
        ...

    def replaced_error(self, exists: bool=True) -> StoreNotFound:
        ...

    def worker_class(self) -> type:
        ...

    def opener(self):
        ...

    def failures(self):
        ...

    def read_parts(self, requests, again=False):
        ...

    def _request(self, requests, from_replica=False):
        ...

    def check_rest(self):
        ...

def _open_store(cls, **attributes):
    ...

def _is_incomplete(values):
    ...
