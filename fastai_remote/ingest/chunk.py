"""A worker converts, encodes and writes one chunk of samples

Docs: page `ingest/chunk`"""

# An ingest is divided into chunks. A chunk has a number and a range of sample numbers. A worker, on this machine or on
# another one, reads the samples of a chunk from the source, applies `fn`, encodes the fields and writes them to the
# store. It returns a record, which only holds counts.

import hashlib, io, os
from contextlib import suppress

import numpy as np
from PIL import Image
from fastcore.basics import store_attr

from ..codec.arrays import NpyCodec, NpzCodec, refuse_mask
from ..codec.base import Codec, Encoded, utf8
from ..codec.fields import check_key, get_codec, infer_codec, is_image, is_mask, mask_image, utf8_key, writable_key
from ..codec.images import ImageCodec
from ..codec.numbers import code_dtype, label_list, LabelCodes
from ..codec.text import whole_label
from ..codec.stats import IMAGES_PER_CHUNK, has_stats, ImageStats
from ..core import crc32s
from ..source.base import (
    as_sample, no_address, read_file, refuse_address, SplitChunk, stable_repr, storable)
from ..write.base import ServerRestarted

# --- The plan

# The first sample that can be converted determines the fields. All other samples must have the same fields.

def as_vocab(
    vocab:list|dict # Labels of `cls`, or `{field: labels}`; or None
)->dict: # `{field: list of labels}`
    """The vocabulary of each field; `{}` for `None`

    Raises `ValueError` for labels that cannot be stored, or that are there twice (those of a mask may be), and
    `TypeError` for labels that are no list or the like, such as a set or a `str`."""
    if vocab is None: vocab = {}
    if not isinstance(vocab, dict): vocab = {'cls':vocab}
    vocab = {field:label_list(field, labels) for field,labels in vocab.items()}
    res = {field:[plain_label(field, label) for label in labels] for field,labels in vocab.items()}
    for field,labels in res.items():
        for label in (field, *labels):
            try: utf8(str(label))
            except ValueError as e: raise ValueError(f'vocab of {storable(field)!r}: {e}; rename it') from None
            if not isinstance(label, (str,int)):
                raise ValueError(f'vocab of {field!r}: a label is a text or an integer, not {label!r}')
        codec = get_codec(field)
        # raises `ValueError` for a label that is there twice; codes of masks may share a name
        if codec is None or codec.name in ('cls','labels'): LabelCodes(field, labels)
    return res

def check_vocab(
    vocab:dict, # What the user gave, as `as_vocab` returns it
    fields:dict, # As `plan_fields` returns them
):
    "Raise `ValueError` for a vocabulary of a field that is not there, or that has no labels and can be no mask"
    have = ', '.join(field for field in fields if not field.endswith('.crc'))
    for field in vocab:
        if field not in fields:
            raise ValueError(f'vocab= names labels of {field!r}, but the samples have no such field; there are {have}: '
                             f'give {{field: labels}}')
        codec = fields[field]['codec']
        if codec=='bin':
            raise ValueError(f"vocab= names codes of {field!r}, which holds bytes of no known kind (bin), so that they "
                             f"cannot be checked: call the field {field+'.png'!r}, or as its format is")
        if codec not in ('cls','labels') and not has_codes(codec):
            raise ValueError(f'vocab= names labels of {field!r}, which has none: it is stored as {codec}; a field '
                             'whose name ends in .cls has labels')

def has_codes(codec:str)->bool:
    "Can a field of this codec be a mask: an image or array whose values are codes of a vocabulary?"
    return is_image(codec) or isinstance(get_codec(codec), (NpyCodec,NpzCodec))

def check_codes(
    codec:Codec, # Of the field
    encoded:bytes, # A mask
    field:str, # Its name, for the message
    n_labels:int, # Labels in its vocabulary
):
    """Raise `ValueError` unless all values of a mask are codes from 0 to `n_labels`-1, as `PILMask` opens it

    Several arrays, a dict in a field `npz`, are not checked: they are no mask."""
    if isinstance(codec, (NpyCodec,NpzCodec)): codes = codec.from_bytes(encoded)
    else: codes,n_labels = _mask_codes(codec, encoded),min(n_labels, 256)   # a mask is opened with 8 bits
    if isinstance(codes, dict) or not codes.size: return
    if codes.dtype.kind not in 'biuf':
        raise ValueError(f'{field}: a mask of {codes.dtype}; codes are numbers from 0 to {n_labels-1}')
    low,high,is_float = codes.min(),codes.max(),codes.dtype.kind=='f'
    if low>=0 and high<n_labels and (not is_float or (codes==codes.astype(int)).all()): return
    if not low>=0: bad = low
    elif not high<n_labels: bad = high
    else: bad = codes[codes!=codes.astype(int)].flat[0]
    raise ValueError(f'{field}: code {bad} is not in the vocab of {field!r}, which has {n_labels} labels, numbered '
                     'from 0: name all codes in vocab=, or give none')

