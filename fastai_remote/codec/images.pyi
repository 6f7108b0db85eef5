"""Image files and pixels"""
from typing import Any
__all__: Any
import numpy as np
from PIL import Image
from .base import Codec
MAX_SCANS: Any
_MIN_TILE_LIMIT: Any
_JPEG_MARKER: Any
_START_OF_SCAN: Any
_END_OF_IMAGE: Any
_pillow: Any

def _limits():
    ...

def _put_limits(limits):
    ...

def max_pixels() -> int:
    ...

def _check_scans(content):
    ...

def _check_tiles(b):
    ...

def check_image(b: bytes):
    ...

def is_transparent(im: Image.Image) -> bool:
    ...
_ORIENTATION: Any

def orientation_of(im: Image.Image) -> int:
    ...

def only_orientation(im: Image.Image) -> bytes:
    ...

def _exif_of(im):
    ...

def _profile_of(im):
    ...

def load_pixels(im: Image.Image) -> Image.Image:
    ...

def _kept_mode(im):
    ...
_MAX_SIDES: Any
_IMAGES: Any

def _waits(im):
    ...

def _seen(im, other):
    ...

class ImageCodec(Codec):
    image: Any

    def __init__(self, name: str, fmt: str | None=None, quality: int=90):
        ...

    def check(self, b):
        ...

    def _accepts(self, fmt):
        ...

    def pack(self, o):
        ...

    def unpack(self, b):
        ...

    def _open(self, b):
        ...

    def _original(self, im):
        ...

    def opened(self, b: bytes) -> Image.Image:
        ...

    def file_of(self, im: Image.Image) -> bytes:
        ...

    def encode(self, im: Image.Image, exif: bytes | None=None) -> bytes:
        ...

    def _save(self, im, fmt, options):
        ...

    def _has_pixels_of(self, im, b):
        ...

    def _note(self, kind, is_same):
        ...

    def cannot_keep(self, im: Image.Image) -> str:
        ...

    def _png_cannot_keep(self, im):
        ...
_head: Any

class RawCodec(Codec):
    magic: Any
    unpack: Any

    def check(self, b):
        ...

    def array(self, b) -> np.ndarray:
        ...

    def image(self, b):
        ...

    def _open(self, b):
        ...

    def _check_size(self, width, height):
        ...

    def pack(self, o):
        ...

    def _pixels(self, o):
        ...

    def _pixels_of_image(self, im):
        ...

    def _pixels_of_array(self, o):
        ...

class BitsCodec(RawCodec):
    magic: Any

    def array(self, b) -> np.ndarray:
        ...

    def _open(self, b):
        ...

    def pack(self, o):
        ...
