"""Numbers of a fixed width, sequences of the steps of a pen, points and boxes

Docs: page `codec/numbers`"""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np

from .base import Codec, described
from .strokes import as_strokes, unpack_strokes

# --- Numbers

# Fixed-width values are numbers. They are never stored alone, but in one array with those of other samples. So their
# codec only has a dtype, and checks that values fit it. The store decides about the order of bytes.
#
# A fraction is rounded to the width that the name of the field asks for: in `age.f4`, .1 becomes the nearest `float32`,
# and 1e-300 becomes 0. Everything else comes back the same or is rejected. Whole numbers are never rounded. Only a
# number that is infinite becomes infinite. A complex number, a date, or an array of one element is not a number.

def _is_whole(v):
    """Is `v` an integer, or a `Decimal` or `Fraction` whose value is one? Such a number must not be rounded

    A `float` may already have been rounded, so it never counts."""
    if isinstance(v, Decimal): return v.is_finite() and v==v.to_integral_value()
    return isinstance(v, (int,np.integer)) or isinstance(v, Fraction) and v.denominator==1

def _short(v):
    "Number `v` as text for an error message; after 40 characters `…`, and no digits if it has thousands of them"
    try: return str(v) if len(str(v))<=40 else f'{str(v)[:40]}…'
    except ValueError: return 'a number of thousands of digits'   # Python converts no more than 4,300 digits

class FixedCodec(Codec):
    "Codec of numbers of a fixed width, which `to_array` makes an array of; `to_bytes` raises `TypeError`"
    def __init__(self,
        name:str, # The last part of the names of its fields
        dtype # numpy dtype of the stored numbers
    ):
        self.name,self.dtype = name,np.dtype(dtype)
        # The numbers that `to_num` accepts without further checks: ints from `low` to `high`, floats up to `largest`.
        is_int = self.dtype.kind in 'iu'
        self.low,self.high = (np.iinfo(dtype).min,np.iinfo(dtype).max) if is_int else (0,-1)
        self.largest = float(np.finfo(dtype).max) if self.dtype.kind=='f' else -1.

    def to_array(self,
        os:list # Numbers
    )->np.ndarray: # Of `dtype`, shape (len(os),)
        "The array that stores numbers `os`; raises the errors of `to_num`"
        return np.array([self.to_num(o) for o in os], dtype=self.dtype)

    def to_num(self, o):
        """Number `o`, which may be an array or tensor without dimensions, as it is stored

        Returns an `int`, or for a field of floats a NumPy float of its dtype. A field of integers takes only integers.
        A field of floats, such as `age.f4`, rounds floats and fractions to its width, but never an integer, or a
        `Decimal` or `Fraction` that is whole. Raises `ValueError` for a number that does not fit, and `TypeError` for
        what is no number."""
        if type(o) is int and self.low<=o<=self.high: return o
        if type(o) is float and -self.largest<=o<=self.largest: return self.dtype.type(o)
        v = self._number(o)
        return self._to_int(v) if self.dtype.kind in 'iu' else self._to_float(v)

    def _to_int(self, v):
        "`v`, a result of `_number`, as an `int`; raises `ValueError` if it is no integer, or does not fit the dtype"
        limits = np.iinfo(self.dtype)
        if not isinstance(v, (int,np.integer)) or not limits.min<=v<=limits.max:
            raise ValueError(f'{self.name}: {_short(v)} does not fit {self.dtype}')
        return int(v)

    def _to_float(self, v):
        """`v`, a result of `_number`, as a NumPy float of the dtype

        Raises `ValueError` if it is too large for the dtype, or whole by `_is_whole` and would be rounded."""
        try:
            with np.errstate(over='ignore'):
                res = self.dtype.type(v if isinstance(v, (float,np.floating)) else float(v))
        except OverflowError: res = self.dtype.type(math.inf)
        is_inf = v.is_infinite() if isinstance(v, Decimal) else isinstance(v, (float,np.floating)) and np.isinf(v)
        if np.isinf(res) and not is_inf or _is_whole(v) and int(res)!=v:
            raise ValueError(f'{self.name}: {_short(v)} does not fit {self.dtype}, which would make {res} of it')
        return res

    def _number(self, o):
        """`o` as an `int`, `float`, `Decimal`, `Fraction` or `np.longdouble`, whichever it is already

        An array or tensor without dimensions counts as a number. Raises `TypeError` or `ValueError` otherwise."""
        if getattr(o, 'shape', ()) not in ((),):
            raise ValueError(f'{self.name}: want one number, got shape {tuple(o.shape)}')
        if isinstance(o, (np.generic,np.ndarray)) and o.dtype.kind not in 'biufcUSO':
            raise TypeError(f'{self.name}: want a number, got {described(o)}')
        if isinstance(o, np.ma.MaskedArray) and o.mask:
            raise ValueError(f'{self.name}: want a number, got a masked one, which has no value: give a number, or '
                             'leave out the sample')
        v = o.item() if hasattr(o, 'item') else o
        if isinstance(v, (complex,np.complexfloating)):
            raise ValueError(f'{self.name}: {v} is complex, and would lose its imaginary part')
        if not isinstance(v, (int,float,Decimal,Fraction,np.integer,np.floating)):
            raise TypeError(f'{self.name}: want a number, got {v!r:.60} ({type(v).__name__})')
        return v

    def to_bytes(self, o): raise TypeError(f'{self.name}: fixed-width values are packed, not stored alone')
    def from_bytes(self, b):
        "Stored number `b`, of NumPy or Python, as a number of Python"
        return b.item() if hasattr(b, 'item') else b

