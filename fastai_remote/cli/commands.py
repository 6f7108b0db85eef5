"""The commands: write, look at, copy, check and remove datasets, serve, and examine

Docs: page `cli/commands`"""

import io, json, os, re, shlex, signal, sys
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from subprocess import TimeoutExpired
from threading import Event
from urllib.parse import unquote, urlsplit

from ..core import CorruptSample, image_sizes_str, printable, size_str, StoreError, StoreNotFound, UnsupportedFormat
from ..ingest.copy import copy_store, resize_store
from ..ingest.redis import to_redis
from ..ingest.shards import to_shards
from ..ingest.stores import DatasetOps
from ..ingest.verify import verify_store
from ..source.shrink import shrink
from ..store.connection import public_url
from ..store.server import redis_server, RedisServer
from ..view.browser import View
from ..view.overview import chosen_numbers, label_field, typed_label
from ..view.pictures import read_samples, sheet
from ..write.redis import RedisWriter
from ..write.shards import ShardWriter
from .command import command, COMMANDS, given, parameters_of, PLACE_OPTIONS, places_of, show, without
from .doctor import check_folder, check_machine, check_server, installed
from .terminal import (
    confirm, Damage, FAILED, flag, FOUND, in_shell, INTERRUPTED, OK, picture_codes, Progress, terminal_protocol, USAGE,
    UsageError)
from .words import places_in, refuse_secret, SOURCE_KINDS, sources_of, split_sources

# --- A server that keeps its data
#
# `redis_server` in Python ends with the notebook. `fastai_remote serve DIR` is the same server in a process of its own,
# with its data in a folder. Its port and its password are chosen when it is started for the first time, and kept in the
# file `url` of the folder, which only its owner can read. So the URL stays the same. That a folder has one server at a
# time, waiting for its data to be read, and stopping it are the work of `RedisServer`.

URL_FILE = 'url'

def memory_setting(text:str)->str:
    "A number of bytes, or one with a unit such as `8gb`, in small letters; raises `UsageError` for any other text"
    if not re.fullmatch(r'[0-9]+(k|kb|m|mb|g|gb)?', text.lower()):
        raise UsageError(f'--memory is a number of bytes such as 500mb or 8gb, not {text!r}')
    return text.lower()

def _saved_login(file):
    """Returns `(port, password)` of the URL in `file`; `(None, None)` if there is no such file, or it is empty

    Raises `StoreError`, which names `file`, unless it is a `redis://` URL with both: the file may be the user's."""
    try:
        url = file.read_text().strip() if file.exists() else ''
        if not url: return None,None
        parts = urlsplit(url)
        if parts.scheme=='redis' and parts.port and parts.password: return parts.port,unquote(parts.password)
    except ValueError: pass
    raise StoreError(f'{file} is not the URL of a server that was served here: choose another folder, or, if this '
                     'file is damaged, remove it: then port and password are chosen again')

def _open_private(path, flags): return os.open(path, flags|os.O_NOFOLLOW, 0o600)

# The data is written to an append-only file, to the disk once a second, so that even a server that is killed loses one
# second at most. A folder with an older snapshot and no such file is read and kept as a snapshot, because Redis would
# not read it otherwise.

def serving(
    folder:str|Path, # Folder that keeps the data
    port:int=None, # TCP port on this machine; default: as before, and a free one at first
    memory:str=None # Bytes that the data may take, such as `8gb`; default: no limit
)->RedisServer:
    """Start the server of a folder, a context manager; its URL is in `URL_FILE` of the folder

    Raises `StoreBusy` if the folder has a server already, `UsageError` for `memory`, and `StoreError` if the server
    does not start, such as for a port that is used, or if another file is where the URL is kept."""
    file,conf = Path(folder)/URL_FILE,{} if memory is None else {'maxmemory':memory_setting(memory)}
    saved_port,password = _saved_login(file)
    if password: conf['requirepass'] = password
    if not (Path(folder)/'dump.rdb').exists(): conf |= dict(appendonly='yes', save='')
    try: server = redis_server(folder, port or saved_port or -1, **conf)
    except RuntimeError as e: raise StoreError(f'the server did not start, --port chooses another port: {e}') from None
    with open(file, 'w', opener=_open_private) as f: f.write(server.url+'\n')
    return server

# --- Until Ctrl-C

