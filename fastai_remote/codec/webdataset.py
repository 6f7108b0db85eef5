"""WebDataset's conventions: how the files in a tar are named, and how labels and numbers are written in them

Docs: page `codec/webdataset`"""
import math, re

from .base import utf8
from .fields import get_codec

# --- Names

# A file in a tar is called `KEY.EXTENSION`: `000012.left.jpg` is the field `left.jpg` of the sample `000012`.

# As in WebDataset: the key goes up to the first dot of the last part of the path, and the extension follows
_sample_name = re.compile('((?:.*/|)[^.]+)[.]([^/]*)$')
_metadata_name = re.compile('__[^/]*__($|/)')

def split_name(
    name:str # Name of a member, as WebDataset writes it: `folder/000012.left.jpg`
)->tuple: # Key of the sample, and extension in small letters: `folder/000012`, `left.jpg`; else `(None, None)`
    """The key and the extension in the name of a member, by WebDataset's rules

    Files without an extension and hidden files belong to no sample. Nor does a file that is called `__…__` and is in no
    folder, or one whose outermost folder is called so. WebDataset makes samples of hidden files in folders, such as
    those that macOS writes (`folder/._000012.jpg`); here they belong to none."""
    if '/' not in name and name.startswith('__') and name.endswith('__') or _metadata_name.match(name): return None,None
    found = _sample_name.match(name)
    if not found or found[1].endswith('/'): return None,None
    return found[1],found[2].lower()

def utf8_key(
    key:str # Of a sample of others
)->str: # `key` itself if it can be stored as UTF-8
    "A key in which bytes that are no UTF-8, such as those of a name in another encoding, are written as `%E9`"
    return re.sub('[\ud800-\udfff]', lambda found: f'%{ord(found[0])&0xff:02X}', key)

def writable_key(
    key # Of a sample of others
)->str: # `key` itself if nothing is wrong with it; `None` if nothing is left of it
    """A key for a sample in a tar that is as much as possible like `key`, which may be that of a sample in another tar

    Bytes that are no UTF-8 become `%E9`, backslashes and line breaks `_`; empty parts of the path, `.` and `..` are
    left out, and of a very long key the end is kept. Raises `TypeError` if it is no text."""
    if not isinstance(key, str): raise TypeError(f'__key__ {key!r:.60}: the key of a sample is a str')
    parts = [part for part in re.sub(r'[\\\0\n]', '_', utf8_key(key)).split('/') if part not in ('','.','..')]
    return '/'.join(parts)[-1000:].lstrip('/') or None

def check_key(
    key # Of a sample that is written to shards
):
    "Raise `ValueError` or `TypeError` unless a sample in a tar can have this key, and be read by WebDataset"
    if not isinstance(key, str): raise TypeError(f'__key__ {key!r:.60}: the key of a sample is a str')
    utf8(key)
    if any(part in ('','.','..') for part in key.split('/')) or re.search(r'[\\\0\n]', key) or len(key)>1000:
        raise ValueError(f'__key__ {key!r:.200} cannot name a sample: it is a path without empty parts, . and ..')
    if split_name(f'{key}.x')!=(key,'x'):
        raise ValueError(f'__key__ {key!r:.200} cannot name a sample in a tar: there is a dot in its last part, or it '
                         'begins with __…__; WebDataset would read another key')

# --- Labels and numbers

# A value of fixed width, such as a label, is written as text. WebDataset and HuggingFace's `datasets` read integers
# from `cls`, `id` and `index`. Other numbers become JSON, `age.f4.json`, and labels that are text become `cls.txt`.

INTEGER_FIELDS = 'cls','id','index' # The last parts of field names that WebDataset and `datasets` read as integers

def number_extension(
    field:str, # Name of a field
    value # Its value in a sample: bytes, a label as `str`, or a number
)->str: # '', '.txt' or '.json'
    """What is appended to the name of a field in a shard, so that other tools read its value

    A label that is text becomes `cls.txt`. A number whose field other tools do not know becomes JSON: `age.f4.json`."""
    if isinstance(value, bytes): return ''
    if isinstance(value, str): return '.txt'
    return '' if field.rsplit('.', 1)[-1].lower() in INTEGER_FIELDS else '.json'

