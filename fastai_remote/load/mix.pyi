"""Samples of several datasets in one stream, by weight"""
from typing import Any
__all__: Any
from .stream import RemoteStream, StreamInput

def _common_vocabs(streams):
    ...

class _MixInput(StreamInput):
    vocabs: Any
    streams: Any
    weights: Any
    end: Any

    def __init__(self, streams, weights, end):
        ...

    @property
    def is_random(self):
        ...

    def __repr__(self):
        ...

    def count(self, rank, world_size):
        ...

    def run(self, key, consumer):
        ...

    def _drawn(self, key, consumer, starts_again):
        ...

    def _member(self, k, key, consumer, starts_again):
        ...

    def _in_turn(self, left, last):
        ...

    def _at_random(self, key, consumer):
        ...

def mix(datasets, weights: list | None=None, end: str | int='all', seed: int | None=None, rank: int | None=None, world_size: int | None=None) -> RemoteStream:
    ...

def _checked_streams(datasets, rank=None, world_size=None):
    ...

def RandomMix(datasets, probs: list | None=None, longest: bool=False) -> RemoteStream:
    ...

def RoundRobin(datasets, longest: bool=False) -> RemoteStream:
    ...
