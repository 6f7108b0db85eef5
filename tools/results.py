"Markdown tables of the benchmark results in tests/bench/results"
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
    rows:list, # A list of cells for each row
    n_text:int=1 # How many columns have text
)->str: # The table in Markdown
    "A Markdown table: columns of text, which come first, are aligned to the left, the others to the right"
    def line(cells): return f"| {' | '.join(str(c).replace('|', '&#124;') for c in cells)} |"
    return '\n'.join([line(header), line([*['---']*n_text, *['---:']*(len(header)-n_text)]), *map(line, rows)])

def number(
    value:float # Any number
)->str: # For example `1,239`, `39.5` or `0.85`
    "Format a number with about three significant digits"
    return f'{value:,.0f}' if abs(value)>=100 else f'{value:.1f}' if abs(value)>=10 else f'{value:.2f}'

def median(measure, name): return measure[name]['median']
def times(value): return f'{value:.1f} times'
def megabytes(value): return f'{value/1e6:,.0f} MB'
def join(separator, parts): return separator.join(part for part in parts if part)

STOCK = 'stock fastai, files'
PEERS_README = [   # a kind of data in peers.json, a contender, its title in the README
    ('photographs', 'ours, from_redis', 'photographs in Redis'),
    ('photographs', 'ours, from_shards', 'photographs in shards'),
    ('photographs', 'ours, from_redis, shrink(256)', 'photographs shrunk to 256 pixels'),
    ('drawings', 'ours, strokes', 'drawings stored as strokes'),
    ('digits', 'ours, arrays', 'digits stored as arrays')]

def readme_table()->str:
    "The table of the README: six rows with the speed of this package, of stock fastai, and their ratio"
    peers = result('peers')
    rows = []
    for kind,ours,title in PEERS_README:
        measures,ratio = peers['results'][kind],peers['ratios'][kind][ours][STOCK]['samples_cpu_s']['median']
        speeds = [number(median(measures[name], 'samples_cpu_s')) for name in (ours, STOCK)]
        rows.append([title, *speeds, times(ratio)])
    workers = {row['loader']:max(row['workers']) for row in result('memory')['rows'] if row['n']==5_000_000}
    rows.append(["a worker's memory, 5 million samples", megabytes(workers['ours']), megabytes(workers['stock']),
                 f"1/{workers['stock']/workers['ours']:.0f}"])
    return table(['samples per CPU second', 'fastai_remote', 'stock fastai', 'ratio'], rows)

def machine(
    found:dict # The content of a result file
)->str: # One sentence, or an empty string
    "The machine and the versions that a benchmark ran with"
    where = found.get('machine', {})
    cores = f"{where['cores']} cores" if 'cores' in where else ''
    description = join(', ', (where.get('cpu'), cores, where.get('platform')))
    versions = ', '.join(f'{name} {version}' for name,version in found.get('versions', {}).items())
    return join(' ', (f'Machine: {description}.' if description else '', f'Versions: {versions}.' if versions else ''))

def sentence_case(text): return text[0].upper()+text[1:]

def command(found): return f"Command: `{found['command']}`." if found.get('command') else ''

SPEEDS = ['contender', 'samples per CPU second', 'samples/s']

def speeds(name, measure): return [name, number(median(measure, 'samples_cpu_s')), number(median(measure, 'samples_s'))]

def memory_section()->str:
    "Memory and set-up time for datasets of several sizes"
    found = result('memory')
    names = {'stock':'stock fastai', 'ours':'fastai_remote'}
    rows = []
    for row in found['rows']:
        rows.append([names[row['loader']], f"{row['n']:,}", f"{row['setup']:.2f} s", f"{row['start']:.2f} s",
                     megabytes(row['parent']), megabytes(max(row['workers'])), f"{row['pickle']/1e6:.2f} MB"])
    header = ['loader', 'samples', 'set-up', 'first batch', 'parent grows by', "a worker's private memory", 'pickled']
    text = ('Two worker processes. Set-up is the time to build the `DataLoaders`. The first batch is the time until '
            'the first batch of an epoch.')
    return '\n\n'.join(['## Memory', text, table(header, rows), machine(found), command(found)])

