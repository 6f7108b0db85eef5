"""A dataset as HTML: in a notebook, and as a page to send around

Docs: page `view/html`"""

# Whatever comes from a dataset is escaped: its name, fields, splits, labels, keys, texts and errors. There are no
# scripts, and nothing is loaded from elsewhere: pictures are `data:` URLs.

import threading
from html import escape
from pathlib import Path

from .overview import LabelCounts, Overview, overview, RATIOS, some_numbers
from .pictures import cut_text, read_samples, Sample
from ..clock import wait
from ..core import CorruptSample, MissingSample, size_str, StoreError
from ..store.base import Store

MAX_HTML = 100_000 # Bytes of the HTML of a notebook
MAX_REPORT = 5_000_000 # Bytes of a report
_PICTURES = 12 # In a notebook

def text_html(
    text, # Anything that came from a dataset
    most:int=200 # Characters
)->str:
    "A text of the dataset in HTML: escaped, cut off, and with its direction of writing kept to itself"
    return f'<bdi>{escape(cut_text(str(text), most))}</bdi>'

# --- Style

# A notebook may be light or dark, whatever the system is. So colours are those of the text around, more or less
# transparent.

_STYLE = '''.fr-view{max-width:60em;line-height:1.4}
.fr-view table{border-collapse:collapse;margin:.3em 0}
.fr-view td,.fr-view th{text-align:left;padding:.1em .8em .1em 0;vertical-align:top;border:0;background:none}
.fr-view th{opacity:.7;font-weight:normal}
.fr-view .bar{display:inline-block;height:.7em;background:#4c8bf5;border-radius:2px;min-width:1px}
.fr-view .n{text-align:right;font-variant-numeric:tabular-nums}
.fr-view .grid{display:flex;flex-wrap:wrap;gap:8px;margin:.5em 0}
.fr-view figure{margin:0;width:112px;font-size:.8em;overflow:hidden}
.fr-view figure img{display:block;max-width:112px;max-height:112px;margin:0 auto}
.fr-view figure div{height:112px;overflow:hidden;white-space:pre-wrap;overflow-wrap:anywhere;
border:1px solid rgba(127,127,127,.4);padding:4px;box-sizing:border-box}
.fr-view figure div.wrong{color:#c33}
.fr-view figcaption{text-align:center;overflow-wrap:anywhere;max-height:4.2em;overflow:hidden}
.fr-view .quiet{opacity:.65}'''

_PAGE_STYLE = ''':root{color-scheme:light dark}
body{font:15px system-ui,sans-serif;margin:1.5em auto;max-width:60em;padding:0 1em;background:#fff;color:#222}
@media(prefers-color-scheme:dark){body{background:#1b1b1d;color:#ddd}}
h1{font-size:1.5em}h2{font-size:1.1em;margin:1.2em 0 .3em}.fr-view{max-width:none}'''

# --- Parts

def rows_html(
    rows:list # Lists of cells in HTML; the first cell of each is its heading
)->str:
    "A table without a heading"
    def row(cells): return f"<tr><th>{cells[0]}</th>{''.join(f'<td>{cell}</td>' for cell in cells[1:])}</tr>"
    return f"<table>{''.join(map(row, rows))}</table>" if rows else ''

def bars_html(
    counts:list, # `(HTML, number of samples)`
    of:int # The number that the longest bar can have
)->str:
    "Numbers as bars"
    def row(name, n):
        width = 12*n/max(of, 1)
        return (f'<tr><td>{name}</td><td class="n">{n:,}</td>'
                f'<td><span class="bar" style="width:{width:.2f}em"></span></td></tr>')
    return f"<table>{''.join(row(*pair) for pair in counts)}</table>"

def labels_html(
    counts:LabelCounts,
    most:int # Labels that are shown
)->str:
    "How often labels occur, as bars"
    if not counts.counted:
        names = ', '.join(text_html(label, 40) for label,_ in counts.most[:most])
        more = ', …' if counts.n_labels>min(most, len(counts.most)) else ''
        return f'{names}{more} <span class="quiet">(how often each occurs is not known)</span>'
    shown = counts.most[:most]
    bars = bars_html([(text_html(label, 40), n) for label,n in shown], max((n for _,n in shown), default=0))
    rest = counts.n_labels-len(shown)
    if not rest: return bars
    n = counts.others+sum(n for _,n in counts.most[most:])
    return f'{bars}<span class="quiet">and {rest:,} more labels, which occur {n:,} times</span>'

def sample_html(
    sample:Sample,
    most:int=None # Bytes that the file of its picture may have
)->str:
    "A sample as a figure with its labels, or its texts, or what is wrong with it"
    picture,caption = sample.picture(most),sample.title
    name = f'sample {sample.number:,}'
    if sample.errors and picture is None: body = f'<div class="wrong">{text_html("; ".join(sample.errors), 160)}</div>'
    elif picture is not None: body = f'<img src="{picture.url}" alt="{name}" title="{name}">'
    else: body = f'<div title="{name}">{text_html(next(iter(sample.texts.values()), ""), 160)}</div>'
    if not caption and picture is not None: caption = next(iter(sample.texts.values()), '')
    if sample.errors and picture is not None: caption = '; '.join([caption, *sample.errors])
    return f'<figure>{body}<figcaption>{text_html(caption or name, 60)}</figcaption></figure>'

def grid_html(
    samples:list, # Of `Sample`
    most:int # Bytes that all pictures together may have, as HTML
)->str:
    "Samples side by side"
    each = most*3//4//max(len(samples), 1)-250
    return f"<div class=\"grid\">{''.join(sample_html(sample, max(each, 500)) for sample in samples)}</div>"

# --- The summary