# The process waits for the server, until a signal arrives. It then tells the server to stop, which may take a while, as
# the server writes its data first. A second signal ends the waiting, and the server goes on writing.

@contextmanager
def _signals_interrupt():
    "Within the block, SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt`, except those that this process ignores"
    signals = [signum for signum in (signal.SIGINT,signal.SIGTERM,signal.SIGHUP)
               if signal.getsignal(signum)!=signal.SIG_IGN]   # nohup
    before = {signum:signal.signal(signum, signal.default_int_handler) for signum in signals}
    try: yield
    finally:
        for signum,handler in before.items(): signal.signal(signum, handler)

def _stop(server):
    "Stop a `RedisServer`, and wait until it has saved its data; raises `StoreError` if a signal ends the waiting"
    saves = (f'{server.dir}: the server is still saving its data, as process {server.proc.pid}; '
             f'see {server.dir}/server.log')
    try:
        server.proc.send_signal(signal.SIGTERM)
        try: server.proc.wait(3)
        except TimeoutExpired:
            say(saves)
            server.proc.wait()
    except KeyboardInterrupt: raise StoreError(saves) from None
    finally: server.close(wait=False)

def serve_folder(folder:str|Path, port:int=None, memory:str=None, ready=print):
    """Run a private Redis server that keeps its data, as `serving` starts it, until SIGINT, SIGTERM or SIGHUP

    `ready` is called with the server when it can be used. A signal that this process ignores, as with `nohup`, stays
    ignored. Raises what `serving` raises, and `StoreError`
    if the server ends by itself, or still saves its data when a second signal ends the waiting for it."""
    server = None
    with _signals_interrupt():
        try:
            server = serving(folder, port, memory)
            ready(server)
            server.proc.wait()
        except KeyboardInterrupt:
            if server is not None: _stop(server)   # else it was not yet ready, and has ended
            return
    log = (server.dir/'server.log').read_text(errors='replace')[-800:]
    server.close(wait=False)
    raise StoreError(f'{server.dir}: the server has ended: {log}')

# --- Writing

# The options of the commands that write come from `to_redis` and `to_shards`, from the functions of the sources, and
# from `shrink`.

WRITING = without(parameters_of([to_redis, to_shards]), *PLACE_OPTIONS)

def source_parameters()->dict:
    "`{name: parameter}` of all kinds of sources, except those that have the name of an option of writing"
    found = parameters_of([sources_of])
    for kind in SOURCE_KINDS.values():
        for name,parameter in without(parameters_of([kind.open]), *WRITING).items():
            if name not in found: found[name] = parameter
            elif parameter.docment not in found[name].docment:
                found[name].docment += f'; for {kind.what}: {parameter.docment}'
    return found

def smaller(
    fn=None, # The function of `--fn`
    resize:int=None, # Shorter side, pixels; smaller ones stay
    **options # Of `shrink`
):
    "The function that each sample passes through, or `None`; raises `UsageError` for options that do not fit"
    if resize is None:
        if options: raise UsageError(f'{flag(next(iter(options)))} needs --resize')
        return fn
    if fn is not None: raise UsageError('either --resize or --fn; a function can use shrink(size) itself')
    return shrink(resize, **options)

SOURCE = source_parameters()
SMALLER = given(parameters_of([smaller, shrink]), ('resize','quality','codec'))

# The commands that write have the same options, so one function reads them for all.

def progress_of(progress:bool, *count):
    """A `Progress` with the arguments `count`, or `False` if nothing is to be shown

    That is as the option `progress` says; `None` shows it only in a terminal."""
    if progress is None: progress = sys.stderr.isatty()
    return Progress(*count) if progress else False

def write_options(to, options:dict)->dict:
    """Those of `options` that `to_redis` or `to_shards` takes, with `progress` as a `Progress` or `False`

    `to` is the `Place` to write to. Raises `UsageError` for an option of Redis if `to` is a folder of shards, and the
    other way round."""
    options = given(options, WRITING)
    wrong = without(options, *parameters_of([to_redis if to.is_redis else to_shards]))
    if wrong: raise UsageError(f"{flag(next(iter(wrong)))} is an option of {'shards' if to.is_redis else 'Redis'}")
    progress = progress_of(options.get('progress'), lambda report: (report.written, report.failed))
    return {**options, 'progress':progress}