PEERS_TEXT = {
    'photographs':'ImageNet photographs of 107 KB, `RandomResizedCrop(224)` and a flip. Each loader runs with its own '
        'best settings. "fast" means the same decoder as in this package, "Pillow" means that Pillow decodes. "Times '
        'stock fastai" is the median of the ratios of the rounds.',
    'drawings':'Quick, Draw! drawings at 256 x 256. "One channel" means `PILImageBW`.',
    'digits':'Grey images of 28 x 28.',
    'values':'Values of 2 KB, read without decoding. `get_many` compares checksums. `redis-benchmark` discards the '
        'values.'}

def fastest_first(measures): return sorted(measures.items(), key=lambda item: -median(item[1], 'samples_cpu_s'))

def peers_section()->str:
    "All loaders, measured in one run"
    found = result('peers')
    parts = ['## Loading', f"The contenders ran one after another, {found['rounds']} rounds, batches of {found['bs']}, "
             f"{found['workers']} workers or threads. Samples per CPU second count all CPU time, including that of "
             'the workers and the server. Numbers are medians.', machine(found), command(found),
             '![Samples per CPU second](../tests/bench/results/peers.png)']
    for kind,measures in found['results'].items():
        rows = []
        for name,measure in fastest_first(measures):
            ratio = found['ratios'].get(kind, {}).get(name, {}).get(STOCK, {}).get('samples_cpu_s', {}).get('median')
            if ratio is None and STOCK in measures:
                ratio = median(measure, 'samples_cpu_s')/median(measures[STOCK], 'samples_cpu_s')
            memory = f"{measure['worker_mb']:.0f} MB" if measure.get('worker_mb') else ''
            rows.append([*speeds(name, measure), memory, *([f'{ratio:.1f}'] if STOCK in measures else [])])
        header = [*SPEEDS, 'memory of a worker', *(['times stock fastai'] if STOCK in measures else [])]
        parts += [f'### {sentence_case(kind)}', PEERS_TEXT.get(kind, ''), table(header, rows)]
    return '\n\n'.join(parts)

def ingest_section()->str:
    "Writing into Redis"
    found = result('ingest')
    rows = [[name, number(median(measure, 'per_cpu_s')), number(median(measure, 'per_s'))]
            for name,measure in found['contenders'].items()]
    text = ('Drawings are raw Quick, Draw! ndjson. "forum 2018" is the recipe of the forum post that was the origin of '
            'this package: matplotlib, `savez_compressed`, one `SET` per value. "Bare work" is decoding, shrinking and '
            'encoding without writing.')
    return '\n\n'.join(['## Writing into Redis', text, table(SPEEDS, rows), machine(found), command(found)])

def shards_section()->str:
    "Training from shards"
    found = result('shards')
    text = (f"Shards of {found['shard_bytes']/1e6:.0f} MB with the same photographs, on a disk and on a server that "
            f"delays each answer by {found['latency_s']*1e3:.0f} ms. The other loaders run with their own best "
            'settings.')
    parts = ['## Shards', text, machine(found), command(found)]
    for kind,measures in found['results'].items():
        rows = [speeds(name, measure) for name,measure in fastest_first(measures)]
        parts += [f'### {sentence_case(kind)}', table(SPEEDS, rows)]
    return '\n\n'.join(parts)

def fetch_section()->str:
    "Reading from Redis without decoding"
    found = result('fetch')
    parts = ['## Reading from Redis', machine(found), command(found)]
    for kind,measures in found.items():
        if not isinstance(measures, dict): continue
        rows = [speeds(name, measure) for name,measure in measures.items()
                if isinstance(measure, dict) and 'samples_cpu_s' in measure]
        if rows: parts += [f'### {sentence_case(kind)}', table(SPEEDS, rows)]
    return '\n\n'.join(parts)