def _mask_codes(codec, encoded):
    """The codes that `PILMask` reads from the encoded image, an array of shape (h, w)

    Pixels of more than 8 bits that it would change are returned as they are, so that none is mistaken for a code."""
    image = getattr(encoded, 'im', None)
    if image is None or getattr(codec, 'fmt', None)=='JPEG':   # a JPEG has other pixels than the image it is made of
        image = codec.image(encoded)
    codes = np.asarray(image if image.mode=='L' else image.convert('L'))
    if image.mode[0] in 'IF' and (codes!=np.asarray(image)).any(): return np.asarray(image)
    return codes

def can_name_field(field:str)->bool:
    "Can a field have this name? Keys and columns have `:#~@ ` and `.crc`, and `?` and `;` say how to read fields"
    return bool(field) and not any(c in field for c in ':#~@ ?;') and not field.endswith('.crc')

def plan_fields(
    sample:dict, # A converted sample
    vocab:dict, # Vocabularies that are known beforehand; is changed
    codecs:dict=None, # `{field: name of a codec}`, for fields whose names do not tell
)->dict: # `{field: {'codec', 'dtype', …}}`; `staged` marks labels whose codes are not known until all are seen
    """How each field of a dataset is stored; a field of bytes also has an entry `FIELD.crc`, for its checksums

    Labels that are true or false get the vocabulary `[False, True]`, which is added to `vocab`. Raises `ValueError`
    for a sample without fields and for names that cannot be stored, `TypeError` for a name that is no `str`."""
    res = {}
    if not sample: raise ValueError('a sample without fields: it, or what fn returns, is a dict {field: value}')
    for field,value in sample.items():
        if not isinstance(field, str): raise TypeError(f'{field!r} cannot name a field: a name is a text, such as jpg')
        utf8(field)
        if not can_name_field(field):
            raise ValueError(f'{field!r} cannot name a field: no space, none of : # ~ @ ? ;, and no .crc at the end, '
                             'where checksums are; rename it, for instance in fn')
        known = get_codec(field) or field not in (codecs or {})
        codec = infer_codec(field, value) if known else codecs[field]
        dtype = get_codec(codec).dtype
        if codec=='cls' and isinstance(plain_label(field, value), bool): vocab.setdefault(field, [False, True])
        if codec=='cls' and field in vocab:
            res[field] = {'codec':codec, 'dtype':code_dtype(len(vocab[field]))}
        elif codec=='cls':
            is_text = isinstance(plain_label(field, value), str)
            res[field] = {'codec':codec, 'dtype':'i8', 'staged':True, 'text':is_text}
        elif dtype is not None:
            res[field] = {'codec':codec, 'dtype':dtype.str[1:]}
        else:
            res[field],res[f'{field}.crc'] = {'codec':codec, 'dtype':None},{'codec':'crc', 'dtype':'u4'}
    return res

def stats_field(fields:dict, vocab:dict=None)->str:
    "The field of which statistics of images are gathered: the first with images that are no masks; None without one"
    for field,d in fields.items():
        if is_image(d['codec']) and not is_mask(field, d['codec'], (vocab or {}).get(field)): return field

# A mask is an image or an array whose values are codes, and `vocab={'mask.png': names}` gives their names. A code
# without a name would be an error in the loss function, or a class that nobody knows of. So each mask of such a field
# is opened as fastai's `PILMask` opens it, and a mask with another code is a failed sample.

# --- Encode

# `Columns` collects encoded samples until they are written. A sample that cannot be encoded leaves nothing behind.

def stored_fields(
    sample:dict, # `{field: value}`; WebDataset's samples also have a `__key__`, a `__url__` and the like
    key_field:str=None, # Field for the key of the sample; default: it is left out
)->dict: # `sample` itself if there is nothing to change
    "The fields of `sample`, without what is called `__…__`: that describes where WebDataset has found the sample"
    names = [name for name in sample if str(name).startswith('__') and name.endswith('__')]
    if not names: return sample
    fields = {name:value for name,value in sample.items() if name not in names}
    return {**fields, key_field:sample['__key__']} if key_field and '__key__' in names else fields

