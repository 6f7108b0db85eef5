"""Means, standard deviations and the mean image of the images of a dataset

Docs: page `codec/stats`"""

# `Normalize` needs the mean and the standard deviation of the channels. SparkNet's preprocessing needs the mean image.
# To compute these afterwards, the whole dataset has to be read again, which may be a terabyte. An ingest reads every
# image anyway, so it measures them on the way, and the manifest stores the result.

import base64, io

import numpy as np
from PIL import Image

# --- ImageStats

# `ImageStats` contains sums over images. They are small enough to be stored for some chunks of an ingest and added up
# at its end. Each image counts the same, whatever its size. Colour images are also measured as greyscale, because a
# dataset of photographs may be read as `PILImageBW`.
#
# A few thousand images are enough, even of fifty million: if means differ by 0.2 from image to image, 4,000 images give
# the overall mean to 0.003. So 16 images are measured in each of the first 128 chunks, then in every second, fourth,
# eighth… chunk: 64 more chunks whenever the dataset doubles. The chunks of a shuffled source are random samples.

_side = 64   # width and height of the mean image
IMAGES_PER_CHUNK = 16  # images that are measured in a chunk of an ingest

def has_stats(k:int)->bool:
    "Are images of chunk `k` measured? All of the first 128 chunks, then every second, fourth, eighth… chunk"
    return k%(1<<max(0, k.bit_length()-7))==0

class ImageStats:
    "Channel means, standard deviations, sizes and the mean image of some images, as sums that can be added up"
    def __init__(self,
        text:str=None # What `to_text` returned: the sums; default: there are no images yet
    ):
        # 0: images; 1: those in colour; 2-5: sums of the means of red, green, blue, grey; 6-9: of their mean squares;
        # 10-11: sums of width and height; 12-15: maximum of -width, -height, width, height.
        self.head = np.zeros(16)
        self.head[12:] = -np.inf
        self.image = np.zeros((_side,_side,3), np.uint32)   # sum of the images, resized to 64 x 64
        if text is None: return
        b = base64.b64decode(text)
        self.head = np.frombuffer(b, '>f8', 16).astype(float)
        self.image = np.frombuffer(b, '>u2', offset=128).reshape(_side, _side, 3).astype(np.uint32)

    def __len__(self): return int(self.head[0])

    def add(self, im:Image.Image):
        "Add image `im` to the sums, as Pillow converts it to L or RGB: of 16 bits, what is above 255 becomes 255"
        if im.mode!='L': im = im.convert('L' if im.mode in ('1','I;16','LA') else 'RGB')
        in_colour,(width,height) = im.mode=='RGB',im.size
        histograms = im.histogram()+im.convert('L').histogram() if in_colour else im.histogram()*4
        values = np.arange(256)/255
        moments = np.array(histograms, float).reshape(4, 256)@np.stack([values, values*values], 1)/(width*height)
        self.head[:2] += 1,in_colour
        self.head[2:10] += moments.T.ravel()
        self.head[10:12] += width,height
        self.head[12:] = np.maximum(self.head[12:], (-width,-height,width,height))
        small = np.asarray(im.resize((_side,_side), Image.Resampling.BOX, reducing_gap=2.))
        self.image += small.reshape(_side, _side, -1)

    def __iadd__(self, other):
        self.head[:12] += other.head[:12]
        self.head[12:] = np.maximum(self.head[12:], other.head[12:])
        self.image += other.image
        return self

    def to_text(self)->str:
        """The sums as bytes, big-endian, in base64; only for at most 257 images

        Each sum of pixels is stored in 16 bits, and would overflow, without an error, for more images."""
        return base64.b64encode(self.head.astype('>f8').tobytes()+self.image.astype('>u2').tobytes()).decode()

    @classmethod
    def from_summary(cls,
        summary:dict, # What `summary` returned
        n:int # Images that it is for: those that were measured, or more
    ):
        "The `ImageStats` of `n` images with these means; exact up to rounding"
        res = cls()
        mean,std = ([*summary[key], *summary[key]*2][:3] for key in ('mean','std'))
        mean,std = np.array([*mean, summary['grey'][0]]),np.array([*std, summary['grey'][1]])
        sizes = [summary[key] for key in ('width','height')]
        res.head[:2] = n,n*(len(summary['mean'])==3)
        res.head[2:12] = n*np.concatenate([mean, std**2+mean**2, [mean_size for _,mean_size,_ in sizes]])
        res.head[12:] = [-sizes[0][0], -sizes[1][0], sizes[0][2], sizes[1][2]]
        image = Image.open(io.BytesIO(base64.b64decode(summary['image'])))
        res.image = n*np.asarray(image, float).reshape(_side, _side, -1).repeat(3 if image.mode=='L' else 1, 2)
        return res

    def summary(self)->dict:
        """What is stored in the manifest, for at least one image

        `n`: number of images; `mean`, `std`: lists of one number per channel, in 0..1, of 3 channels if any image is in
        colour, else of 1; `grey`: `[mean, std]` of the images as greyscale; `width`, `height`: `[smallest, mean,
        largest]`; `image`: the mean image, a PNG in base64."""
        n,channels = self.head[0],3 if self.head[1] else 1
        mean,mean_square = self.head[2:6]/n,self.head[6:10]/n
        std = np.sqrt(np.maximum(mean_square-mean**2, 0))
        pixels = (self.image/n).round().astype(np.uint8)
        Image.fromarray(pixels if channels==3 else pixels[...,0]).save(png:=io.BytesIO(), 'PNG')
        width,height = self.head[10:12]/n
        minus_min_width,minus_min_height,max_width,max_height = self.head[12:]
        return dict(n=int(n), mean=mean[:channels].round(5).tolist(), std=std[:channels].round(5).tolist(),
            grey=[round(mean[3], 5), round(std[3], 5)],
            width=[int(-minus_min_width), round(width, 1), int(max_width)],
            height=[int(-minus_min_height), round(height, 1), int(max_height)],
            image=base64.b64encode(png.getvalue()).decode())

def joined_summary(
    summary:dict, # What `ImageStats.summary` returned for a dataset
    n:int, # Samples of the dataset; perhaps not all of them were measured
    more:dict, # The summary of other samples
    n_more:int # Their number
)->dict:
    """The summary of all of them, from their summaries, which count by their numbers of samples

    It is exact up to rounding if all images were measured. Its entry `n` is how many were, not how many samples."""
    total = ImageStats.from_summary(summary, n)
    total += ImageStats.from_summary(more, n_more)
    return {**total.summary(), 'n':summary['n']+more['n']}