def read_job(args, options:dict)->tuple:
    """What `ingest` and `append` write, and where: the source, the `Place`, and the arguments of writing

    Raises `UsageError`, and what `sources_of` raises."""
    sources,args.words = split_sources(args.words)
    to, = places_of(args)
    writes = write_options(to, options)
    writes['fn'] = smaller(writes.get('fn'), **given(options, SMALLER))
    return sources_of(sources, **given(options, SOURCE)),to,writes

def report_of(report)->dict:
    "An `IngestReport` as a dict for JSON, with `name` and `url`"
    return {'name':report.name, 'url':report.url, **asdict(report)}

# `read_job` is all that `ingest` and `append` have in common.

@command('SOURCE [SOURCE ...] URL [NAME]', smaller_images=SMALLER, options_of_the_source=SOURCE,
    options_of_writing=WRITING, examples=r"""
      fastai_remote ingest images/ redis://localhost pets --label folder --resize 256
      fastai_remote ingest images/ redis://localhost pets --label '([^/]+)_\d+.jpg$' --splits train,valid=0.2
      fastai_remote ingest train=images/train valid=images/val s3://bucket/pets --label folder
      fastai_remote ingest labels.csv shards/ --fn-col name --label-col breed --folder images
      fastai_remote ingest quickdraw/ redis://localhost drawings
      fastai_remote ingest theirs/*.tar env:FASTAI_REMOTE_URL web --max-failed 0.05""")
def ingest(args, **options):
    """Write images, tables, drawings, tars or a HuggingFace folder to Redis or to shards.

    SOURCE is a file or a folder, several files of one kind, or SPLIT=SOURCE for each split. The dataset is written to
    Redis if URL is that of a Redis server, and to tar shards if it is a folder, a path or a URL such as
    s3://bucket/pets. A command that was interrupted is repeated to go on."""
    source,to,writes = read_job(args, options)
    report = (to_redis if to.is_redis else to_shards)(source, *to.address, **writes)
    show(args, report_of(report), report)

@command('SOURCE [SOURCE ...] URL [NAME]', smaller_images=SMALLER, options_of_the_source=SOURCE,
    options_of_writing=without(WRITING, 'overwrite', 'splits', 'vocab', 'maxsize', 'maxcount'),
    examples='fastai_remote append more_images/ redis://localhost pets --label folder')
def append(args,
    again:bool=False, # Append samples from a source that was appended before?
    **options
):
    """Add samples to a dataset, as a new version that becomes visible at once.

    SOURCE and most options are those of `ingest`. Each sample goes to the end of its split."""
    source,to,writes = read_job(args, options)
    store = to.store()
    before = len(store)
    after = store.append(source, again=again, **writes)
    report = dict(name=after.name, url=to.shown, samples=len(after), added=len(after)-before)
    show(args, report, f"{after.name}: {report['added']:,} added, {report['samples']:,} samples")

# A copy keeps splits, labels and their order, so these are no options of `copy` and `resize`.

_COPYING = without(WRITING, 'fn', 'splits', 'vocab', 'shuffle', 'seed')

@command('URL [NAME] TO_URL [TO_NAME]', options_of_writing=_COPYING, examples="""
      fastai_remote copy redis://localhost pets s3://bucket/pets
      fastai_remote copy s3://bucket/pets env:FASTAI_REMOTE_URL""")
def copy(args, **options):
    "Copy a dataset to another server, or between Redis and shards, and compare its checksums on the way."
    place,to = places_of(args, 2, optional_name=True)
    report = copy_store(place.store(), to.home, to.name, **write_options(to, options))
    show(args, report_of(report), report)

_RESIZING = given(parameters_of([DatasetOps.resize]), ('quality','field','codec'))

@command('SIZE URL [NAME] TO_URL [TO_NAME]', smaller_images=_RESIZING, options_of_writing=_COPYING,
    examples='fastai_remote resize 128 redis://localhost pets redis://localhost pets-128')
def resize(args, **options):
    """Make a dataset with smaller images.

    SIZE is the shorter side in pixels; smaller images stay as they are."""
    if not args.words or not args.words[0].isdecimal(): raise UsageError('SIZE is missing: a number of pixels')
    size = int(args.words.pop(0))
    place,to = places_of(args, 2, optional_name=True)
    options = {**write_options(to, options), **given(options, _RESIZING)}
    store = place.store()
    report = resize_store(store, size, to.home, to.name or (store.name if to.is_redis else None), **options)
    show(args, report_of(report), report)

