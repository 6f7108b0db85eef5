"Photographs of phones, which have an EXIF orientation, can be shrunk to pixels: upright, if the user says so"
import io, itertools

import numpy as np
import pytest
from PIL import Image, ImageOps

from fastai_remote import shrink
from fastai_remote.codec.fields import get_codec
from inputs import encoded

def photograph(orientation, size=(40,24), fmt='PNG'):
    "The file of a picture that a phone held in another way, whose pixels all differ"
    im = Image.fromarray(np.arange(size[0]*size[1]*3, dtype=np.uint16).reshape(size[1], size[0], 3).astype(np.uint8))
    exif = Image.Exif()
    exif[0x112] = orientation
    return encoded(im, fmt, exif=exif)

@pytest.mark.parametrize('orientation', range(2, 9))
def test_turned_pixels_are_those_of_exif_transpose(orientation):
    b = photograph(orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(b)))
    for size,codec in itertools.product((24,100), ('raw','png')):
        sample = shrink(size, codec=codec, turn=True)({'img':b})
        shown = get_codec(codec).unpack(bytes(sample[codec]))
        assert np.array_equal(np.asarray(shown), np.asarray(upright)) and 0x112 not in shown.getexif()

def test_smaller_ones_are_upright_too():
    b = photograph(6, (400,240), 'JPEG')
    for codec,image in itertools.product(('raw','jpg'), (b, Image.open(io.BytesIO(b)))):
        sample = shrink(48, codec=codec, turn=True)({'img':image})
        assert get_codec(codec).unpack(bytes(sample[codec])).size==(48,80)

def test_without_turn_the_error_names_it_and_files_keep_the_orientation():
    b = photograph(6, fmt='JPEG')
    for codec in 'raw','bits':
        resample = {'resample':Image.Resampling.NEAREST} if codec=='bits' else {}
        with pytest.raises(ValueError, match=r'orientation 6.*shrink\(…, turn=True\) turns it'):
            shrink(12, codec=codec, **resample)({'img':b})
    assert Image.open(io.BytesIO(bytes(shrink(12)({'img':b})['jpg']))).getexif()[0x112]==6
