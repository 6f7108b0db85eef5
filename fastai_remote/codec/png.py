"""The pixels of a plain PNG, without opening it as an image

Docs: page `codec/png`"""

# Small pictures are often PNGs. Pillow takes 60 µs to open and decode one of a digit, most of it for objects: it looks
# for a plugin, reads each chunk in Python, and makes an image that NumPy then copies. A PNG with eight bits per channel
# and nothing but pixels needs none of this. What is not so plain, or damaged in any way, goes through Pillow, which
# also raises the right error.

import struct

import numpy as np
from PIL import Image
from zlib_ng.zlib_ng import crc32, decompressobj, error

try: from fastai_remote.codec import _pixels
except ImportError: _pixels = None   # there was no compiler at installation: Pillow decodes

_png_start = b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR'

def _plain_png(content):
    """`((width, height), channels, compressed rows)` of `content`, the bytes of a PNG file; 1 channel or 3

    `None` unless it has 8 bits per channel, is not interlaced, and has no chunks but header, pixels and end. `None`
    also for an image of more than `Image.MAX_IMAGE_PIXELS`."""
    if content[:16]!=_png_start or content[37:41]!=b'IDAT': return
    width,height,bits,colour,_,filters,is_interlaced,checksum = struct.unpack_from('>IIBBBBBI', content, 16)
    if bits!=8 or colour not in (0,2) or is_interlaced: return
    if filters or crc32(content[12:29])!=checksum: return   # Pillow cannot identify such a file
    start,parts = 33,[]   # after the header; a chunk is its length, its type, its data and a checksum
    while content[start+4:start+8]==b'IDAT':
        length = int.from_bytes(content[start:start+4], 'big')
        parts.append(content[start+8:start+8+length])
        start += length+12
    if content[start+4:start+8]!=b'IEND' or not 0<width*height<=(Image.MAX_IMAGE_PIXELS or 1<<62): return
    return (width,height),1 if colour==0 else 3,b''.join(parts)

def png_pixels(
    content:bytes, # The contents of a file
    channels:int, # Channels of the wanted image: 1 or 3
)->np.ndarray: # `uint8`, shape (height, width) or (height, width, 3)
    "The pixels of a plain PNG with not more than `channels` channels; `None` for any other content"
    png = _plain_png(content) if _pixels is not None else None
    if png is None or png[1]>channels: return
    (width,height),found,data = png
    n_bytes = height*(found*width+1)
    inflate = decompressobj()
    try: rows = inflate.decompress(data, n_bytes+1)   # one byte more would show that there is more
    except error: return
    if len(rows)!=n_bytes or not inflate.eof: return
    pixels = np.empty((height,width) if found==1 else (height,width,3), np.uint8)
    try: _pixels.unfilter(rows, pixels, found*width, found)
    except ValueError: return   # there is no such filter
    return pixels