# --- Looking

def summary(manifest, **more)->dict:
    "What `ls` and `info` show of a dataset: a dict for JSON, with the entries of `more`"
    return dict(name=manifest.name, samples=manifest.n, nbytes=manifest.nbytes, fields=_fields(manifest),
                splits=manifest.splits, failed=manifest.failed, created=manifest.created, **more)

def _fields(manifest): return [f for f in manifest.fields if not f.endswith('.crc')]

def found_at(place)->tuple:
    """The datasets on a server, or in a folder and, if that contains none, in its direct subfolders

    Returns a list of dicts, and a list of unfinished ingests, as of `Place.unfinished`. The dict of a dataset is its
    `summary` with `words`, the list that names it on the command line. For a dataset, an ingest or a subfolder that
    cannot be read it is `{'name', 'error', 'words'}`. Raises `FileNotFoundError` if there is no such folder."""
    is_whole = place.is_redis or place.has_dataset
    datasets,begun = [],place.unfinished()
    for one in [place] if is_whole and not place.is_redis else places_in(place):
        try:
            if is_whole or one.has_dataset: datasets.append(summary(one.store().manifest, words=one.words))
            if not is_whole: begun += one.unfinished()
        except (StoreError,ValueError) as e:   # a folder that is called as a tar is a `ValueError`
            datasets.append(dict(name=one.name or one.words[-1], error=str(e), words=one.words))
    return datasets,begun

def table(rows:list)->str:
    "Rows, which are lists of texts, as one text: a line each, with aligned columns"
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(cell.ljust(width) for cell,width in zip(row, widths)).rstrip() for row in rows)

def unfinished_text(ingest:dict)->str:
    "An unfinished ingest, an entry of `Place.unfinished()`, in words"
    is_damaged = ingest['of']==0 and not ingest['began']   # as `unfinished_ingests` says it
    if is_damaged and not ingest['running']:
        return f"{ingest['name']}: its plan is damaged or gone: `abandon` drops it"
    of = 'of unknown length' if ingest['of'] is None else f"of {ingest['of']:,}"
    state = 'running now' if ingest['running'] else 'repeat its command to finish it, or `abandon` it'
    return f"{ingest['name']}, {ingest['chunks']:,} chunks {of} done, began {ingest['began']}: {state}"

@command('[URL]', examples="""
      fastai_remote ls redis://localhost
      fastai_remote ls s3://bucket
      fastai_remote ls --json | jq -r '.datasets[].name'""")
def ls(args):
    """List the datasets on a Redis server or below a folder, and the ingests that were not finished.

    Without URL, it is that of the variable FASTAI_REMOTE_URL, or else REDIS_URL."""
    args.words = args.words or ['env:']
    place, = places_of(args, optional_name=True)
    if place.name is not None: raise UsageError(f'one URL is listed; `info {" ".join(args.words)}` shows a dataset')
    found,unfinished = found_at(place)
    rows = [['NAME', 'SAMPLES', 'SIZE', 'CREATED', 'FIELDS']]
    for o in found:
        if 'error' in o: row = '?','?','?',in_shell(o['error'], o['words'])
        else: row = f"{o['samples']:,}",size_str(o['nbytes']),o['created'][:10],', '.join(o['fields'])
        rows.append([o['name'], *row])
    lines = [table(rows)] if found else [f'no datasets at {place.shown}']
    lines += [f'unfinished: {unfinished_text(o)}' for o in unfinished]
    show(args, dict(url=place.shown, datasets=found, unfinished=unfinished), '\n'.join(lines))

@command('URL [NAME]', examples="""
      fastai_remote info redis://localhost pets
      fastai_remote info s3://bucket/pets --json""")
def info(args):
    "Show what a dataset consists of: samples, fields, splits, labels, statistics."
    place, = places_of(args)
    store = place.store()
    manifest = store.manifest
    counts = {field:dict(zip(map(str, manifest.vocab.get(field, [])), n)) for field,n in manifest.counts.items()}
    stats = {field:without(stats, 'image') for field,stats in manifest.stats.items()}
    specs = {field:manifest.fields[field] for field in _fields(manifest)}
    document = summary(manifest, url=place.shown, format=manifest.format, generation=manifest.generation,
        uid=manifest.uid, codecs={field:spec['codec'] for field,spec in specs.items()},
        dtypes={field:spec['dtype'] for field,spec in specs.items()}, vocab=manifest.vocab, counts=counts,
        stats=stats, unchecked=list(store.unchecked))
    show(args, document, info_text(document))

