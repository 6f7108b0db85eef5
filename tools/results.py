"Tables in Markdown of the benchmark results in tests/bench/results"
import json
from pathlib import Path

root = Path(__file__).parents[1]
folder = root/'tests/bench/results'

def result(
    name:str # Name of a result file without its suffix
)->dict: # Its content
    "Read a result file"
    return json.loads((folder/f'{name}.json').read_text(encoding='utf-8'))

def table(
    header:list, # Titles of the columns
    rows:list # A list of cells for each row
)->str: # The table in Markdown
    "A Markdown table: the first column is aligned to the left, the others to the right"
    def line(cells): return f"| {' | '.join(str(c).replace('|', '&#124;') for c in cells)} |"
    return '\n'.join([line(header), line(['---', *['---:']*(len(header)-1)]), *map(line, rows)])

def number(
    value:float # Any number
)->str: # For example `1,239`, `39.5` or `0.85`
    "Format a number with about three significant digits"
    return f'{value:,.0f}' if abs(value)>=100 else f'{value:.1f}' if abs(value)>=10 else f'{value:.2f}'

def times(value): return f'{value:.1f} times'
def megabytes(value): return f'{value/1e6:,.0f} MB'
def median(measure, name): return measure[name]['median']

STOCK = 'stock fastai, files'
PEERS_README = [   # a kind of data in peers.json, a contender, how the README calls it
    ('photographs', 'ours, from_redis', 'photographs in Redis'),
    ('photographs', 'ours, from_shards', 'photographs in shards'),
    ('photographs', 'ours, from_redis, shrink(256)', 'photographs shrunk to 256 pixels'),
    ('drawings', 'ours, strokes', 'drawings stored as strokes'),
    ('digits', 'ours, arrays', 'digits stored as arrays')]

def readme_table()->str:
    "The six rows of the README: this package, stock fastai, and the ratio of the two"
    peers = result('peers')
    rows = []
    for kind,ours,title in PEERS_README:
        measures,ratio = peers['results'][kind],peers['ratios'][kind][ours][STOCK]['samples_cpu_s']
        speeds = [number(median(measures[name], 'samples_cpu_s')) for name in (ours, STOCK)]
        rows.append([title, *speeds, times(ratio)])
    workers = {row['loader']:max(row['workers']) for row in result('memory')['rows'] if row['n']==5_000_000}
    rows.append(["a worker's memory, 5 million samples", megabytes(workers['ours']), megabytes(workers['stock']),
                 f"1/{workers['stock']/workers['ours']:.0f}"])
    return table(['samples per CPU second', 'fastai_remote', 'stock fastai', 'ratio'], rows)

def machine(
    found:dict # The content of a result file
)->str: # One sentence, or an empty string
    "Where a benchmark ran, and with which versions"
    where = found.get('machine', {})
    cores = f"{where['cores']} cores" if 'cores' in where else ''
    text = ', '.join(o for o in (where.get('cpu'), cores, where.get('platform')) if o)
    versions = ', '.join(f'{k} {v}' for k,v in found.get('versions', {}).items())
    return ' '.join(o for o in (f'Machine: {text}.' if text else '', f'Versions: {versions}.' if versions else '') if o)

def sentence_case(text): return text[0].upper()+text[1:]

def command(found): return f"Command: `{found['command']}`." if found.get('command') else ''

SPEEDS = ['contender', 'samples per CPU second', 'samples/s']

def speeds(name, measure): return [name, number(median(measure, 'samples_cpu_s')), number(median(measure, 'samples_s'))]

def memory_section()->str:
    "Memory and set-up time for datasets of several sizes"
    found = result('memory')
    names = {'stock':'stock fastai', 'ours':'fastai_remote'}
    rows = [[names[r['loader']], f"{r['n']:,}", f"{r['setup']:.2f} s", f"{r['start']:.2f} s", megabytes(r['parent']),
             megabytes(max(r['workers'])), f"{r['pickle']/1e6:.2f} MB"] for r in found['rows']]
    header = ['loader', 'samples', 'set-up', 'first batch', 'parent grows by', "a worker's private memory", 'pickled']
    text = ('Two worker processes. Set-up is the time to build the `DataLoaders`. The first batch is the time until '
            'the first batch of an epoch.')
    return '\n\n'.join(['## Memory', text, table(header, rows), machine(found), command(found)])

PEERS_TEXT = {
    'photographs':'ImageNet photographs of 107 KB, `RandomResizedCrop(224)` and a flip. Each loader runs with its own '
        'best settings. "fast" means the same decoder as ours, "Pillow" means Pillow. Times stock fastai is the median '
        'of the ratios of the rounds.',
    'drawings':'Quick, Draw! drawings at 256 x 256. "One channel" means `PILImageBW`.',
    'digits':'Grey images of 28 x 28.',
    'values':'Values of 2 KB, read without decoding. `get_many` compares checksums. `redis-benchmark` does not look at '
        'the values.'}

