"""Any value of a dataset as a small picture, or as a text

Docs: page `view/pictures`"""

# A notebook, a page in a browser, a report and a command show samples. All of them show a value by this module, which
# imports neither torch nor matplotlib. What it makes of a value is a `Shown`: a text, and a picture where there is one.
# What cannot be read or decoded is a `Shown` as well, with the error as its text. A `Sample` has what is shown of each
# field, and puts together one picture: an image with its mask, boxes and points over it.
#
# Datasets come from strangers. Images pass the checks of their codecs, which refuse bombs. Texts are plain: who makes
# HTML of them escapes them. A value that holds an SVG or HTML is text like any other.

import base64, io, json
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..codec.arrays import from_pixels
from ..codec.audio import is_audio, recording_of
from ..codec.fields import is_image, mask_image
from ..codec.images import ImageCodec, load_pixels
from ..codec.numbers import as_points, boxes_of, holds_boxes, holds_points
from ..codec.raster import Rasterise
from ..core import printable, size_str, StoreError
from ..load.items import read_parts
from ..store.base import corrupt_value, field_codec, Store

MAX_TEXT = 300 # Characters of a text that are shown
_MAX_MARKS = 200 # Boxes or points that are drawn
_TINY = 320 # Pixels up to which a tiny picture is enlarged

# --- Files

@dataclass(frozen=True)
class Picture:
    "A small picture as the contents of a file"
    content:bytes # A JPEG or PNG
    mime:str # `image/jpeg` or `image/png`
    size:tuple # (width, height) in pixels

    @property
    def url(self)->str:
        "The picture as a `data:` URL"
        return f'data:{self.mime};base64,{base64.b64encode(self.content).decode()}'

# Each step of the first number is the part of the size, and of the second the quality of a JPEG
_SMALLER = (1,85),(1,70),(1,50),(.7,50),(.5,40),(.35,30),(.2,20)
_FEW_COLOURS = 64 # A picture that has no more of them is smaller as PNG, and JPEG would blur it

def as_picture(
    image:Image.Image, # Of mode L or RGB
    most:int=None # Bytes that it may have, at least 500; default: no limit
)->Picture:
    "A picture as JPEG, or PNG if it has few colours; with more bytes than `most`, as JPEG of less quality or smaller"
    if image.getcolors(_FEW_COLOURS):
        found = _file(image, 'PNG', compress_level=3)
        if most is None or len(found.content)<=most: return found
    for scale,quality in _SMALLER:
        size = tuple(max(1, round(side*scale)) for side in image.size)
        scaled = image if size==image.size else image.resize(size, Image.Resampling.BILINEAR)
        found = _file(scaled, 'JPEG', quality=quality)
        if most is None or len(found.content)<=most: return found
    return found

def _file(image, fmt, **options):
    image.save(f:=io.BytesIO(), fmt, **options)
    return Picture(f.getvalue(), f'image/{fmt.lower()}', image.size)

# --- Kinds

# As in the table of kinds, which chooses what a model sees, the name and the codec of a field decide.

def shown_kind(
    store:Store,
    field:str # Name of a field
)->str: # 'image', 'mask', 'drawing', 'audio', 'boxes', 'points', 'labels', 'label', 'text', 'tokens', 'number', …
    "How values of a field are shown"
    codec,dtype = (store.manifest.fields[field][key] for key in ('codec','dtype'))
    if is_audio(field): return 'audio'
    if store.field_table.holds_masks(field): return 'mask'
    if holds_boxes(field, codec): return 'boxes'
    if holds_points(field, codec): return 'points'
    if codec=='npy' and 'tokens' in field.split('.'): return 'tokens'
    names = {'strokes':'drawing', 'labels':'labels', 'txt':'text', 'npy':'array', 'npz':'array', 'bin':'bytes'}
    if codec in names: return names[codec]
    if is_image(codec): return 'image'
    if codec=='cls' and store.manifest.vocab.get(field): return 'label'
    return 'number' if dtype else 'other'

