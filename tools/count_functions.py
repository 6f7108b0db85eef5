"""Print how many distinct named functions of the package common operations call; with `--list`, their names by module

All runs in this process, which has done the same before: what is done once per process does not count."""
import io, sys, tempfile, threading
from contextlib import contextmanager
from pathlib import Path
from fastai.vision.all import DataLoaders, Resize
from PIL import Image
import fastai_remote.block
from fastai_remote import redis_server, to_redis, to_shards

PACKAGE = str(Path(fastai_remote.__file__).parent)+'/'
OPTIONS = dict(num_workers=0, progress=False)

@contextmanager
def called():
    "A context that yields a set, and adds the code of each function of the package that is called in it"
    codes = set()
    def note(code, *_):
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith('<'): codes.add(code)
    if sys.version_info>=(3,12):
        monitor,event = sys.monitoring,sys.monitoring.events.PY_START
        monitor.use_tool_id(monitor.PROFILER_ID, 'count_functions')
        monitor.register_callback(monitor.PROFILER_ID, event, note)
        monitor.set_events(monitor.PROFILER_ID, event)
    else:
        def profile(frame, event, _): note(frame.f_code) if event=='call' else None
        for module in sys,threading: module.setprofile(profile)
    yield codes
    if sys.version_info>=(3,12): monitor.free_tool_id(monitor.PROFILER_ID)
    else:
        for module in sys,threading: module.setprofile(None)

def jpegs(n):
    "Samples with the bytes of small JPEG files, and labels"
    for i in range(n):
        file = io.BytesIO()
        Image.new('RGB', (64,48), (5*i,99,99)).save(file, 'JPEG')
        yield {'jpg':file.getvalue(), 'cls':'ab'[i%2]}

def operations(url, folder, name):
    "Yields `(what, codes)` for each operation, which it calls on new datasets called `name`"
    images = list(jpegs(40))
    with called() as codes: report = to_redis(images, url, name, **OPTIONS)
    yield 'to_redis of 40 JPEGs',codes
    loaders = DataLoaders.from_store(report.store, bs=8, num_workers=0, valid_pct=0.2, item_tfms=Resize(32))
    with called() as codes: loaders.one_batch()
    yield 'one_batch of 8 JPEGs',codes
    for place,store in ('Redis',report.store),('shards',to_shards(images, f'{folder}/{name}', **OPTIONS).store):
        with called() as codes: store.edit(drop=[3], set={'cls':{5:'b'}})
        yield f'edit in {place}',codes

if __name__=='__main__':
    with redis_server() as server, tempfile.TemporaryDirectory() as folder:
        list(operations(server.url, folder, 'first'))
        for what,codes in operations(server.url, folder, 'second'):
            print(f'{what:22}{len(codes):5}')
            for file in sorted({code.co_filename for code in codes}) if '--list' in sys.argv else ():
                names = sorted(getattr(code, 'co_qualname', code.co_name) for code in codes if code.co_filename==file)
                print(f"  {file.removeprefix(PACKAGE)} ({len(names)}): {', '.join(names)}")