def info_text(info:dict)->str:
    "A table of the JSON document of `info`: the properties of a dataset, then a line for each field and split"
    rows = [[info['name'], f"{info['samples']:,} samples, {size_str(info['nbytes'])}"], ['at', info['url']],
            ['created', f"{info['created']}, generation {info['generation']}, format {info['format']}"]]
    for field in info['fields']:
        codec,dtype,labels = info['codecs'][field],info['dtypes'][field],info['vocab'].get(field)
        text = codec if dtype is None else f'{codec} ({dtype})'
        if labels:
            more,counts = ', …' if len(labels)>10 else '',info['counts'].get(field, {})
            named = [f'{label} ({counts[str(label)]:,})' if counts else str(label) for label in labels[:10]]
            text += f", {len(labels):,} labels: {', '.join(named)}{more}"
        rows.append([f'field {field}', text])
    for split,(start,stop) in info['splits'].items():
        rows.append([f'split {split}', f'{stop-start:,} samples, {start:,} to {stop:,}'])
    rows += [[f'{field} images', image_sizes_str(stats)] for field,stats in info['stats'].items()]
    if info['failed']: rows.append(['left out', f"{info['failed']:,} samples, see `failures`"])
    if info['unchecked']: rows.append(['no checksums', ', '.join(info['unchecked'])])
    return table(rows)

@command('URL [NAME]', name='show', examples="""
      fastai_remote show redis://localhost pets --n 12 --out grid.png
      fastai_remote show s3://bucket/pets --split valid --label cat""")
def show_samples(args,
    n:int=12, # Samples, at most 1000
    label:str=None, # Only samples with this label
    split:str=None, # Only samples of this split
    size:int=160, # Pixels of the longer side of each picture
    out:str=None # The file to write, a PNG; default: none, and the picture is drawn in terminals that can
):
    """Draw some samples in one picture, and print their other values.

    They come from all over the dataset, and are the same ones each time."""
    if not 0<n<=1000 or not 16<=size<=2048: raise UsageError('--n is from 1 to 1000, and --size from 16 to 2048')
    place, = places_of(args)
    store = place.store()
    if label is not None: label = typed_label(store, label_field(store), label)
    numbers = chosen_numbers(store, n=n, split=split, label=label)
    samples = read_samples(store, numbers, size, store.fields[:50])
    sheet(samples).save(f:=io.BytesIO(), 'PNG')
    if out:
        with open(out, 'wb') as file: file.write(f.getvalue())
    elif not args.json and (protocol := terminal_protocol()): print(picture_codes(f.getvalue(), protocol), end='')
    shown = [dict(number=o.number, values={field:value.text for field,value in o.values.items()}, errors=o.errors)
             for o in samples]
    document = dict(name=store.name, url=place.shown, out=out, samples=shown)
    show(args, document, samples_text(document))

def samples_text(document:dict)->str:
    "The JSON document of `show` as text: for each sample, a line with its number, and a line for each of its values"
    lines = []
    for sample in document['samples']:
        lines.append(f"#{sample['number']}")
        lines += [f'  {field}: '+' '.join(text.split())[:200] for field,text in sample['values'].items() if text]
    if document['out']: lines.append(f"written: {document['out']}")
    return '\n'.join(lines)

@command('URL [NAME]', name='view', examples="""
      fastai_remote view redis://localhost pets --open
      fastai_remote view s3://bucket/pets --edit --port 8800""")