@dataclass
class Shown:
    "What is shown of one value"
    field:str # Name of the field
    kind:str # As `shown_kind` returns it; 'missing' if the sample has no such field, and 'error'
    text:str # Plain text of at most `MAX_TEXT` characters; of an error, what is wrong
    nbytes:int=None # Bytes that are stored; `None` for numbers and labels
    image:Image.Image=None # Of mode L, RGB, or RGBA for a mask; at most of the size that was asked for
    full_size:tuple=None # (width, height) of the image that is stored
    # Boxes, shape (n,4), or points, shape (n,2), in pixels of the stored image; the codes of a mask; a list of labels
    marks:object=None
    legend:list=None # Of a mask: labels with their colours, `(text, '#rrggbb')`

def cut_text(
    text:str,
    most:int=MAX_TEXT # Characters
)->str:
    "The beginning of a text, with control characters escaped"
    return printable(text if len(text)<=most else text[:most-1]+'…')

def shown_value(
    store:Store, # The store that the value was read from
    number:int, # Sample number
    field:str, # Name of a field
    value, # As it is stored: bytes or a number; `None` if the sample lacks it, or the error that reading it has raised
    size:int=160 # Pixels of the longer side of the picture, at most
)->Shown:
    "Shows a value of any kind; if it cannot be decoded, the error is shown. Raises only `MemoryError`"
    if value is None: return Shown(field, 'missing', '')
    if isinstance(value, Exception): return Shown(field, 'error', cut_text(str(value)))
    kind,nbytes = shown_kind(store, field),len(value) if isinstance(value, bytes) else None
    try: shown = _SHOWN_BY[kind](store, number, field, value, size)
    except MemoryError: raise
    except Exception as e:
        error = e if isinstance(e, StoreError) else corrupt_value(store, number, field, str(e) or type(e).__name__)
        return Shown(field, 'error', cut_text(str(error)), nbytes)
    shown.text,shown.kind,shown.nbytes = cut_text(shown.text),kind,nbytes
    return shown

# --- Images, masks and drawings

# Colours of the codes of masks and of the labels of boxes; 0 is the background
_COLOURS = np.frombuffer(bytes.fromhex(
    'ffffff e41a1c 377eb8 4daf4a ff7f00 984ea3 00b5ad f0c808 a65628 f781bf 17becf bcbd22 1f77b4 d62728 2ca02c 9467bd '
    '8c564b e377c2 7f7f7f aec7e8'), np.uint8).reshape(-1, 3)

def _displayable(im):
    "A picture of any mode as one of mode L or RGB, as fastai converts it; more than 8 bits are scaled to what there is"
    if im.mode in ('L','RGB'): return im
    if im.mode[0] not in 'IF': return im.convert('L' if im.mode in ('1','LA','La') else 'RGB')
    a = np.nan_to_num(np.asarray(im).astype(np.float64), posinf=0, neginf=0)
    low,high = a.min(),a.max()
    return Image.fromarray(((a-low)*(255/max(high-low, 1e-12))).astype(np.uint8))