def narrow(
    lo:int, # Smallest number
    hi:int # Largest number
)->str: # numpy dtype, such as 'u1'
    """The narrowest dtype for all integers from `lo` to `hi`: 'u1', 'u2' or 'u4', else 'i1', 'i2', 'i4' or 'i8'

    Raises `ValueError` if they do not fit 'i8'."""
    for dtype in 'u1','u2','u4','i1','i2','i4','i8':
        if np.iinfo(dtype).min<=lo and hi<=np.iinfo(dtype).max: return dtype
    raise ValueError(f'integers from {lo} to {hi} do not fit 64 bits with a sign')

def code_dtype(
    n:int # Number of labels
)->str: # numpy dtype
    "The narrowest dtype for the codes of `n` labels, 0 to `n-1`"
    return narrow(0, max(n-1, 0))

# --- Labels

# A label is stored as its code, its place in the vocabulary. Where a vocabulary has texts, an integer is a code
# already, as in the `cls` members that WebDataset writes:

def label_list(
    field:str, # Name of the field, for the message
    labels # Its vocabulary: a list or the like
)->list:
    "The labels of a vocabulary; raises `TypeError` for what has no order, such as a set, and for a text"
    if isinstance(labels, (str,bytes,set,frozenset,dict)) or not np.iterable(labels):
        raise TypeError(f'vocab of {field!r}: want a list of labels, in the order of their codes, not the '
                        f'{type(labels).__name__} {labels!r:.60}')
    return list(labels)

class LabelCodes:
    "The codes of the labels of a vocabulary: `dog` has the code 1 in `['cat','dog']`"
    def __init__(self,
        field:str, # Name of the field, for messages
        labels:list # The vocabulary: texts and integers, in the order of their codes
    ):
        "Raises `ValueError` for a label that is there twice"
        self.field,self.labels,self.codes = field,labels,{}
        for code,label in enumerate(labels):
            if self.codes.setdefault(label, code)!=code:
                raise ValueError(f'vocab of {field!r}: the label {label!r} is there twice, as codes '
                                 f'{self.codes[label]} and {code}: give vocab= with another name for one of them')

    def check(self, labels):
        "Raises `ValueError` unless all of `labels`, several of one sample, are in the vocabulary; codes are none"
        for label in labels:
            if label not in self.codes: raise ValueError(f'label {label!r} is not in the vocab of {self.field!r}')

    def __call__(self, label)->int:
        """The code of `label`, a label of the vocabulary; an integer that is none may be the code of a label of text

        Raises `ValueError` or `TypeError` for anything else."""
        try: is_label = label in self.codes
        except TypeError:
            raise TypeError(f'{self.field}: label {label!r:.60}: a label is a text or an integer') from None
        if is_label: return self.codes[label]
        if isinstance(label, str): raise ValueError(f'label {label!r} is not in the vocab of {self.field!r}')
        code = int(FixedCodec('cls', 'i8').to_num(label))
        # where labels are numbers themselves, a number that is not among them is no code
        if not 0<=code<len(self.labels) or not isinstance(self.labels[code], str):
            raise ValueError(f'label {label!r} is not in the vocab of {self.field!r}, which has {len(self.labels)}')
        return code

