"PNGs that are decoded without Pillow have the pixels that Pillow gives, and all others are left to it"
import io, tracemalloc

import numpy as np
import pytest
from PIL import Image

from fastai_remote.codec import pixels
from fastai_remote.codec.pixels import png_pixels
from inputs import png_chunk, png_of

if pixels._pixels is None: pytest.skip('the C module is not built: no compiler', allow_module_level=True)

def rows_of(rng, width, height, channels, filters):
    rows = rng.integers(0, 256, (height, 1+width*channels), np.uint8)
    rows[:,0] = rng.choice(filters, height)
    return rows.tobytes()

@pytest.mark.parametrize('channels', [1,3])
@pytest.mark.parametrize('filters', [[0],[1],[2],[3],[4],[0,1,2,3,4]])
def test_pixels_are_those_of_pillow(channels, filters):
    rng = np.random.default_rng(len(filters))
    for width,height,parts in (1,1,1),(1,7,2),(2,2,1),(28,28,1),(33,5,3),(5,40,1):
        rows = rows_of(rng, width, height, channels, filters)
        content = png_of(rows, width, height, 2 if channels==3 else 0, parts=parts)
        expected = np.asarray(Image.open(io.BytesIO(content)))
        found = png_pixels(content, 3)
        assert found.dtype==np.uint8 and found.shape==expected.shape and (found==expected).all()
        assert (png_pixels(content, 1) is None)==(channels==3)

def test_what_is_not_plain_or_damaged_is_left_to_pillow(monkeypatch):
    rng = np.random.default_rng(0)
    rows = rows_of(rng, 9, 6, 1, [0,4])
    content = png_of(rows, 9, 6)
    assert png_pixels(content, 1) is not None
    others = dict(more_rows=png_of(rows, 9, 5), fewer_rows=png_of(rows, 9, 7), wider=png_of(rows, 10, 6),
        no_such_filter=png_of(b'\5'+rows[1:], 9, 6), bits=png_of(rows, 9, 6, bits=4), palette=png_of(rows, 9, 6, 3),
        alpha=png_of(rows, 9, 6, 6), interlaced=png_of(rows, 9, 6, interlaced=1), empty=png_of(b'', 0, 6),
        gamma=png_of(rows, 9, 6, more=png_chunk(b'gAMA', bytes(4))), nothing=b'', jpeg=b'\xff\xd8\xff'+content[3:])
    for name,other in others.items(): assert png_pixels(other, 1) is None, name
    for end in range(len(content)-8): assert png_pixels(content[:end], 1) is None, end
    for k in range(41, len(content)-16):   # compressed rows, which end with a checksum, but not that of the chunk
        for bit in range(8):
            damaged = bytearray(content)
            damaged[k] ^= 1<<bit
            found = png_pixels(bytes(damaged), 1)
            assert found is None or (found==np.asarray(Image.open(io.BytesIO(damaged)))).all(), (k,bit)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 53)
    assert png_pixels(content, 1) is None

def test_no_more_rows_are_made_than_the_header_says():
    "A few bytes of rows that are megabytes are not made into these"
    bomb = png_of(bytes(1<<24), 100, 100)
    tracemalloc.start()
    assert len(bomb)<1<<15 and png_pixels(bomb, 1) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak<1<<18

def test_the_c_function_refuses_buffers_of_other_sizes():
    out = np.empty(12, np.uint8)
    pixels._pixels.unfilter(bytes(15), out, 4, 1)
    for n,width,pixel in (14,4,1),(16,4,1),(15,4,0),(15,4,5),(15,5,1),(15,0,1),(15,-4,1),(15,2**62,1),(15,4,-1),(0,4,1):
        with pytest.raises(ValueError, match='unfilter'): pixels._pixels.unfilter(bytes(n), out, width, pixel)