def member_extension(
    field:str, # Name of a field
    spec:dict, # Its entry in the plan of an ingest: `dtype`, and of labels without a vocabulary `staged` and `text`
)->str: # Such as `jpg`, `cls.txt` for labels that are text, or `age.f4.json`
    "The extension that a field has in shards: what follows the key of a sample and a dot"
    if spec['dtype'] is None: return field
    return field+number_extension(field, '' if spec.get('staged') and spec['text'] else 0)

def check_members(
    where:str, # Name or URL of the dataset, for messages
    fields:dict, # `{field: entry}` of the plan of an ingest
    others:dict=None, # Fields that the samples have already
):
    """Raises `ValueError` if two fields would have the same extension in shards, in small letters

    It is also raised for a field whose name would not be read back, such as one with a slash."""
    known = {member_extension(field, spec).lower():field for field,spec in (others or {}).items()}
    for field,spec in fields.items():
        if field.endswith('.crc'): continue   # a checksum, which is in the index
        extension = member_extension(field, spec)
        if '\0' in field or split_name(f'0.{extension}')!=('0',extension.lower()):
            raise ValueError(f'{where}: {field!r} cannot name a field in shards, whose members have the names of the '
                             'fields: no / and no NUL; rename it, for instance in fn')
        other = known.setdefault(extension.lower(), field)
        if other!=field:
            raise ValueError(f'{where}: {other!r} and {field!r} cannot both name fields in shards: WebDataset would '
                             f'read the members of both as {extension.lower()!r}; rename one, for instance in fn')

def field_of(
    extension:str # From `split_name`
)->str:
    """The field that an extension stands for: `cls` for `cls.txt`, a text label; `age.f4` for `age.f4.json`, a number

    Any other extension is the name of its field: the result is `extension` itself."""
    base,_,last = extension.rpartition('.')
    codec = get_codec(base) if base else None
    if last=='txt': return base if codec is not None and codec.name=='cls' else extension
    is_number = codec is not None and codec.dtype is not None and codec.name not in INTEGER_FIELDS
    return base if last=='json' and is_number else extension

# As `str` writes an integer: 7 is one, and 007 is text, since both may be there, as different labels
_integer = re.compile('0|-?[1-9][0-9]{0,18}')

def integer_of(
    text:str, # A label
)->int: # `None` if it is none, or does not fit 64 bits with a sign
    """The integer that a label is, if `str` writes it so: `007` and `+7` are none

    White space around it, such as the end of a line, does not count."""
    text = text.strip()
    number = int(text) if _integer.fullmatch(text) else None
    return number if number is not None and -1<<63<=number<1<<63 else None

def is_exact_label(
    name:str, # Of a member with a label
)->bool:
    "Does the name end in `.txt`, so that all of the text is the label?"
    return name.lower().endswith('.txt')

def parse_number(
    field:str, # Name of the field
    value:bytes, # Its value in a tar
    is_text:bool=False, # Is a label text, also if it looks like an integer?
    is_exact:bool=False, # Is a label all of the text, with the end of the line? See `is_exact_label`
): # The number or label as `int`, `float` or `str`; `value` itself if the field does not have a fixed width
    """The value of a field whose numbers and labels are written as text, as WebDataset does

    A label with leading zeros is text, so that `007` and `7` are two labels. Raises `ValueError` for bytes that are not
    UTF-8, and in a field of floats for text that is no number, or one such as `1e999` that does not fit. In a field of
    integers, text that is no integer is returned, and the codec refuses it."""
    codec = get_codec(field)
    if codec is None or codec.dtype is None: return value
    text = value.decode()
    if codec.name=='cls':
        if is_exact: return text
        number = None if is_text else integer_of(text)
        return text.removesuffix('\n').removesuffix('\r') if number is None else number
    text = text.strip()
    if re.fullmatch('-?[0-9]+', text): return int(text)
    if codec.dtype.kind!='f': return text
    try: number = float(text.replace('_', '?'))   # Python reads 1_000 as a number
    except ValueError: raise ValueError(f'{field}: {text[:40]!r} is no number') from None
    if math.isinf(number) and 'inf' not in text.lower(): raise ValueError(f'{field}: {text[:40]} does not fit a float')
    return number
