"""What the fields of a dataset hold, and which of them samples may lack

Docs: page `store/fields`"""
from dataclasses import dataclass

from ..codec.fields import get_codec, is_image, is_mask
from ..codec.images import ImageCodec
from ..core import Manifest, UnknownField

# --- FieldTable

# Samples may have different fields, as in tars that others wrote. A field that a sample may lack is read as `txt?`, and
# `jpg;png` is read as the first of these fields that a sample has. `FieldTable` answers all that follows from the names
# and entries of the fields in the manifest.

def parse_field(
    spec:str # A field, such as `jpg`; alternatives, `jpg;png`; with a `?` at the end if samples may lack them, `txt?`
)->tuple: # List of the names of fields, and whether samples may lack all of them
    "The names of fields in `spec`, of which the first that a sample has is read"
    return spec.removesuffix('?').split(';'),spec.endswith('?')

@dataclass
class FieldTable:
    "The fields of a dataset, by the names and specifications that `get_many` takes; a store has it as `field_table`"
    manifest:Manifest # Of the dataset
    name:str # Name of the dataset, for error messages

    def unknown(self, field)->UnknownField:
        "The error to raise for a field that does not exist"
        fields = ', '.join(repr(name) for name in self.manifest.fields if not name.endswith('.crc'))
        return UnknownField(f'{self.name}: no field {field!r}; there are {fields}')

    def choice(self,
        field:str # As `get_many` takes it
    )->tuple: # Names of existing fields, a list; `True` if `?` at the end allows samples to lack all of them
        "The fields that are read for `field`, such as `jpg;png` or `txt?`; raises `UnknownField` if there is none"
        if not isinstance(field, str): raise TypeError(f'{self.name}: a field is a text, not {field!r:.100}')
        if field in self.manifest.fields: return [field],False
        names,is_optional = parse_field(field)
        names = [name for name in names if name in self.manifest.fields]
        if names: return names,is_optional
        raise self.unknown(field)

    def entry(self,
        field:str # As `get_many` takes it
    )->dict: # `codec` and `dtype`, as in the manifest
        """How the values of `field` are stored; for alternatives with one codec, the entry of the first

        For images in several formats, the codec is `img`. Raises `UnknownField`, and `ValueError` for other
        alternatives with different codecs, and if several fields with labels are alternatives."""
        if field in self.manifest.fields: return self.manifest.fields[field]
        names,_ = self.choice(field)
        entries = [self.manifest.fields[name] for name in names]
        codecs = {entry['codec'] for entry in entries}
        if len(names)==1 or len(codecs)==1 and not codecs&{'cls','labels'}: return entries[0]
        if all(isinstance(get_codec(codec), ImageCodec) for codec in codecs): return dict(codec='img', dtype=None)
        kinds = ', '.join(entry['codec'] for entry in entries)
        raise ValueError(f'{self.name}: {field!r} has alternatives of different kinds ({kinds}): read one of them, or '
                         'read them with get_many or RemoteDataset')

    @property
    def counts(self)->dict: # `{field: number of samples}`
        "The number of samples that have each field"
        n = self.manifest.n
        return {field:entry.get('n', n) for field,entry in self.manifest.fields.items() if not field.endswith('.crc')}

    def may_lack(self,
        field:str # Name of a field
    )->bool:
        "Do some samples have no such field? Raises `UnknownField`"
        if field not in self.manifest.fields: raise self.unknown(field)
        return self.manifest.fields[field].get('n', self.manifest.n)<self.manifest.n

    def holds_masks(self,
        field:str # One of the fields, or alternatives such as `jpg;png`
    )->bool:
        "Does `field` hold masks? Decided by its name, or by its vocabulary."
        return is_mask(field, self.entry(field)['codec'], self.manifest.vocab.get(field))

    @property
    def default(self)->str:
        """The first field that holds images other than masks; else the first with images; else with text

        Without these, it is the first that is neither labels nor names of samples; or the first. If samples may lack
        it, fields of the same name with images in other formats are alternatives: `jpg;png`, or `a.jpg;a.png`."""
        codecs = {field:self.manifest.fields[field]['codec'] for field in self.counts}
        images = [field for field in codecs if is_image(codecs[field])]
        others = [field for field in codecs if field!='key.txt' and codecs[field] not in ('cls','labels')]
        others.sort(key=lambda field: codecs[field]!='txt')   # texts come first
        found = next((field for field in images if not self.holds_masks(field)), (images or others or list(codecs))[0])
        if found not in images or not self.may_lack(found): return found
        stem,are_masks = found.rpartition('.')[0],self.holds_masks(found)
        if not isinstance(get_codec(found), ImageCodec): return found   # also if it is not named after its codec
        return ';'.join(field for field in images if field.rpartition('.')[0]==stem
                        and isinstance(get_codec(field), ImageCodec) and self.holds_masks(field)==are_masks)

    def summary(self,
        field:str # Name of a field
    )->str:
        "Codec and type of a field, the number of labels if it has any, and of samples if some lack it, as a text"
        entry,labels = self.manifest.fields[field],self.manifest.vocab.get(field)
        dtype = f" ({entry['dtype']})" if entry['dtype'] else ''
        summary = f"{entry['codec']}{dtype}" + (f', {len(labels):,} labels' if labels else '')
        return summary + (f", in {entry['n']:,} samples" if self.may_lack(field) else '')