def peers_section()->str:
    "Every loader in one run"
    found = result('peers')
    parts = ['## Loading', f"The contenders ran one after another, {found['rounds']} rounds, batches of {found['bs']}, "
             f"{found['workers']} workers or threads. Samples per CPU second count all CPU time, that of workers and "
             'of the server included. Numbers are medians.', machine(found), command(found),
             '![Samples per CPU second](../tests/bench/results/peers.png)']
    for kind,measures in found['results'].items():
        rows = []
        for name,m in sorted(measures.items(), key=lambda o: -median(o[1], 'samples_cpu_s')):
            ratio = found['ratios'].get(kind, {}).get(name, {}).get(STOCK, {}).get('samples_cpu_s')
            if ratio is None and STOCK in measures:
                ratio = median(m, 'samples_cpu_s')/median(measures[STOCK], 'samples_cpu_s')
            memory = f"{m['worker_mb']:.0f} MB" if m.get('worker_mb') else ''
            rows.append([*speeds(name, m), memory, *([f'{ratio:.1f}'] if STOCK in measures else [])])
        header = [*SPEEDS, 'memory of a worker', *(['times stock fastai'] if STOCK in measures else [])]
        parts += [f'### {sentence_case(kind)}', PEERS_TEXT.get(kind, ''), table(header, rows)]
    return '\n\n'.join(parts)

def ingest_section()->str:
    "Writing into Redis"
    found = result('ingest')
    contenders = found['contenders'].items()
    rows = [[name, number(median(m, 'per_cpu_s')), number(median(m, 'per_s'))] for name,m in contenders]
    text = ('Drawings are raw Quick, Draw! ndjson. "forum 2018" is the recipe of the forum post that this package '
            'began from: matplotlib, `savez_compressed`, one `SET` per sample. "Bare work" is decoding, shrinking and '
            'encoding without writing.')
    return '\n\n'.join(['## Writing into Redis', text, table(SPEEDS, rows), machine(found), command(found)])

def shards_section()->str:
    "Training from shards"
    found = result('shards')
    text = (f"Shards of {found['shard_bytes']/1e6:.0f} MB with the same photographs, and a server that answers "
            f"{found['latency_s']*1e3:.0f} ms late. The other loaders run with their own best settings.")
    parts = ['## Shards', text, machine(found), command(found)]
    for kind,measures in found['results'].items():
        fastest_first = sorted(measures.items(), key=lambda o: -median(o[1], 'samples_cpu_s'))
        parts += [f'### {sentence_case(kind)}', table(SPEEDS, [speeds(*o) for o in fastest_first])]
    return '\n\n'.join(parts)

def fetch_section()->str:
    "Reading from Redis, by itself"
    found = result('fetch')
    parts = ['## Reading from Redis', machine(found), command(found)]
    for kind,measures in found.items():
        if not isinstance(measures, dict): continue
        rows = [speeds(*o) for o in measures.items() if isinstance(o[1], dict) and 'samples_cpu_s' in o[1]]
        if rows: parts += [f'### {sentence_case(kind)}', table(SPEEDS, rows)]
    return '\n\n'.join(parts)

def codecs_section()->str:
    "Ways of storing an image"
    found = result('codecs')
    parts = ['## Ways of storing a sample', machine(found), command(found)]
    for kind,measures in found['results'].items():
        def times_of(m): return [f"{m['encode_ms']:.2f} ms", f"{median(m, 'item_ms'):.2f} ms", f"{m['speed']:.2f}"]
        rows = [[name, f"{m['bytes']:,}", *times_of(m)] for name,m in measures.items()]
        parts += [f'### {sentence_case(kind)}', f"Speed is relative to {found['speed_is_relative_to'][kind]}.",
                  table(['stored as', 'bytes', 'encoding', 'a sample, read and transformed', 'relative speed'], rows)]
    return '\n\n'.join(parts)

def page()->str:
    "The page of the documentation on benchmarks"
    intro = ('# Benchmarks\n\nEvery number on this page is read from the files in `tests/bench/results` when the '
             'documentation is built. `make bench` writes those files. Compare only numbers of one table: they were '
             'measured in one run, on one machine.')
    sections = [memory_section, peers_section, ingest_section, shards_section, fetch_section, codecs_section]
    return '\n\n'.join(o for o in (intro, *(s() for s in sections)) if o)+'\n'
