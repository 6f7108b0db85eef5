"""Draw strokes as pictures, many at once"""
from typing import Any
__all__: Any
import numpy as np
from PIL import Image
from .base import Codec
_pixels: Any

def _check_raster(size, width, time):
    ...

def _colours(counts, time):
    ...

class _Pen:
    scale: Any
    radius: Any
    reach: Any
    shift: Any
    one: Any
    along: Any
    rows: Any
    disc: Any
    guard: Any

    def __init__(self, size, width, antialias):
        ...

    def draw(self, points, counts, stroke_counts, colours, out):
        ...

    def _ink(self, at, values, stroke, colours, out):
        ...

    def _discs(self, points, first, stroke, colours, out):
        ...

    def _segments(self, points, deltas, first, stroke, colours, out):
        ...

    def _columns(self, floats, ints):
        ...

def _draw_in_c(drawings, pen, time, empty):
    ...

def _pixel_points(drawings, counts, stroke_counts, pen):
    ...

class Rasterise:

    def __init__(self, size: int=256, width: float=3.0, antialias: bool=True, time: str | None=None):
        ...

    def arrays(self, drawings: list, empty=None) -> np.ndarray:
        ...

    def batch(self, drawings: list) -> list:
        ...

    def create(self, b) -> Image.Image:
        ...

    def __repr__(self):
        ...

    def pngs(self, drawings: list) -> list:
        ...

    def __call__(self, o):
        ...

def _png(a):
    ...

def renamed_fields(sample, codecs: dict) -> dict:
    ...

class StrokesCodec(Codec):

    def pack(self, o):
        ...

    def unpack(self, b):
        ...

    def image(self, b):
        ...