# --- StrokeSequence

# A picture loses the order in which a drawing was made. sketch-rnn reads and writes drawings as steps of a pen. The
# conversion loses nothing: the sums of dx and dy are the points.

class StrokeSequence:
    """Turns drawings into sequences for recurrent networks, in the formats of sketch-rnn (Ha and Eck, 2017)

    `create` and `batch` take strokes, `of_points` takes points with times. Each row is a step of the pen: dx and dy
    from the point before, the first one from (0, 0), with `time` the seconds since then, and the state of the pen.
    `fmt=5` has three states, one of which is 1: the pen draws on, it is lifted after this point, or the drawing has
    ended. The last row is 0 but for a 1 at its end; padding, which is added when batches are made, is such rows.
    `fmt=3` has one state, 1 if the pen is lifted after this point, and no row for the end. Points beyond `max_len` are
    cut off."""
    def __init__(self,
        fmt:int=5, # 5 or 3 columns
        scale:float=1., # What dx and dy are multiplied by
        max_len:int=None, # Points of a drawing that are used, at most; default: all
        time:bool=False, # A column after dx and dy for the seconds since the point before? For fields `points.npy`
    ):
        if fmt not in (3, 5): raise ValueError(f'fmt must be 3 or 5, not {fmt!r}')
        if max_len is not None and max_len<1: raise ValueError(f'max_len must be at least 1, not {max_len}')
        self.fmt,self.scale,self.max_len,self.time = fmt,scale,max_len,time

    def create(self,
        b:bytes|list # A drawing: stored bytes, or strokes of shape (2,n)
    )->np.ndarray: # `float32`, shape (steps, `fmt`)
        "The sequence of one drawing; raises `ValueError` if `b` is damaged or no drawing, and always if `time` is set"
        if self.time:
            raise ValueError('strokes have no times; drawing_samples(…, times=True) keeps them in the field '
                             "'points.npy'")
        strokes = unpack_strokes(b) if isinstance(b, bytes) else as_strokes(b)
        lifted = np.zeros(sum(s.shape[1] for s in strokes), bool)
        lifted[np.cumsum([s.shape[1] for s in strokes])-1] = True
        return self._steps(np.concatenate(strokes, 1).T.astype(np.float64), lifted)

    def batch(self, drawings:list)->list:
        "The sequences of `drawings`, bytes or strokes, as `create` makes them"
        return [self.create(o) for o in drawings]

    def of_points(self,
        points:np.ndarray # Shape (n,4): x, y, milliseconds, 1 for the last point of a stroke
    )->np.ndarray: # `float32`, shape (steps, `fmt`), with `time` one column more
        "The sequence of a drawing that is stored as points with times; raises `ValueError` for another shape"
        points = np.asarray(points, np.float64)
        if points.ndim!=2 or points.shape[1]!=4: raise ValueError(f'want points of shape (n,4), got {points.shape}')
        return self._steps(points[:,:3] if self.time else points[:,:2], points[:,3]>0)

    def _steps(self, points, lifted):
        "The sequence of `points`, (n,2), or (n,3) with times; `lifted`, bool, marks the last point of each stroke"
        points,lifted = points[:self.max_len],lifted[:self.max_len]
        n,dims = points.shape
        steps = np.zeros((n+(self.fmt==5), dims+self.fmt-2), np.float32)
        steps[:n,:dims] = np.diff(points, axis=0, prepend=0)
        steps[:n,:2] *= self.scale
        steps[:n,2:dims] /= 1000
        steps[:n,dims+(self.fmt==5)] = lifted
        if self.fmt==5:
            steps[:n,dims] = ~lifted
            steps[n,-1] = 1
        return steps

    def __repr__(self):
        return f'StrokeSequence(fmt={self.fmt}, scale={self.scale:g}, max_len={self.max_len}, time={self.time})'

