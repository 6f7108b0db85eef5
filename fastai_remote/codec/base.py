"""The interface of codecs, which convert objects to bytes and back

Docs: page `codec/base`"""

# The name of a field says what it contains, as in WebDataset: `jpg` is a JPEG, `cls` a class, `mask.png` a PNG that is
# a mask. The stored bytes are what the name says: `redis-cli --raw get pets:jpg:7` returns a file that any viewer
# opens. Nothing is ever unpickled.

# --- Codecs

# A codec converts in both directions: `to_bytes` and `from_bytes`. (These are not called encode and decode, because
# fastai uses these names for transforms.) An object that already is `bytes` is taken to be encoded. It is checked and
# stored as it is.

class Encoded(bytes):
    """Encoded bytes, which the codec whose name is `codec` stores without checking them again; made by `of`

    They are known to be sound: they have just been made, a checksum was compared, or the image in them was decoded.
    Other codecs check them as they check any bytes."""
    codec = None # Name of the codec
    im = None # The image that was encoded, if it was one
    note = None # What was changed by encoding, if anything, for the report of an ingest
    @classmethod
    def of(cls, b:bytes, codec:str, im=None, note:str=None):
        "`b` as `Encoded`, for the codec of name `codec`; `note` is 'what was changed; advice', or `None`"
        res = cls(b)
        res.codec,res.im,res.note = codec,im,note
        return res

class Codec:
    """Interface: converts one kind of object to bytes, and back

    A subclass defines `pack` and `unpack`, and `image` if it stores pictures; this class itself stores bytes.
    `register_codec` makes a codec available to all fields whose names have its name as their last part, as in
    `mask.png`. A codec rejects objects that its format cannot keep."""
    dtype = None # numpy dtype of fixed-width values, which are stored without `pack` and `unpack`; `None` for bytes
    def __init__(self,
        name:str # The last part of the names of its fields
    ): self.name = name

    def pack(self, o)->bytes:
        """Convert object `o`, which is not `bytes`, to bytes; raises `TypeError` or `ValueError` if it cannot be stored

        The base class raises `TypeError` for every object."""
        raise TypeError(f'{self.name}: cannot store a {type(o).__name__}; give bytes')

    def unpack(self, b:bytes)->object:
        "Convert the bytes of `pack` to the object; raises `ValueError` for damaged bytes. The base class returns `b`"
        return b

    def image(self, b:bytes):
        "The picture in `b` as a Pillow image, or `None` if the codec stores no pictures"

    def array(self, b:bytes):
        "The pixels in `b`, `uint8`, shape (h,w) or (h,w,channels); `None` if the codec does not store plain pixels"

    def to_bytes(self, o)->bytes:
        """The bytes to store for `o`

        Bytes, also a `bytearray` or `memoryview`, are taken to be encoded already: they are returned as `bytes`, and
        checked before, unless they are `Encoded` by this codec. Other objects are converted by `pack`. Raises
        `TypeError` or `ValueError`."""
        if isinstance(o, Encoded) and o.codec==self.name: return o
        if not isinstance(o, (bytes,bytearray,memoryview)): return self.pack(o)
        b = bytes(o)
        self.check(b)
        return b

    def from_bytes(self, b:bytes):
        "The object in `b`; raises `ValueError` for damaged bytes"
        return self.unpack(b)

    def check(self, b:bytes):
        "Raise `ValueError` unless `b` can be decoded"
        self.from_bytes(b)

    def __repr__(self): return f'{type(self).__name__}({self.name!r})'

def described(
    o # A value that does not fit
)->str: # Such as `the str 'a'`, or `an array of texts (str) of shape (3,)`
    "What `o` is in Python's words, for a message"
    dtype,shape = getattr(o, 'dtype', None),getattr(o, 'shape', None)
    kind = {'U':'texts (str)', 'S':'bytes', 'O':'objects', 'M':'times', 'm':'spans of time'}.get(
        getattr(dtype, 'kind', ''), f'{dtype}')
    if dtype is not None and shape: return f'an array of {kind} of shape {tuple(shape)}'
    if kind in ('times','spans of time'): return f"the {str(dtype).partition('[')[0]} {o}"
    value = o.item() if hasattr(o, 'item') else o
    return f'the {type(value).__name__} {value!r:.60}'

def utf8(s:str)->bytes:
    "`s` as UTF-8; raises `ValueError` if it is not valid Unicode"
    try: return s.encode()
    except UnicodeEncodeError:   # `os.fsdecode` returns such text for a file name in another encoding
        raise ValueError(f'{s[:200]!r} cannot be stored as UTF-8: it has a lone surrogate, as of a file name in '
                         'another encoding') from None