def view_dataset(args,
    edit:bool=False, # May samples be marked on the page, and the dataset be changed?
    open:bool=False, # Show the page in a browser of this machine
    port:int=None, # TCP port of this machine; default: a free one
    # The address under which Jupyter's proxy serves ports, such as https://hub.org/user/me/proxy
    proxy:str=None
):
    """Serve a page that shows any sample in a browser, and filters and sorts, until Ctrl-C.

    It prints the address. Who has it sees the dataset and, with `--edit`, changes it. Only programs on this machine can
    reach it; `ssh -L PORT:localhost:PORT HOST` shows the page of another machine."""
    if port is not None and not 0<port<65536: raise UsageError(f'--port {port} is no TCP port')
    place, = places_of(args)
    view = View(place.store(), edit, port=port, proxy=proxy)
    show(args, dict(name=view.store.name, url=view.url), f'{view}\nCtrl-C ends it')
    sys.stdout.flush()
    if open: view.open()
    try: Event().wait()
    except KeyboardInterrupt: view.close()

# The exit code of `verify` says whether something was found. `failures` prints while it reads.

@command('URL [NAME]', verify_store, examples="""
      fastai_remote verify redis://localhost pets
      fastai_remote verify s3://bucket/pets --json > report.json || echo damaged""")
def verify(args,
    progress:bool=None, # Show progress? Default: in a terminal
    **options
):
    """Read a whole dataset, compare its checksums and decode its samples.

    The exit code is 3 if something is damaged or missing."""
    place, = places_of(args)
    shown = progress_of(progress, lambda report: (report.samples, report.bad), 'damaged')
    report = verify_store(place.store(), progress=shown, **options)
    show(args, asdict(report), report)
    if report.bad: raise Damage()

@command('URL [NAME]', examples='fastai_remote failures redis://localhost pets | head')
def failures(args):
    """List the samples that could not be converted when a dataset was written, and why.

    If there is no dataset yet but an unfinished ingest, those so far."""
    place, = places_of(args)
    name,found = failures_at(place)
    if args.json:   # one document, but written as it is read, as there may be millions
        print(f'{{"name": {json.dumps(name)}, "failures": [', end='')
        for k,failure in enumerate(found): print(',\n' if k else '', json.dumps(list(failure)), sep='', end='')
        return print(']}')
    sample = None
    for sample,reason in found: print(printable(f'{sample}: {reason}'))
    if sample is None: print('no failures')

def failures_at(place)->tuple:
    """The failures of a dataset or, if there is none, of its unfinished ingest; `StoreNotFound` if there is neither

    Returns the name of the dataset, and an iterator of `(sample, reason)`."""
    try: store = place.store()
    except StoreNotFound:
        if not place.unfinished(): raise
    else: return store.name,store.failures()
    writer = (RedisWriter if place.is_redis else ShardWriter)(*place.address)
    writer.plan = writer.place.plan()
    return writer.name,writer.failures()

# --- Removing, serving, examining

@command('URL [NAME]', examples='fastai_remote abandon redis://localhost pets')
def abandon(args):
    "Remove what an unfinished ingest has written. A dataset of the same name stays."
    place, = places_of(args)
    place.store_class.abandon(*place.address)
    show(args, dict(abandoned=place.shown), f'abandoned: {place.shown}')

@command('URL [NAME]', examples="""
      fastai_remote rm redis://localhost pets
      fastai_remote rm s3://bucket/pets --yes""")
def rm(args,
    yes:bool=False # Do not ask
):
    """Remove a dataset, and what an unfinished ingest of its name has written.

    It asks before, unless `--yes` is given."""
    place, = places_of(args)
    if not yes:
        try: what = f'the dataset {place.shown} ({len(place.store()):,} samples)'
        except StoreNotFound:
            if not place.unfinished(): raise
            what = f'the unfinished ingest {place.shown}'
        except (CorruptSample,UnsupportedFormat): what = f'the damaged dataset {place.shown}'
        if not confirm(f'Remove {what}?'): raise StoreError('nothing was removed')
    place.store_class.delete(*place.address)
    show(args, dict(removed=place.shown), f'removed: {place.shown}')

# `serve` says how to use the server once it can be used, and `doctor` looks for what would go wrong later.

@command('DIR', examples="""
      fastai_remote serve data/ --memory 8gb
      export FASTAI_REMOTE_URL="$(cat data/url)"   # in another shell
      fastai_remote ls""")