def _field_text(o, n):
    kind = '' if o.kind in (o.codec,'other') else f'{o.kind}, '
    dtype = f' ({o.dtype})' if o.dtype else ''
    nbytes = '' if o.nbytes is None else f"; {'' if o.is_exact else 'about '}{size_str(o.nbytes)}"
    some = f', in {o.samples:,} samples' if o.samples<n else ''
    return f'{escape(kind+o.codec+dtype)}{some}{nbytes}'

def _sizes_text(sizes):
    def side(low, mean, high): return f'{low:.0f}' if low==high else f'{low:.0f} to {high:.0f} (mean {mean:.0f})'
    text = f'{side(*sizes.width)} wide, {side(*sizes.height)} high, measured on {sizes.n:,} images'
    n = sum(sizes.ratios)
    ratios = ', '.join(f'{100*k/n:.0f}% {name}' for name,k in zip(RATIOS, sizes.ratios) if k) if n else ''
    return text+(f'; {ratios}' if ratios else '')

def _rows(o, most_fields):
    "The rows of a table with all but labels, `(heading, text)` in HTML"
    splits = [(text_html(split, 40), n) for split,n in list(o.splits.items())[:20]]
    rows = [[text_html(title, 40), text_html(text, 200)] for title,text in o.store_rows.items()]
    rows.append(['samples', f'{o.samples:,}, {size_str(o.nbytes)}'])
    if splits: rows.append(['splits', bars_html(splits, max(n for _,n in splits))])
    rows += [[f'field {text_html(field, 40)}', _field_text(entry, o.samples)]
             for field,entry in list(o.fields.items())[:most_fields]]
    if len(o.fields)>most_fields: rows.append(['', f'and {len(o.fields)-most_fields:,} more fields'])
    rows += [[f'{text_html(field, 40)} sizes', _sizes_text(sizes)] for field,sizes in list(o.sizes.items())[:10]]
    if o.failed:
        reasons = ''.join(f'<br>{n:,}: {text_html(reason)}' for reason,n in o.reasons[:5])
        some = f' (reasons of {o.n_reasons:,})' if 0<o.n_reasons<o.failed else ''
        rows.append(['left out', f'{o.failed:,} samples{some}{reasons}'])
    version = o.version
    earlier = f", made from {version['earlier']:,} earlier ones" if version['earlier'] else ''
    created = escape(version['created'].replace('T', ' ').removesuffix('+00:00'))
    rows.append(['created', f"{created} UTC, version {version['generation']:,}{earlier}"])
    return rows

def overview_html(
    o:Overview,
    most_labels:int=10, # Labels of a field that are shown
    most_fields:int=20 # Fields that are shown
)->str:
    "An overview as HTML, without pictures"
    labels = [[f'{counts.n_labels:,} labels of {text_html(field, 40)}', labels_html(counts, most_labels)]
              for field,counts in list(o.labels.items())[:most_fields]]
    return rows_html([*_rows(o, most_fields), *labels])

def summary_html(
    o:Overview,
    samples:list=() # Of `Sample`
)->str: # At most `MAX_HTML` bytes
    "What a notebook shows of a dataset"
    for most_labels,most_fields in ((10,20), (5,10), (3,4), (0,0)):
        table = overview_html(o, most_labels, most_fields)
        if len(table.encode())<MAX_HTML//3: break
    head = f'<div class="fr-view"><style>{_STYLE}</style><b>{text_html(o.name, 80)}</b>{table}'
    grid = grid_html(samples, MAX_HTML-len(head.encode())-12_000) if samples else ''
    return f'{head}{grid}</div>'

def notebook_html(
    store:Store,
    seconds:float=1. # The longest time to wait for pictures
)->str: # `None` if they do not come in time, or cannot be read
    "What a notebook shows of a dataset: `summary_html` with twelve pictures, in one request for them"
    found,is_done = [],threading.Event()
    def work():
        try: found.append(_summary_of(store))
        except (StoreError,OSError,ValueError,MemoryError): pass   # the caller shows what it knows without them
        finally: is_done.set()
    # a server that does not answer is asked again for longer than a person wants to wait
    threading.Thread(target=work, daemon=True, name='fastai_remote summary').start()
    wait(is_done, seconds)
    return found[0] if found else None

def _summary_of(store):
    o = overview(store, sample=0)
    try: samples = read_samples(store, some_numbers(store, _PICTURES), 112)
    except (MissingSample,CorruptSample): samples = []   # not values: what says where they are
    return summary_html(o, samples)

# --- The report

def write_report(
    store:Store,
    path:str|Path, # The file to write
    n:int=100, # Samples that are shown
    sample:int=1000 # Samples that are read for sizes of images and bytes of fields
)->Path: # `path`
    """Writes a page of a dataset, with an overview and pictures of some samples, of at most `MAX_REPORT` bytes

    It needs no other file, no network and no script. Raises what reading raises, and `OSError`."""
    o,samples = overview(store, sample),read_samples(store, some_numbers(store, n))
    table = overview_html(o, 50, 200)
    if len(table.encode())>MAX_REPORT//4: table = overview_html(o, 10, 20)
    grid = grid_html(samples, MAX_REPORT-len(table.encode())-len(samples)*1500-20_000)
    sampled = f'<p class="quiet">Sizes and bytes are those of {o.sampled:,} samples.</p>' if o.sampled else ''
    title = text_html(o.name, 80)
    page = ('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'; '
            f'img-src data:"><title>{escape(cut_text(o.name, 80))}</title><style>{_PAGE_STYLE}\n{_STYLE}</style></head>'
            f'<body><div class="fr-view"><h1>{title}</h1>{table}{sampled}<h2>{len(samples):,} samples</h2>{grid}</div>'
            '</body></html>')
    path = Path(path)
    path.write_text(page, encoding='utf-8', newline='\n')
    return path
