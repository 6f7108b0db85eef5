"""Points and bounding boxes in an image: the arrays that hold them, and how their fields are named

Docs: page `codec/boxes`"""

# Points and boxes are arrays or lists, so the name of a field says that it holds them. fastai makes points of any array
# with an even number of elements, and so would take other arrays for points without a word. These functions check the
# shape first.

import numpy as np

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
