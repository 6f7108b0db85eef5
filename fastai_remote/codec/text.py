"""Text, JSON and lists of labels

Docs: page `codec/text`"""

# Text and JSON are stored as UTF-8.
#
# A value that would come back as something else is rejected. Examples are a JSON key that is not a `str`, a label that
# is neither a `str` nor an `int`, and a `str` with a lone surrogate, which `os.fsdecode` returns for a file name in
# another encoding. There is one exception: JSON has no tuples, so they come back as lists. `nan` and `inf` are stored
# as Python's `json` writes and reads them.

import json

import numpy as np
from fastcore.foundation import L

from .base import Codec, Encoded, utf8
from ..core import parse_json

class TextCodec(Codec):
    "Codec of `str`, stored as UTF-8"
    def pack(self, o):
        if not isinstance(o, str): raise TypeError(f'{self.name}: want str, got {type(o).__name__}')
        return utf8(o)
    def unpack(self, b): return b.decode()

MAX_JSON_BYTES = 1<<30 # Bytes of memory that a value may take
_TOO_DEEP = 'lists or objects that are nested too deeply'

class JsonCodec(Codec):
    """Codec of anything that JSON can represent

    `nan` and `inf` are stored as Python's `json` writes them. Tuples come back as lists."""
    def pack(self, o):
        try: s = json.dumps(o, ensure_ascii=False, separators=(',',':'))   # raises an error if `o` contains itself
        except RecursionError: raise ValueError(f'{self.name}: {_TOO_DEEP}') from None
        except TypeError as e: raise TypeError(f'{self.name}: {e}: make a text or numbers of it') from None
        self._check_keys(o)
        return utf8(s)

    def _check_keys(self, o):
        "Raise `TypeError` if a dict in `o` has a key that JSON would convert to a `str`"
        todo = [o]
        while todo:
            value = todo.pop()
            if isinstance(value, dict):
                bad = [k for k in value if not isinstance(k, str)]
                if bad:
                    raise TypeError(f'{self.name}: key {bad[0]!r} would come back as a str; JSON has no other keys')
                todo.extend(value.values())
            elif isinstance(value, (list,tuple)): todo.extend(value)

    def unpack(self, b):
        return parse_json(b, MAX_JSON_BYTES)

    def check(self, b):
        try: self.from_bytes(b)
        except ValueError as e: raise ValueError(f'{self.name}: no JSON: {e}') from None

def whole_label(
    field:str, # Name of the field, for the message
    label # A label, of Python
):
    "`label` itself, or as an `int` if it is a `float` that is a whole number; raises `ValueError` for another `float`"
    if not isinstance(label, float): return label
    if label.is_integer(): return int(label)
    raise ValueError(f'{field}: label {label} is no whole number: a number to predict goes into a field such as '
                     'target.f4')

def are_several(value)->bool:
    "Is `value` a list, tuple, set, `L`, or an array of one dimension, which may be several labels?"
    return isinstance(value, (list,tuple,set,frozenset,L)) or isinstance(value, np.ndarray) and value.ndim==1

def are_labels(value)->bool:
    "Is `value` a list, tuple, set, `L` or array of texts? So is an empty one, except an array"
    if isinstance(value, np.ndarray) and not value.size: return False
    return are_several(value) and all(isinstance(x, str) for x in value)

class LabelsCodec(JsonCodec):
    """Codec of several labels per sample, `str` or `int`, stored as a JSON list; the labels of a set are sorted

    A label that is a `float` and a whole number becomes an `int`."""
    def pack(self, o):
        if isinstance(o, str): raise TypeError(f'{self.name}: want a list of labels, got the str {o!r}')
        if isinstance(o, dict) or not hasattr(o, '__iter__'):
            raise TypeError(f'{self.name}: want a list of labels, got {o if o is None else type(o).__name__}')
        # NumPy would make an integer of a time with nanoseconds
        labels = [x.item() if isinstance(x, np.generic) and x.dtype.kind not in 'mM' else x for x in o]
        labels = [whole_label(self.name, label) for label in labels]
        if isinstance(o, (set,frozenset)): labels.sort(key=lambda label: (str(type(label)), label))
        self._check_labels(labels)
        return super().pack(labels)

    def to_bytes(self, o):
        b = super().to_bytes(o)
        is_own = isinstance(o, Encoded) and o.codec==self.name
        if isinstance(o, (bytes,bytearray,memoryview)) and not is_own: self._check_labels(self.from_bytes(b))
        return b

    def _check_labels(self, labels):
        "Raise `TypeError` unless `labels` is a list of `str` and `int`, `ValueError` for text that is no valid Unicode"
        if not isinstance(labels, list):
            raise TypeError(f'{self.name}: want a list of labels, got {type(labels).__name__}')
        for label in labels:
            if isinstance(label, str): utf8(label)
            elif type(label) is not int: raise TypeError(f'{self.name}: a label is a str or an int, not {label!r}')