def serve(args,
    port:int=None, # TCP port; default: as before, a free one at first
    memory:str=None # Bytes that the data may take, such as 8gb; default: no limit
):
    """Run a private Redis server that keeps its data in DIR, until Ctrl-C.

    Only you can read what the server writes. Port and password are chosen at the first start and kept in DIR/url, so
    the URL stays the same, unless `--port` changes it. The server accepts connections from this machine only."""
    if len(args.words)!=1: raise UsageError('one folder is needed')
    if port is not None and not 0<port<65536: raise UsageError(f'--port {port} is no TCP port')
    def ready(server):
        file,url = os.path.abspath(server.dir/URL_FILE),public_url(server.url)
        lines = [f'serving {server.dir} at {url}', 'in another shell, for all commands and for Python:',
                 f'  export FASTAI_REMOTE_URL="$(cat {shlex.quote(file)})"',
                 'Ctrl-C stops the server and keeps the data']
        show(args, dict(url=url, url_file=file, folder=str(server.dir), pid=server.proc.pid), '\n'.join(lines))
        sys.stdout.flush()
    serve_folder(args.words[0], port, memory, ready)

@command('[URL [NAME]]', examples="""
      fastai_remote doctor
      fastai_remote doctor redis://localhost pets""")
def doctor(args,
    leftovers:bool=False # Look for keys or files that nothing needs; in Redis, this reads the name of every key
):
    """Look for what is wrong or slow: with the installation, a server, a folder, the rights.

    It changes nothing. Lines with - cost something, or may; lines with ! are problems, and make the exit code 3.
    With NAME, the rights on the keys of this dataset are checked too."""
    findings = check_machine()
    if args.words:
        place, = places_of(args, optional_name=True)
        findings = chain(findings, (check_server if place.is_redis else check_folder)(place, leftovers))
    findings = list(findings)
    show(args, dict(versions=installed(), findings=[asdict(o) for o in findings]), '\n'.join(map(str, findings)))
    if any(o.level=='problem' for o in findings): raise Damage()

# --- Errors

# An error of a command becomes one line on the standard error, in the terms of the command line. The notes of an error
# say how to go on.

def say(text:str):
    "Print a line to the standard error"
    print(printable(text), file=sys.stderr, flush=True)

def command_of(name:str):
    "The `Command` of this name; raises `UsageError` if there is none"
    if name in COMMANDS: return COMMANDS[name]
    close = get_close_matches(name, COMMANDS, 1)
    hint = f'did you mean {close[0]}?' if close else f"there are {', '.join(COMMANDS)}"
    raise UsageError(f'no command {name!r}; {hint}')

def with_dashes(word:str)->str:
    "`--num_workers`, as in Python, as `--num-workers`; what follows `=`, and any word without `--`, is unchanged"
    name,equals,value = word.partition('=')
    return name.replace('_', '-')+equals+value if word.startswith('--') else word

def error_text(error:BaseException, words:list)->str:
    "The message of `error` and its notes, which say how to go on, as `in_shell` writes them; no tracebacks of workers"
    if isinstance(error, KeyboardInterrupt): text = 'interrupted'
    elif isinstance(error, (UsageError,StoreError,FileNotFoundError)): text = str(error)
    else: text = f'{type(error).__name__}: {error}'   # an error that is not ours may make no sense without its name
    notes = [o for o in getattr(error, '__notes__', ()) if not o.startswith('In a worker:')]
    return in_shell('\n'.join([text, *notes]), words)

def run(argv:list)->int:
    """Run a command, with the arguments of the program; returns the exit code. An error becomes a message on stderr

    With the option `--traceback`, errors are raised instead, except `Damage` and `KeyboardInterrupt`, which always
    become exit codes. Raises `BrokenPipeError` in any case, and `SystemExit` for the option `-h` of a command."""
    args,prog = None,'fastai_remote'
    try:
        for word in argv: refuse_secret(word)
        chosen = command_of(argv[0])
        prog = f'fastai_remote {chosen.name}'
        args = chosen.parser().parse_intermixed_args([*map(with_dashes, argv[1:])])
        chosen.function(args, **without(vars(args), 'words', 'json', 'traceback', *PLACE_OPTIONS))
        return OK
    except Damage: return FOUND
    except BrokenPipeError: raise
    except (Exception,KeyboardInterrupt) as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if '--traceback' in argv and not is_interrupt: raise
        say(f"{prog}: {error_text(error, getattr(args, 'place_words', ()))}")
        if isinstance(error, UsageError): say(f'{prog} -h shows how')
        return USAGE if isinstance(error, UsageError) else INTERRUPTED if is_interrupt else FAILED