WRITE_BYTES = 4_000_000   # bytes per write: so large that round trips cost little, and small enough for any server

def plain_label(
    field:str, # Name of the field, for the message
    label # A text or a number, also as a tensor or an array without dimensions
):
    """Converts a scalar of NumPy or PyTorch to a value of Python, which can be looked up in a dict of labels

    A `float` that is a whole number becomes an `int`. Anything else is returned as it is. Raises `ValueError` for a
    masked value or another `float`, and `TypeError` for a time of NumPy."""
    if isinstance(label, float): return whole_label(field, label)
    if getattr(label, 'shape', None)!=(): return label
    refuse_mask(label, field)
    if getattr(getattr(label, 'dtype', None), 'kind', '') in ('m','M'):   # NumPy would make an integer of nanoseconds
        raise TypeError(f'label {label!r}: a label is a text or an integer: give str(label)')
    return whole_label(field, label.item())

_CHANGED_KEYS = 'keys of samples were changed: they could not be written, or the sample before had the same one'

class Columns:
    "Encoded samples that are not written yet, field by field"
    def __init__(self,
        fields:dict, # Of the plan: `{field: {'codec', 'dtype', …}}`
        vocab:dict, # Of the plan: `{field: list of labels}`
        stats_field:str=None, # Field of which statistics of images are gathered; default: none
        check_value=None, # As `Writer.check_value`; default: every value can be written
        takes_keys:bool=False, # As `Writer.takes_keys`: are the keys of samples columns?
    ):
        store_attr()
        self.last_key = None
        self.stats = ImageStats() if stats_field else None
        self.codecs = {field:get_codec(d['codec']) for field,d in fields.items()}
        self.width = {field:np.dtype(d['dtype']).itemsize for field,d in fields.items() if d['dtype']}
        self.masks = [field for field in vocab if field in fields and has_codes(fields[field]['codec'])]
        self.codes = {field:LabelCodes(field, labels) for field,labels in vocab.items() if field not in self.masks}
        arrays = {field:d['codec'] for field,d in fields.items() if d['codec'] in ('npy','npz')}
        self.array_masks = [field for field,codec in arrays.items() if is_mask(field, codec)]
        # `{field of boxes: field of their labels}`, such as `{'boxes.npy': 'boxes.labels'}`
        self.boxes = {f'{field.removesuffix(".labels")}.npy':field for field,d in fields.items()
                      if d['codec']=='labels' and 'boxes' in field.split('.')}
        self.notes = {}   # `{what encoding has changed: how many samples}`
        # `{field: {label or code: samples}}`
        self.counts = {field:{} for field,d in fields.items() if d['codec'] in ('cls','labels')}
        self.clear()

    def clear(self):
        "Forget the samples, which are written; but not their labels"
        self.numbers,self.keys,self.nbytes = [],[],0
        self.values = {field:[] for field in self.fields if not field.endswith('.crc')}

    def add(self,
        number:int, # Number of the sample
        sample:dict, # `{field: value}`
    ):
        "Encode `sample` and append it to the columns; if it cannot be stored, raises an error and keeps nothing of it"
        given = key = sample.get('__key__')
        if self.takes_keys and given is not None: key = writable_key(given)
        elif isinstance(given, str) and (key := utf8_key(given))!=given: sample = {**sample, '__key__':key}
        sample = stored_fields(sample, 'key.txt' if 'key.txt' in self.values and 'key.txt' not in sample else None)
        if sample.keys()!=self.values.keys():
            given = ', '.join(map(str, sample)) or 'none'
            raise ValueError(f"fields {given}; the first sample had {', '.join(self.values)}")
        if self.takes_keys and key is not None:
            check_key(key)
            if key==self.last_key: key = f'{key}-{number}'   # two samples in a row must not have one key
        several = {}
        encoded = {field:self._encode(field, value, several) for field,value in sample.items()}
        for field in self.masks: check_codes(self.codecs[field], encoded[field], field, len(self.vocab[field]))
        self._check_kinds(encoded)
        if self.stats_field and len(self.stats)<IMAGES_PER_CHUNK:
            image = encoded[self.stats_field]
            try: self.stats.add(getattr(image, 'im', None) or self.codecs[self.stats_field].image(image))
            except Exception: pass   # an array that is no image can be stored, but not counted
        for field,value in encoded.items():
            note = getattr(value, 'note', None)   # what encoding has changed
            if note:
                what,_,advice = note.partition('; ')
                note = f'{what} (field {field!r}); {advice}'
                self.notes[note] = self.notes.get(note, 0)+1
            # without the opened image
            self.values[field].append(bytes(value) if isinstance(value, Encoded) else value)
            self.nbytes += len(value) if isinstance(value, bytes) else self.width[field]
        for field,counts in self.counts.items():
            labels = dict.fromkeys(several[field]) if field in several else (encoded[field],)
            for label in labels: counts[label] = counts.get(label, 0)+1
        if key!=given: self.notes[_CHANGED_KEYS] = self.notes.get(_CHANGED_KEYS, 0)+1
        self.numbers.append(number)
        self.keys.append(key)
        self.last_key = key

    def _check_kinds(self, encoded):
        "Raise `ValueError` for what no kind of target could read: arrays that are no masks, boxes without labels"
        def decoded(field): return self.codecs[field].from_bytes(bytes(encoded[field]))
        for field in self.array_masks:
            try: mask_image(decoded(field))
            except ValueError as e: raise ValueError(f'{field}: {e}') from None
        for boxes,labels in self.boxes.items():
            if boxes not in encoded: continue
            n_boxes,n_labels = len(decoded(boxes)),len(decoded(labels))
            if n_boxes!=n_labels:
                raise ValueError(f'{n_boxes} boxes in {boxes!r} and {n_labels} labels in {labels!r}: '
                                 'each box needs one')

    def _encode(self, field, value, several):
        """What is stored for `value`: bytes; of a fixed-width field a number, a code or a label

        The labels of a field of codec `labels` are put into `several`. Raises the errors of the codec, and `TypeError`
        or `ValueError` for a value that cannot be stored."""
        codec = self.codecs[field]
        if codec.dtype is not None:
            if value is None:
                raise TypeError(f'field {field!r} is None in this sample, and stores numbers or labels: give a value, '
                                'leave the sample out, or use a field that ends in .json, which stores null')
            if self.fields[field]['codec']!='cls': return codec.to_num(value)
            return self._encode_label(field, value)
        if isinstance(value, (str,os.PathLike)) and is_image(codec.name):   # the path of a file
            refuse_address(str(value))
            value = read_file(value)
            if not isinstance(codec, ImageCodec): value = Image.open(io.BytesIO(value))   # a codec of pixels
        encoded = codec.to_bytes(value)
        if self.check_value: self.check_value(field, encoded)
        if self.fields[field]['codec']=='labels':
            several[field] = codec.from_bytes(encoded)
            if field in self.codes: self.codes[field].check(several[field])
        return encoded

    def _encode_label(self, field, label):
        """The code of `label`; or the label itself, `str` or `int`, while the vocabulary is not known

        Raises `TypeError` or `ValueError` for a wrong label."""
        label = plain_label(field, label)
        if field in self.codes: return self.codes[field](label)
        is_text = self.fields[field]['text']
        if isinstance(label, str)!=is_text:
            raise TypeError(f"label {label!r}: the first sample had {'a str' if is_text else 'a number'}")
        if not isinstance(label, str): return int(self.codecs[field].to_num(label))
        utf8(label)
        return label

    def columns(self)->dict: # `{field: list of bytes or labels, or array}`
        """The samples as `Writer.put` takes them, with a checksum column `FIELD.crc` for each field of bytes

        A field whose codes are not known is a list of `str`, or integers as `int64`. Column `__key__` is a list of the
        keys of the samples, if `takes_keys` and one of them has a key."""
        res = {}
        for field,values in self.values.items():
            d = self.fields[field]
            if d['dtype'] is None: res[field],res[f'{field}.crc'] = values,crc32s(values)
            elif not d.get('staged'): res[field] = np.array(values, d['dtype'])
            else: res[field] = values if d['text'] else np.array(values, np.int64)
        if self.takes_keys and any(key is not None for key in self.keys): res['__key__'] = self.keys
        return res