def servers_section()->str:
    "One server and a cluster, and many processes that read from one server"
    found = result('servers')
    parts = ['## Servers', machine(found), command(found),
             'Batches of 64 random values, compared with one `MGET` for the whole batch.']
    rows = [[f'{int(size):,} bytes', name, f"{m['samples per second']:,}", f"{m['ratio']:.2f}",
             f"{m['ratio per CPU second']:.2f}"]
            for size,contenders in found['layouts'].items() for name,m in contenders.items()]
    parts.append(table(['values', 'read with', 'samples/s', 'ratio', 'ratio per CPU second'], rows))
    parts.append('What processes on the same machine read from one server, together. Readers and server share its '
                 'cores.')
    rows = [[f"{m['value bytes']:,} bytes", str(m['io-threads']), str(m['processes']), f"{m['MB/s']:,}",
             f"{m['samples/s']:,}", f"{m['server CPU']:.2f}"] for m in found['readers']]
    parts.append(table(['values', 'io-threads', 'processes', 'MB/s', 'samples/s', 'cores used by the server'], rows))
    return '\n\n'.join(parts)

def codecs_section()->str:
    "Ways of storing a sample"
    found = result('codecs')
    parts = ['## Ways of storing a sample', machine(found), command(found)]
    for kind,measures in found['results'].items():
        rows = []
        for name,measure in measures.items():
            rows.append([name, f"{measure['bytes']:,}", f"{measure['encode_ms']:.2f} ms",
                         f"{median(measure, 'item_ms'):.2f} ms", f"{measure['speed']:.2f}"])
        parts += [f'### {sentence_case(kind)}', f"Speed is relative to {found['speed_is_relative_to'][kind]}.",
                  table(['stored as', 'bytes', 'encoding', 'decoding and transforming', 'relative speed'], rows)]
    return '\n\n'.join(parts)

STORES = 'Redis','Redis Cluster','Sentinel','shards on disk','shards on S3'

def fault_overview(
    found:dict # The content of faults.json
)->str:
    "A table with a row for each fault and a column for each store: samples that were lost, repeated and wrong"
    def cell(fault, store):
        rows = [row for row in found['rows'] if row['fault']==fault and row['backend'].split(',')[0]==store]
        if rows: return ', '.join(str(sum(row[name] for row in rows)) for name in ('lost','repeated','wrong'))
        why = {(gap['fault'], gap['store']):gap['why'] for gap in found['not_tried']}
        return f"*{why[fault,store]}*"
    faults = dict.fromkeys(row['fault'] for row in found['rows'])
    rows = [[fault, *(cell(fault, store) for store in STORES)] for fault in faults]
    text = ('Samples that were lost, repeated and wrong, in epochs and ingests together. Where a fault was not tried, '
            'the table says why.')
    return '\n\n'.join(['### Overview', text, table(['fault', *STORES], rows, 1+len(STORES))])

def fault_tables()->str:
    "What happens in each fault, for the page on failures: an overview, a table for epochs and one for ingests"
    found = result('faults')
    parts = [fault_overview(found)]
    for during,title in (('epoch', 'During an epoch'), ('ingest', 'During an ingest')):
        rows = [row for row in found['rows'] if row['during']==during]
        cells = [[row['fault'], row['backend'], row['seen'], f"{row['seconds']:.1f}", row['lost'], row['repeated'],
                  row['wrong']] for row in rows]
        header = ['fault', 'store', 'what the user sees', 'seconds', 'lost', 'repeated', 'wrong']
        parts += [f'### {title}', table(header, cells, 3)]
    return '\n\n'.join([*parts, machine(found), command(found)])

def source_table()->str:
    "What arrives of each kind of source, for the page on sources"
    found = result('sources')
    header = ['source', 'what you write', 'store', 'samples lost or wrong', 'class names', 'files as they are', 'splits',
              'constant memory']
    cells = [[row['source'], f"`{row['call']}`", row['store'], row['lost']+row['wrong'], row['names'], row['files'],
              row['splits'], f"{row['flat']}: {row['small']:.0f} and {row['large']:.0f} MB"] for row in found['rows']]
    return '\n\n'.join([table(header, cells, len(header)), machine(found), command(found)])

def page()->str:
    "The page on benchmarks of the documentation"
    intro = ('# Benchmarks\n\nEvery number on this page is read from the files in `tests/bench/results` when the '
             'documentation is built. `make bench` writes those files. Compare only numbers of one table: they were '
             'measured in one run, on one machine.')
    sections = [memory_section, peers_section, ingest_section, shards_section, fetch_section, servers_section,
                codecs_section]
    return join('\n\n', [intro, *(section() for section in sections)])+'\n'
