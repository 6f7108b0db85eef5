"""Reduces photographs when a dataset is written"""
from typing import Any
__all__: Any
from PIL import Image

class shrink:

    def __init__(self, size: int, quality: int=90, codec: str='jpg', fields: str | list | None=None, resample: int=Image.Resampling.BILINEAR, turn: bool=False):
        ...

    def __call__(self, sample) -> dict:
        ...

    def __repr__(self):
        ...

    def _can_stay(self, value, field, im, out):
        ...

    def _to_stored_mode(self, im):
        ...

    def _one(self, value, field='img'):
        ...

def _has_pixels(field):
    ...

def _open(value, field):
    ...