# --- Write

# A sample that cannot be read, converted or encoded leaves its place in the plan empty, and a line in the failures.

def write_chunk(
    open_writer, # Returns the writer in this process
    chunk:int, # Number of the chunk
    part, # What the source gave for it: a sized iterable of `(name, raw)`
    load, # raw -> sample
    fn, # sample -> sample, or `None`
    stream:bool=False, # Is it a part of a stream, which may have fewer samples than numbers?
)->dict: # The record of the chunk, as in `Writer.done`; also `run`, what `server_run` returned
    """Load, convert, encode and write the samples of one chunk; again if the server restarts meanwhile

    Samples that cannot be converted become failures. In a stream, the record has a `mark`, `part_fingerprint`, and the
    numbers that the part does not use are gaps. Raises `ServerRestarted` the third time."""
    writer = open_writer()
    if stream and isinstance(part, SplitChunk): writer.chunk_split = part.split
    mark = part_fingerprint(part) if stream else None   # before `load` and `fn`, which may change what they are given
    for _ in range(3):
        run = writer.server_run()
        record,failures = _write_samples(writer, chunk, part, load, fn)
        if stream:
            size = writer.plan['chunk']
            record['mark'] = mark
            if len(part)<size: record['gaps'].append([chunk*size+len(part), (chunk+1)*size])
        try:
            writer.done(chunk, record, failures, run)
            return {**record, 'run':run}
        except ServerRestarted as e: error = e
    raise error