# --- Points and boxes
#
# Points and boxes are arrays or lists, so the name of a field says that it holds them. fastai makes points of any array
# with an even number of elements, and so would take other arrays for points without a word. These functions check the
# shape first.

def holds_boxes(
    field:str, # Name of a field
    codec:str # Name of its codec
)->bool:
    "Does a field of arrays or JSON hold boxes, by a part of its name?"
    return _holds(field, codec, {'boxes','bboxes','bbox'})

def holds_points(
    field:str, # Name of a field
    codec:str # Name of its codec
)->bool:
    "Does a field of arrays or JSON hold points, by a part of its name?"
    return _holds(field, codec, {'points','keypoints','landmarks'})

def _holds(field, codec, parts):
    return codec in ('npy','npz','json') and not parts.isdisjoint(field.split('.'))

# --- Values

def as_points(
    value # Array or list of points (x, y) in pixels, shape (n,2), or their numbers in a row, shape (2n,)
)->np.ndarray: # Shape (n,2)
    "Points in an image; raises `ValueError` for another shape"
    return _rows(value, 2, 'points', 'points with times take draw=StrokeSequence(…)')

def as_boxes(
    value # Array or list of corners (x1, y1, x2, y2) in pixels, shape (n,4), or their numbers in a row, shape (4n,)
)->np.ndarray: # Shape (n,4)
    "Boxes in an image; raises `ValueError` for another shape, if one is not finite, or if it ends before it begins"
    boxes = _boxes(value, 'a box is (x1, y1, x2, y2)')
    bad = np.flatnonzero((boxes[:,2:]<boxes[:,:2]).any(1))
    if not len(bad): return boxes
    raise ValueError(f'box {bad[0]} is {boxes[bad[0]].tolist()}, which ends before it begins: a box is '
                     '(x1, y1, x2, y2); for boxes (x, y, width, height), the name of the field needs a part xywh')

def as_sized_boxes(
    value # Array or list of (x, y, width, height) in pixels, shape (n,4), or their numbers in a row, shape (4n,)
)->np.ndarray: # Corners (x1, y1, x2, y2), float64, shape (n,4)
    "Boxes in an image; raises `ValueError` for another shape, if one is not finite, or for a negative size"
    boxes = _boxes(value, 'a box is (x, y, width, height)')
    if (boxes[:,2:]<0).any(): raise ValueError(f'a box with a negative width or height: {boxes.tolist()}')
    boxes = boxes.astype(np.float64)   # a sum may not fit into the stored type
    return np.concatenate([boxes[:,:2], boxes[:,:2]+boxes[:,2:]], 1)

def _boxes(value, advice):
    "As `_rows` for boxes; also raises `ValueError` if a number is infinite or NaN, which no comparison finds"
    boxes = _rows(value, 4, 'boxes', advice)
    bad = np.flatnonzero(~np.isfinite(boxes).all(1))
    if not len(bad): return boxes
    raise ValueError(f'box {bad[0]} is {boxes[bad[0]].tolist()}, but numbers of a box are finite')

def _rows(value, columns, what, advice):
    """`value`, an array or list, as an array of numbers of shape (n, `columns`); one of one dimension is reshaped

    Raises `ValueError` if that is not possible. Its message contains `what`, such as `boxes`, and `advice`."""
    try: array = np.asarray(value)
    except ValueError: array = np.zeros(0, object)   # lists of different lengths
    if array.dtype.kind not in 'biuf': raise ValueError(f'{what} are numbers, not {value!r:.100}')
    if array.ndim==1 and len(array)%columns==0: return array.reshape(-1, columns)
    if array.ndim==2 and array.shape[1]==columns: return array
    raise ValueError(f'an array of shape {array.shape}, while {what} have the shape (n, {columns}): {advice}, and '
                     f'arrays that are no {what} take the type Tensor')

def boxes_of(
    field:str, # Name of a field of boxes
    value # Its value
)->np.ndarray: # Corners (x1, y1, x2, y2), shape (n,4)
    "Boxes, which are (x, y, width, height) if the field has a part `xywh` of its name; raises `ValueError`"
    return (as_sized_boxes if 'xywh' in field.split('.') else as_boxes)(value)