def fitted_size(
    size:tuple, # (width, height)
    most:int # Pixels of the longer side
)->tuple:
    "The size of a picture that is shown: smaller if it is too large, and a few times as large if it is tiny"
    factor = most/max(size)
    if factor>=1: return tuple(side*max(1, min(int(factor), 8, _TINY//max(size))) for side in size)
    return tuple(max(1, round(side*factor)) for side in size)

def _resized(im, size):
    "Pixels of a tiny picture stay squares"
    if im.size==size: return im
    is_larger = im.width<size[0]
    return im.resize(size, Image.Resampling.NEAREST if is_larger else Image.Resampling.BOX, reducing_gap=None)

def _small(im, full_size, size): return _resized(_displayable(im), fitted_size(full_size, size))

def _opened(store, field, value, size):
    "The image of `value`, and the size that it is stored in; a JPEG may be decoded at a smaller size"
    codec = field_codec(store, field)
    if not isinstance(codec, ImageCodec):
        im = codec.image(value)
        return im,im.size
    im = codec.opened(value)
    full_size = im.size
    im.draft(None, (2*size,2*size))
    return load_pixels(im),full_size

def _show_image(store, number, field, value, size):
    im,full_size = _opened(store, field, value, size)
    return Shown(field, '', f'{full_size[0]} x {full_size[1]}', image=_small(im, full_size, size), full_size=full_size)

def _how_many(o, one, several): return f'{len(o)} {one if len(o)==1 else several}'

def _show_drawing(store, number, field, value, size):
    strokes = field_codec(store, field).from_bytes(value)
    image = Rasterise(min(max(size, 8), 4096)).create(value)
    return Shown(field, '', _how_many(strokes, 'stroke', 'strokes'), image=image, full_size=(256,256))

def _show_mask(store, number, field, value, size):
    codec = field_codec(store, field)
    im = mask_image(codec.from_bytes(value)) if codec.name in ('npy','npz') else codec.image(value)
    codes = np.asarray(im if im.mode in ('L','P') else _displayable(im).convert('L'))
    found,vocab = np.unique(codes),store.manifest.vocab.get(field, [])
    names = [str(vocab[code]) if code<len(vocab) else f'{code}' for code in found[:12].tolist()]
    small = np.asarray(_resized(Image.fromarray(codes), fitted_size(im.size, size)))
    coloured = np.concatenate([_COLOURS[small%len(_COLOURS)], np.where(small, 255, 0).astype(np.uint8)[...,None]], 2)
    legend = [(cut_text(name, 40), f'#{_COLOURS[code%len(_COLOURS)].tobytes().hex()}')
              for code,name in zip(found.tolist(), names) if code]
    return Shown(field, '', ', '.join(names), image=Image.fromarray(coloured), full_size=im.size, marks=small,
                 legend=legend)

# --- Recordings

def _show_audio(store, number, field, value, size):
    values,rate = recording_of(field_codec(store, field).from_bytes(value))
    n = values.shape[1]
    length = f'{n/rate:.2f} s, {rate:,} values per second' if rate else f'{n:,} values'
    channels = f'{len(values)} channels, ' if len(values)!=1 else ''
    return Shown(field, '', channels+length, image=_waveform(values, size), full_size=(size,size//2))

def _waveform(values, size):
    "The curve of a recording, shape (channels, values): between the lowest and the highest value of each column"
    width,height = size,max(size//2, 8)
    image = Image.new('RGB', (width,height), 'white')
    n = values.shape[1]
    if not n: return image
    starts = np.arange(width)*n//width
    before = values[:,np.maximum(starts-1, 0)]   # a column begins where the one before it ends
    low,high = (op(op.reduceat(op.reduce(values), starts), op.reduce(before)) for op in (np.minimum,np.maximum))
    top = max(float(np.nanmax(np.abs(np.nan_to_num(values, posinf=0, neginf=0)))), 1e-9)
    def row(o): return (height-1)/2*(1-np.clip(np.nan_to_num(o)/top, -1, 1))
    draw = ImageDraw.Draw(image)
    for x,(y0,y1) in enumerate(zip(row(high).tolist(), row(low).tolist())): draw.line((x,y0,x,y1), (31,119,180))
    return image

# --- Marks, texts and numbers

def _show_boxes(store, number, field, value, size):
    boxes = boxes_of(field, field_codec(store, field).from_bytes(value))
    return Shown(field, '', _how_many(boxes, 'box', 'boxes'), marks=boxes.astype(np.float64))

def _show_points(store, number, field, value, size):
    points = np.asarray(field_codec(store, field).from_bytes(value), np.float64)
    if points.ndim==2 and points.shape[1]==3: points = points[:,:2]   # with times
    points = as_points(points)
    return Shown(field, '', _how_many(points, 'point', 'points'), marks=points[np.isfinite(points).all(1)])

def _show_labels(store, number, field, value, size):
    labels = field_codec(store, field).from_bytes(value)
    return Shown(field, '', ', '.join(map(str, labels[:100])), marks=[str(label) for label in labels])

def _show_decoded(store, number, field, value, size): return Shown(field, '', str(store.decode(number, field, value)))

def _number_text(o): return f'{o:.5g}' if isinstance(o, float) else str(o)

def _show_number(store, number, field, value, size):
    o = value.item() if hasattr(value, 'item') else value
    return Shown(field, '', _number_text(o))

def _show_tokens(store, number, field, value, size):
    tokens,vocab = field_codec(store, field).from_bytes(value).tolist(),store.manifest.vocab.get(field, [])
    names = [str(vocab[k]) if 0<=k<len(vocab) else str(k) for k in tokens[:MAX_TEXT]]
    return Shown(field, '', ' '.join(names))

def _show_array(store, number, field, value, size):
    a = field_codec(store, field).from_bytes(value)
    if isinstance(a, dict):
        return Shown(field, '', '; '.join(f'{name}: {o.dtype} {o.shape}' for name,o in list(a.items())[:20]))
    is_picture = a.dtype==np.uint8 and a.ndim in (2,3) and min(a.shape[:2])>=8 and a.shape[2:] in ((),(1,),(3,))
    if is_picture:
        im = from_pixels(a)
        return Shown(field, '', f'{a.dtype} {a.shape}', image=_small(im, im.size, size), full_size=im.size)
    some = ', '.join(map(_number_text, a.ravel()[:12].tolist()))
    return Shown(field, '', f"{a.dtype} {a.shape}: {some}{', …' if a.size>12 else ''}")

def _show_bytes(store, number, field, value, size):
    start = value[:4*MAX_TEXT]
    try:
        text = start[:MAX_TEXT].decode()
        if text.isprintable() or text.replace('\n', ' ').replace('\t', ' ').isprintable():
            return Shown(field, '', start.decode(errors='ignore'))
    except UnicodeDecodeError: pass
    return Shown(field, '', f"{size_str(len(value))}, begins with {value[:12].hex(' ')}")

def _show_other(store, number, field, value, size):
    if len(value)>1<<20: return _show_bytes(store, number, field, value, size)
    o = field_codec(store, field).from_bytes(value)
    try: return Shown(field, '', json.dumps(o, ensure_ascii=False))
    except (TypeError,ValueError): return Shown(field, '', repr(o)[:MAX_TEXT])

_SHOWN_BY = dict(image=_show_image, mask=_show_mask, drawing=_show_drawing, audio=_show_audio, boxes=_show_boxes,
    points=_show_points, labels=_show_labels, label=_show_decoded, text=_show_decoded, tokens=_show_tokens,
    number=_show_number, array=_show_array, bytes=_show_bytes, other=_show_other)

# --- Samples

_PICTURES = 'image','drawing','audio','array'   # kinds that make a picture; those of the first one there is are shown

@dataclass
class Sample:
    "What is shown of one sample"
    number:int # Sample number
    values:dict # `{field: Shown}`
    size:int=160 # Pixels of the longer side of its picture, at most

    @cached_property
    def image(self)->Image.Image: # Of mode RGB or L
        "Its images, side by side, with mask, boxes and points over the first one; `None` if there is nothing to draw"
        return _put_together(self)

    def picture(self,
        most:int=None # Bytes that the file may have
    )->Picture:
        "The picture of `image` as a file; `None` if there is none"
        return None if self.image is None else as_picture(self.image, most)

    @property
    def errors(self)->list:
        "Texts of what is wrong with values of this sample, which name the field"
        return [shown.text for shown in self.values.values() if shown.kind=='error']

    @property
    def title(self)->str:
        "Its labels, without those that are drawn beside boxes; may be empty"
        return '; '.join(label_texts(self.values.values()))

    @property
    def texts(self)->dict: # `{field: text}`
        "What else is known of the sample: texts, numbers and arrays"
        shown = self.values.values()
        return {o.field:o.text for o in shown if o.image is None and o.marks is None and o.text
                and o.kind not in ('label','labels','error','missing')}

def _put_together(sample):
    "The picture of a `Sample`, or `None`"
    values = [shown for shown in sample.values.values() if shown.kind!='error']
    drawn = [shown for shown in values if shown.kind in _PICTURES and shown.image is not None]
    pictures = next((some for kind in _PICTURES if (some := [o for o in drawn if o.kind==kind])), [])
    masks = [shown for shown in values if shown.kind=='mask']
    marks = [shown for shown in values if shown.kind in ('boxes','points')]
    if not pictures and not masks and not any(len(shown.marks) for shown in marks): return None
    full_size = (pictures or masks)[0].full_size if pictures or masks else _extent(marks)
    base = pictures[0].image if pictures else Image.new('RGB', fitted_size(full_size, sample.size), (236,236,236))
    if masks or marks: base = base.convert('RGB')
    for mask in masks: base = _masked(base, mask.image, is_alone=not pictures)
    labels = box_labels(values)
    for shown in marks: _draw_marks(base, full_size, shown, labels.marks if labels else [])
    return _side_by_side([base, *(shown.image for shown in pictures[1:3])])

def box_labels(
    values # Of `Shown`, those of a sample
)->Shown:
    "What is shown of the labels of boxes, if there is one label for each box; else `None`"
    boxes = [shown for shown in values if shown.kind=='boxes']
    return next((o for o in values if o.kind=='labels' and any(len(o.marks)==len(b.marks) for b in boxes)), None)

def label_texts(
    values # Of `Shown`, those of a sample
)->list: # Texts; all but the first one name their field
    "The labels of a sample, without those that are drawn beside boxes"
    of_boxes = box_labels(values)
    labelled = [o for o in values if o.kind in ('label','labels') and o is not of_boxes and o.text]
    return [o.text if k==0 else f'{o.field}: {o.text}' for k,o in enumerate(labelled)]

def _extent(marks):
    "A size in which all boxes and points have room"
    corners = np.concatenate([shown.marks.reshape(-1, 2) for shown in marks])
    return tuple(int(side) for side in np.clip(corners.max(0)*1.05+1, 1, 1e6))

def _masked(base, mask, is_alone):
    "Image `base` under the coloured `mask`, of mode RGBA, of which half is transparent unless it `is_alone`"
    mask = mask.resize(base.size, Image.Resampling.NEAREST)
    alpha = mask.getchannel('A')
    if not is_alone: alpha = alpha.point(lambda a: a//2)
    return Image.composite(mask.convert('RGB'), base, alpha)

def _draw_marks(image, full_size, shown, labels):
    "Draw boxes with their labels, or points, over `image`, which shows one of `full_size`"
    scale = np.array(image.size)/full_size
    places = np.clip(shown.marks[:_MAX_MARKS].reshape(-1, 2)*scale, -10, np.array(image.size)+10)
    draw,side = ImageDraw.Draw(image),max(image.size)
    font,width,radius = font_of(max(10, side//45)),max(2, side//300),max(2, side//150)
    if shown.kind=='points':
        for x,y in places.tolist():
            draw.ellipse((x-radius,y-radius,x+radius,y+radius), (228,26,28), (255,255,255), max(1, radius//3))
        return
    named = labels if len(labels)==len(shown.marks) else ['']*len(shown.marks)
    colour_of = {label:k for k,label in enumerate(dict.fromkeys(named))}
    for box,label in zip(places.reshape(-1, 4).tolist(), named):
        colour = tuple(_COLOURS[1+colour_of[label]%(len(_COLOURS)-1)].tolist())
        draw.rectangle(box, outline=colour, width=width)
        if not label: continue
        place = box[0]+2,max(box[1], 0)+1
        text = cut_text(label, 24)
        draw.rectangle(draw.textbbox(place, text, font), fill=colour)
        draw.text(place, text, (255,255,255), font)

def _side_by_side(images):
    "Pictures in a row, with a gap"
    if len(images)==1: return images[0]
    image = Image.new('RGB', (sum(im.width for im in images)+4*(len(images)-1), max(im.height for im in images)),
                      (236,236,236))
    x = 0
    for im in images:
        image.paste(im, (x,0))
        x += im.width+4
    return image

def font_of(
    size:int # Pixels
):
    "A font that has the letters of many languages: that of matplotlib, which fastai needs, and which is not imported"
    return ImageFont.truetype(Path(find_spec('matplotlib').origin).parent/'mpl-data/fonts/ttf/DejaVuSans.ttf', size)

# --- Reading

def tile_fields(
    store:Store
)->list: # Names of fields
    "The fields that a small picture of a sample needs: pictures and what is drawn over them, labels, texts, numbers"
    kinds = {field:shown_kind(store, field) for field in store.fields}
    small = 'mask','boxes','points','labels','label','text','number','drawing','audio','image'
    fields = [field for field,kind in kinds.items() if kind in small]
    return (fields or list(kinds))[:24]

def read_samples(
    store:Store,
    numbers, # Sample numbers
    size:int=160, # Pixels of the longer side of a picture, at most
    fields:list=None # Names of fields; default: `tile_fields`
)->list: # A `Sample` for each
    """Reads samples to be shown, in one round trip; a value that is missing or damaged is shown as its error

    Raises `StoreUnavailable`, and `IndexError` for a sample that does not exist."""
    numbers,values = store.check_numbers(numbers),read_values(store, numbers, fields or tile_fields(store))
    return [Sample(number, {field:shown_value(store, number, field, column[k], size)
                            for field,column in values.items()}, size) for k,number in enumerate(numbers.tolist())]

def read_values(
    store:Store,
    numbers, # Sample numbers
    fields:list # Names of fields
)->dict: # `{field: list}`: the value as it is stored, `None` if the sample has none, or the error of reading it
    """Stored values of some samples, in one round trip, with the error in place of what is missing or damaged

    Raises what `get_many` raises, except `MissingSample` and `CorruptSample`."""
    names = {f'{field}?' if store.may_lack(field) else field:field for field in fields}
    found,numbers = {field:[] for field in fields},store.check_numbers(numbers)
    def read(names): return lambda some: store.get_many(some, names)
    for some,values in read_parts(read(list(names)), numbers) if names and len(numbers) else ():
        for name,field in names.items():
            parts = read_parts(read([name]), some) if isinstance(values, Exception) else [(some,values)]
            for _,part in parts: found[field] += [part] if isinstance(part, Exception) else list(part[name])
    return found

def drawn_text(
    sample:Sample,
    size:int # Width and height in pixels
)->Image.Image: # Of mode RGB
    "The texts of a sample as a picture, for what shows only pictures"
    text = '\n'.join(sample.errors) or '\n'.join(sample.texts.values()) or sample.title or '–'
    height,is_wrong = max(size//13, 9),bool(sample.errors)
    per_line = max(size*10//(6*height), 4)
    lines = [line[k:k+per_line] for line in text.split('\n') for k in range(0, max(len(line), 1), per_line)]
    image = Image.new('RGB', (size,size), (250,244,244) if is_wrong else 'white')
    text = '\n'.join(lines[:max(size//(height+5), 1)])
    ImageDraw.Draw(image).multiline_text((4,4), text, (150,20,20) if is_wrong else 'black', font_of(height))
    return image

# --- A sheet for a shell

_GAP,_LINE = 8,15 # Pixels between samples; of a line of text

def sheet(
    samples:list, # Of `Sample`
    columns:int=None # Default: about as many as rows
)->Image.Image: # Of mode RGB
    "A picture of all samples, each with its number and its labels below"
    size,n = samples[0].size,len(samples)
    columns = min(columns or max(4, round(n**.5)), n)
    width,height = size+_GAP,size+_GAP+2*_LINE
    image = Image.new('RGB', (columns*width+_GAP, -(-n//columns)*height+_GAP), 'white')
    draw,font = ImageDraw.Draw(image),font_of(11)
    for k,sample in enumerate(samples):
        x,y = _GAP+k%columns*width,_GAP+k//columns*height
        shown = sample.image if sample.image is not None else drawn_text(sample, size)
        if max(shown.size)>size: shown.thumbnail((size,size))   # several images side by side
        image.paste(shown, (x+(size-shown.width)//2, y+(size-shown.height)//2))
        for row,text in enumerate((_fitting(sample.title.replace('\n', ' '), font, size), f'#{sample.number}')):
            draw.text((x+size//2, y+size+2+row*_LINE), text, 'black' if row==0 else (120,120,120), font, anchor='ma')
    return image

def _fitting(text, font, width):
    "The beginning of a text that is at most so many pixels wide"
    text = cut_text(text, 80)
    while text and font.getlength(text)>width: text = text[:-2]+'…' if len(text)>2 else ''
    return text