def _write_samples(writer, chunk, part, load, fn):
    """Write the samples of `part` with `writer.put`; returns `(record, failures)` for `writer.done`

    `failures` is a list of `(sample, reason)`."""
    plan = writer.plan
    counted = plan.get('stats') if has_stats(chunk) else None
    columns = Columns(plan['fields'], plan['vocab'], counted, writer.check_value, writer.takes_keys)
    record,failures = dict(ok=0, bytes=0, failed=0, gaps=[]),[]
    def flush():
        writer.put(np.array(columns.numbers, np.int64), columns.columns())
        record['ok'] += len(columns.numbers)
        record['bytes'] += columns.nbytes
        columns.clear()
    for number,(name,raw) in enumerate(part, chunk*plan['chunk']):
        try: columns.add(number, convert(load, fn, raw))
        except Exception as e:
            if record['gaps'] and record['gaps'][-1][1]==number: record['gaps'][-1][1] += 1
            else: record['gaps'].append([number,number+1])
            failures.append((storable(str(name)), failure_reason(e)))
        if columns.nbytes>WRITE_BYTES: flush()
    flush()
    record['failed'] = len(failures)
    given = record['ok']+record['failed']
    if given!=len(part):
        raise ValueError(f'{writer.name}: the source gave {given:,} samples in a part whose length is {len(part):,}')
    record['counts'] = {field:list(counts.items()) for field,counts in columns.counts.items()}
    if columns.notes: record['notes'] = columns.notes
    if columns.stats: record['stats'] = columns.stats.to_text()
    return record,failures

def failure_reason(e:Exception)->str: # At most 400 characters
    "Why a sample failed, as it is stored: the same in each run, so without addresses in memory"
    given = getattr(e, 'given', None)
    reason = f'{type(e).__name__}: {e}'[:300]+(f' (fn was given: {given})' if given else '')
    return no_address(storable(reason))[:400]

def part_fingerprint(part)->int: # 1 to 2**62
    "Tells parts of a stream, iterables of `(name, raw)`, apart: a hash of the length, the first and the last sample"
    part = list(part)
    text = f'{len(part)} {stable_repr((part[0], part[-1]) if part else ())}'
    return 1+(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'big')>>2)

def convert(
    load, # raw -> sample: the source's `load`
    fn, # sample -> sample: the user's function, or `None`
    raw, # What the source gave; an exception if it could not read the sample
)->dict: # `{field: value}`
    "The sample that `raw` stands for; raises what `load` and `fn` raise, and `raw` itself if it is an exception"
    if isinstance(raw, Exception): raise raw
    sample = load(raw)
    if fn is None: return as_sample(sample)
    given = dict(sample) if isinstance(sample, dict) else sample   # `fn` may put other values into `sample`
    try: values = fn(sample)
    except Exception as e:
        with suppress(AttributeError): e.given = _types_of(given)   # for `failure_reason`
        raise
    if values is None: raise TypeError('fn returned None: it has to return a dict')
    return as_sample(values)

def _types_of(sample):
    "Types for a message: `dict of jpg (JpegImageFile), cls (str)`, or the type of what is no dict"
    if not isinstance(sample, dict): return type(sample).__name__
    fields = [f'{field} ({type(value).__name__})' for field,value in list(sample.items())[:8]]
    return f"dict of {', '.join(fields)}{', …' if len(sample)>8 else ''}"
