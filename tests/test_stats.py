"`LoaderStats`, `bench` and `tune`: where the time of a training goes, and nothing but that"
import pickle, random, threading

import pytest
from conftest import draw
from fastai.data.load import DataLoader
from fastai.vision.all import *
from in_memory import in_memory, Lossy

from fastai_remote import *
from fastai_remote.clock import sleep
from fastai_remote.load import stats, timed
from fastai_remote.load.batch import StoreInputs
from fastai_remote.load.distributed import RemoteDistributedDL
from fastai_remote.load.timed import BatchTimes, TimedBatch
from fastai_remote.load.stats import advice_for, History, LoaderSpeed, LoaderTimes, shrink_gain
from fastai_remote.codec.pixels import JpegSource
from fastai_remote.testing import ManualClock

def numbered(n=24, size=(40,30)):
    "JPEGs whose target is the sample's own number"
    return in_memory(range(n), lambda i: {'jpg':draw(i).resize(size), 'age.f4':float(i)})

def loaders(store, **kwargs):
    return DataLoaders.from_store(store, y='age.f4', splitter=RandomStoreSplitter(1/3, seed=1), **{
        **dict(item_tfms=RandomResizedCrop(16), bs=4, num_workers=0, prefetch=0), **kwargs})

class Slow(Transform):
    "Takes 5 ms for an image, by the clock; after the crop, which is only recorded by then"
    order = 2
    def encodes(self, o:PILImage):
        sleep(.005)
        return o

class SlowModel(nn.Module):
    "Takes 100 ms forward and 200 ms backward, by the clock"
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(1))
    def forward(self, x):
        sleep(.1)
        y = x.float().mean((1,2,3))*self.p
        if y.requires_grad: y.register_hook(lambda grad: sleep(.2))
        return y

def mean_square(pred, y): return (pred-y.flatten()).pow(2).mean()

def slow_learner(dls, tmp_path, *cbs):
    def opt_func(params, **kw):
        opt = SGD(params, **kw)
        step = opt.step
        def slow_step():
            sleep(.05)
            step()
        opt.step = slow_step
        return opt
    learn = Learner(dls, SlowModel(), loss_func=mean_square, opt_func=opt_func, path=tmp_path, cbs=cbs)
    learn.remove_cb(ProgressCallback)
    return learn

@pytest.fixture(autouse=True)
def clock():
    with ManualClock(0.) as clock: yield clock

@pytest.fixture
def slow_store(monkeypatch):
    "Reading a batch takes 40 ms, and decoding a JPEG 10 ms, by the clock"
    read,write = StoreInputs._values,JpegSource.write
    def slow_read(self, numbers):
        sleep(.04)
        return read(self, numbers)
    def slow_write(self, *args):
        sleep(.01)
        return write(self, *args)
    monkeypatch.setattr(StoreInputs, '_values', slow_read)
    monkeypatch.setattr(JpegSource, 'write', slow_write)
    return numbered()

def ms(times): return {name:round(1000*seconds, 3) for name,seconds in times.items() if seconds}

# --- where the time goes

@pytest.mark.parametrize('item_tfms', [RandomResizedCrop(16), [RandomResizedCrop(16), Slow()]], ids=['whole','items'])
def test_the_parts_of_a_step_and_the_stages_of_the_loader_have_their_times(slow_store, tmp_path, item_tfms):
    "With a whole batch of four at a time, and item by item; other callbacks have a part of their own"
    class SlowAround(Callback):
        def before_batch(self): sleep(.02)
        def after_batch(self): sleep(.03)
    learn = slow_learner(loaders(slow_store, item_tfms=item_tfms), tmp_path, LoaderStats(), SlowAround())
    learn.fit(2)
    times,rows = learn.loader_stats.times,learn.loader_stats.history.rows
    of_data = 80 if item_tfms.__class__ is RandomResizedCrop else 100
    assert ms(times.stages)=={'fetch':40, 'decode':40, **({} if of_data==80 else {'transform':20})}
    # 16 samples: an epoch has four batches
    assert rows.n==8
    assert ms(times.parts)=={'start':of_data/4, 'wait':of_data*3/4, 'forward':100, 'backward':200, 'step':50,
        'other':50}
    assert (times.samples,times.num_workers,times.threads,times.prefetch)==(4,0,0,0)
    assert times.data==pytest.approx(of_data/1000) and times.step==pytest.approx(.4+of_data/1000)

def test_workers_send_the_times_with_the_batches(slow_store, tmp_path):
    "Those of the worker's clock; waiting is a matter of the main process, whose clock stands still here"
    learn = slow_learner(loaders(slow_store, num_workers=2), tmp_path, LoaderStats())
    learn.fit(1)
    times = learn.loader_stats.times
    assert ms(times.stages)=={'fetch':40, 'decode':40} and times.num_workers==2
    assert ms(times.parts)=={'forward':100, 'backward':200, 'step':50}

def test_threads_have_their_times(slow_store):
    "Those that read and those that build belong to the loader for which they work"
    dl = loaders(slow_store, threads=2, prefetch=2).train
    dl.after_batch.times,seen = BatchTimes(),[]
    class OneThread(ManualClock):
        "Only a thread's own pauses move the clock that it sees"
        local = threading.local()
        def monotonic(self): return getattr(self.local, 'now', 0.)
        def sleep(self, seconds): self.local.now = self.monotonic()+seconds
    with OneThread(0.):
        for _ in dl: seen.append(dl.after_batch.times.last.seconds)
    total = {name:sum(seconds.get(name, 0.) for seconds in seen) for name in seen[0]|seen[-1]}
    assert {name:round(seconds, 6) for name,seconds in total.items() if seconds}=={'fetch':.16, 'decode':.16}

def test_two_loaders_that_take_turns_have_their_own_times(slow_store):
    first,second = (loaders(slow_store).train for _ in range(2))
    first.after_batch.times = BatchTimes()
    for _ in zip(first, second): assert ms(first.after_batch.times.last.seconds)=={'fetch':40, 'decode':40}
    assert second.after_batch.times is None

def test_stages_within_a_stage_are_not_counted_twice():
    @timed.stage('decode')
    def inner(): sleep(2)
    @timed.stage('transform')
    def outer():
        sleep(1)
        inner()
        inner()
    def batches():
        outer()
        with pytest.raises(ZeroDivisionError): timed.stage('fetch')(lambda: sleep(3) or 1/0)()
        yield (torch.zeros(3),)
    batch, = timed.timed(batches())
    assert batch.seconds=={'decode':4, 'transform':1, 'fetch':3} and len(batch)==3

def test_a_batch_is_received_after_it_was_waited_for():
    "What unpickling takes, such as copying out of shared memory, is a stage of its own"
    class SlowToUnpickle:
        def __reduce__(self): return sleep,(.5,)
    batch = pickle.loads(pickle.dumps(TimedBatch((SlowToUnpickle(),), {'decode':1.})))
    assert batch.seconds=={'decode':1., 'receive':.5}

def test_a_pinned_batch_stays_a_tuple_and_has_its_times(monkeypatch):
    monkeypatch.setattr(timed, 'pin_memory', lambda batch, device: [*batch])
    pinned = TimedBatch((1,2), {'fetch':3.}).pin_memory()
    assert (pinned.batch,pinned.seconds)==((1,2), {'fetch':3.})

# --- nothing else changes

def batches_of(dl): return [[x.clone() for x in b] for b in dl]
def same(a, b): return len(a)==len(b) and all(torch.equal(x, y) for xs,ys in zip(a, b) for x,y in zip(xs, ys))

ALL_WAYS = [{}, dict(threads=2), dict(num_workers=1), dict(item_tfms=[RandomResizedCrop(16), Slow()])]

@pytest.mark.parametrize('options', ALL_WAYS, ids=['main','threads','workers','items'])
def test_timed_batches_are_the_same(options):
    results = []
    for times in None,BatchTimes(torch.device('cpu')):
        set_seed(1)
        dl = loaders(numbered(), **options).train
        dl.after_batch.times = times
        results.append(batches_of(dl)+batches_of(dl))
    assert same(*results)

@pytest.mark.parametrize('workers', [0, 2])
def test_batches_without_samples_are_left_out_of_timed_ones_too(workers):
    store = Lossy(*range(4), cut=range(8, 12))
    dls = DataLoaders.from_store(store, x='png', y='k.i4', splitter=lambda items: [range(20), range(1)], bs=4,
                                 num_workers=workers, on_bad='skip')
    dl = dls.train.new(shuffle=False, on_bad='skip')
    dl.after_batch.times = BatchTimes()
    with pytest.warns(UserWarning, match='8 samples were missing or damaged'):
        assert [b[1].tolist() for b in dl]==[[4,5,6,7], [12,13,14,15], [16,17,18,19]]

def test_without_the_callback_nothing_is_timed(monkeypatch, tmp_path):
    def fail(*args): raise AssertionError('the clock was read')
    monkeypatch.setattr(timed, 'monotonic', fail)
    for options in {}, dict(num_workers=1), dict(threads=1, prefetch=1):
        dls = loaders(numbered(), **options)
        slow_learner(dls, tmp_path).fit(1)
        learn = slow_learner(dls, tmp_path, LoaderStats())
        with pytest.raises(AssertionError, match='the clock was read'): learn.fit(1)
        dls.train.after_batch.times = None

def test_after_a_fit_and_in_validation_nothing_is_timed(tmp_path):
    "And the learner can be exported, with the callback"
    learn = slow_learner(loaders(numbered()), tmp_path, LoaderStats())
    for n in 1,2:
        learn.fit(1)
        assert learn.dls.train.after_batch.times is None and learn.loader_stats.history.rows.n==4
    class NotTimed(Callback):
        def before_batch(self): assert self.training or self.dl.after_batch.times is None
    learn.fit(1, cbs=NotTimed())
    learn.loader_stats.history.marks = threading.Lock()   # as events of a GPU, it cannot be pickled
    learn.opt_func = SGD
    learn.export()
    assert load_learner(tmp_path/'export.pkl').loader_stats.times==learn.loader_stats.times

def test_ranks_and_workers_that_are_spawned_are_timed():
    dl = loaders(numbered()).train
    rank = RemoteDistributedDL(dl, rank=0, world_size=2)
    dl.after_batch.times = BatchTimes()
    assert [len(b[1]) for b in rank]==[4,4] and rank.i==8 and dl.after_batch.times.last.samples==4
    dl.after_batch.times.last = threading.Lock()   # cannot be pickled for a worker
    assert pickle.loads(pickle.dumps(dl.after_batch)).times.last is None

def test_of_other_loaders_only_the_waiting_is_known(tmp_path, capsys):
    class Items:
        def __len__(self): return 12
        def __getitem__(self, i):
            sleep(.1)
            return torch.ones(3, 4, 4),torch.tensor(1.)
    dls = DataLoaders(*(DataLoader(Items(), bs=4) for _ in range(2)))
    learn = slow_learner(dls, tmp_path, LoaderStats())
    learn.fit(1)
    parts = learn.loader_stats.times.parts
    assert ms(parts)=={'start':133.333, 'wait':266.667, 'forward':100, 'backward':200, 'step':50}
    assert 'data is 53% of the step (400 of 750 ms), limited by waiting for data\n' in capsys.readouterr().out

# --- on a GPU

def test_the_parts_of_a_step_are_those_of_the_gpu(tmp_path, monkeypatch):
    "Which lags behind: events are asked for their time when they have passed"
    gpu = SimpleNamespace(now=0., waits=0)
    class Event:
        def __init__(self, enable_timing): assert enable_timing
        def record(self): gpu.now,self.at = gpu.now+.5,gpu.now   # half a second of work between any two marks
        def query(self): return self.at<gpu.now-10
        def synchronize(self): gpu.waits += not self.query()
        def elapsed_time(self, end): return 1000*(end.at-self.at)
    monkeypatch.setattr(torch.cuda, 'Event', Event)
    monkeypatch.setattr(stats, 'BatchTimes', lambda device: BatchTimes(None))
    monkeypatch.setattr(timed, 'marks_on', lambda device: timed.GpuMarks())
    learn = slow_learner(loaders(numbered()), tmp_path, LoaderStats())
    learn.fit(3)
    parts = learn.loader_stats.times.parts
    assert learn.loader_stats.history.rows.n==12
    assert ms(parts)=={'start':125, 'wait':375, 'copy':500, 'batch_tfms':500, 'forward':500, 'backward':500, 'step':500,
                       'other':2000}
    assert gpu.waits>0   # at the end of an epoch, for what is not done yet

# --- what it says

def times_of(parts, stages=(), **setup): return LoaderTimes(dict(parts), dict(stages), 64, **setup)

WAITING = dict(start=.001, wait=.051, forward=.050, backward=.060, step=.006)
STAGES = dict(fetch=.020, decode=.060, transform=.010, collate=.002)

@pytest.mark.parametrize('limit,times', [
    ('decode', times_of(WAITING, STAGES)),
    ('fetch', times_of(WAITING, {**STAGES, 'fetch':.08})),
    ('decode', times_of(WAITING, {**STAGES, 'fetch':.08}, prefetch=2)),   # 40 ms beside 72
    ('decode', times_of(WAITING, {**STAGES, 'fetch':.05}, prefetch=0)),   # one after the other
    ('transform', times_of(WAITING, {**STAGES, 'transform':.04}, threads=4)),   # only one thread transforms
    ('receive', times_of(WAITING, {**STAGES, 'receive':.02}, num_workers=8)),   # 9 ms beside it, of eight workers
    ('decode', times_of(WAITING, {**STAGES, 'receive':.02}, num_workers=2)),
    ('batch_tfms', times_of({**WAITING, 'batch_tfms':.06}, STAGES)),
    ('copy', times_of({**WAITING, 'copy':.06}, STAGES)),
    ('start', times_of({**WAITING, 'start':.06}, STAGES)),
    ('wait', times_of(WAITING))])
def test_the_limit_is_what_the_others_wait_for(limit, times): assert times.limit==limit

def line_of(times, *advice):
    stats = LoaderStats()
    stats.times,stats.advice = times,advice
    return stats.line()

def test_the_line_says_what_was_measured():
    assert line_of(times_of(WAITING, STAGES), '`shrink(256)` …', '`threads=4`')==(
        'LoaderStats: data is 31% of the step (52 of 168 ms), limited by decoding: `shrink(256)` …, or `threads=4`')
    assert line_of(times_of({'wait':.002, 'forward':.1}, STAGES))==(
        'LoaderStats: data is 2% of the step (2 of 102 ms), so the model is the limit')
    assert line_of(times_of({}))=='LoaderStats: data is 0% of the step (0 of 0 ms), so the model is the limit'
    assert line_of(None)=='LoaderStats: nothing was trained yet'

def test_it_is_quiet_while_others_are(tmp_path, capsys):
    learn = slow_learner(loaders(numbered()), tmp_path, LoaderStats())
    with learn.no_logging(): learn.fit(1)
    assert 'LoaderStats' not in capsys.readouterr().out and learn.loader_stats.times is not None
    learn.fit(1)
    assert capsys.readouterr().out.count('LoaderStats')==1
    learn.lr_find(show_plot=False, num_it=20)
    assert 'LoaderStats' not in capsys.readouterr().out and learn.loader_stats.times is not None

def advice(times, dl, monkeypatch, cores=4):
    monkeypatch.setattr(defaults, 'cpus', cores)
    monkeypatch.setattr(stats, 'shrink_gain', lambda dl: (256,2.44))
    return advice_for(times, dl)

def test_advice_is_what_this_loader_can_use(monkeypatch):
    whole = loaders(numbered()).train
    items = loaders(numbered(), item_tfms=[RandomResizedCrop(16), Slow()]).train
    shrunk = '`shrink(256)` at ingest builds batches 2.4 times as fast'
    decoding = times_of(WAITING, STAGES)
    assert advice(decoding, whole, monkeypatch)==[shrunk, '`num_workers=0, threads=4`']
    assert advice(decoding, whole, monkeypatch, cores=1)==[shrunk]
    assert advice(decoding, items, monkeypatch)==[shrunk, '`num_workers=4`']
    assert advice(times_of(WAITING, {'transform':1}), items, monkeypatch)==['`num_workers=4`']
    assert advice(times_of(WAITING, {'receive':1, 'decode':1}, num_workers=4), whole, monkeypatch)==[
        '`num_workers=0, threads=4`']
    assert advice(times_of({**WAITING, 'copy':1}), whole, monkeypatch)==['`pin_memory=True`']
    assert advice(decoding, None, monkeypatch)==advice(times_of(WAITING), whole, monkeypatch)==[]

def test_reading_in_advance_is_advised_until_it_is_no_slower_than_the_rest(monkeypatch):
    dl = loaders(numbered()).train
    def prefetch(fetch, **setup): return advice(times_of(WAITING, {**STAGES, 'fetch':fetch}, **setup), dl, monkeypatch)
    assert prefetch(.3)==['`prefetch=3`']   # a step of the model takes 116 ms, and building a batch 72
    assert prefetch(.3, num_workers=2)==['`prefetch=2`'] and prefetch(9.)==['`prefetch=16`']
    assert advice(times_of({'wait':1.}, {'fetch':1.}), dl, monkeypatch)==['`prefetch=16`']

def test_advice_that_fails_does_not_end_a_training(tmp_path, monkeypatch, capsys):
    def fail(times, dl): raise ValueError('no JPEG')
    monkeypatch.setattr(stats, 'advice_for', fail)
    monkeypatch.setattr(stats, '_LITTLE', 0.)
    slow_learner(loaders(numbered()), tmp_path, LoaderStats()).fit(1)
    assert 'LoaderStats: data is' in capsys.readouterr().out

@pytest.mark.parametrize('item_tfms', [RandomResizedCrop(32), [RandomResizedCrop(32), Slow()]], ids=['whole','items'])
def test_what_shrink_would_gain_is_measured(monkeypatch, item_tfms):
    "By decoding images of the dataset, and smaller ones; here a pixel of the file takes a microsecond"
    write = JpegSource.write
    def slow_write(self, *args):
        sleep(self.size[0]*self.size[1]*1e-6)
        return write(self, *args)
    monkeypatch.setattr(JpegSource, 'write', slow_write)
    large,small = (loaders(numbered(size=size), item_tfms=item_tfms).train for size in ((512,256), (80,70)))
    state = states(large)
    size,gain = shrink_gain(large)
    assert shrink_gain(small) is None   # hardly larger than the 64 pixels that crops of 32 are given
    extra = 0 if item_tfms.__class__ is RandomResizedCrop else .005
    assert size==64 and gain==pytest.approx((512*256e-6+extra)/(128*64e-6+extra)) and states(large)==state
    assert shrink_gain(DataLoaders.from_store(in_memory(range(8), lambda i: {'png':draw(i), 'cls':'ab'[i%2]}),
        item_tfms=Resize(8), bs=4, num_workers=0).train) is None

def test_without_a_measurable_time_there_is_no_factor():
    assert shrink_gain(loaders(numbered(size=(512,256))).train) is None

def test_the_plot_shows_both_accounts(slow_store, tmp_path):
    learn = slow_learner(loaders(slow_store), tmp_path, LoaderStats())
    learn.fit(3)
    left,right = learn.loader_stats.plot().axes
    assert (left.get_xlabel(),left.get_ylabel(),right.get_xlabel())==('batch','ms','ms of work per batch')
    assert [text.get_text() for text in left.get_legend().get_texts()][::-1]==[
        'starting the epoch','waiting for data','forward','backward','optimizer step']
    assert [bar.get_width() for bar in right.patches]==pytest.approx([40, 40])
    assert [text.get_text() for text in right.get_yticklabels()]==['fetching','decoding']
    assert right.get_title()=='The loader, in the main process'

def test_the_history_has_a_bounded_size():
    history = History(keep=4)
    for i in range(1000): history.add(np.array([i, 1.]))
    assert len(history.rows)<4 and history.mean().tolist()==[499.5, 1] and history.per==256
    assert [row.tolist() for row in history.rows]==[[127.5+256*k, 1] for k in range(3)]

# --- without a model

def states(dl):
    "Of all random generators, and of a loader"
    loader = {name:getattr(dl, name) for name in 'n bs threads prefetch num_workers offs known_lengths'.split()}
    loader['times'] = dl.after_batch.times
    return dl.rng.getstate(),random.getstate(),np.random.get_state()[1].tolist(),torch.get_rng_state().tolist(),loader

def test_bench_measures_each_stage(slow_store):
    dl = loaders(slow_store).train
    speed = dl.bench()
    assert {name:round(rate, 3) for name,rate in speed.stages.items()}=={'fetch':100, 'decode':100}
    assert speed.samples_per_s==pytest.approx(50) and speed.times.num_workers==0
    *_,last = str(speed).splitlines()
    assert last.split()[:4]==['the','loader','50','samples/s'] and 'decoding' in str(speed)

def test_bench_ends_in_time(slow_store, clock):
    "The first batch is not counted"
    dl = loaders(slow_store).train
    start = clock.now
    speed = dl.bench(.15)
    assert clock.now-start==pytest.approx(.24) and speed.samples_per_s==pytest.approx(50)

@pytest.mark.parametrize('arrivals,rate', [([3., 4., 5.], 100/12), ([3.], 100/3), ([0., 0.], math.inf)])
def test_the_speed_is_that_of_an_epoch(arrivals, rate):
    "Ten batches of ten, of which the first takes longer"
    dl = DataLoader(range(100), bs=10)
    assert stats._rate(dl, arrivals, 1)==pytest.approx(rate)

@pytest.mark.parametrize('options', [{}, dict(num_workers=1), dict(threads=2), dict(prefetch=3)], ids=str)
def test_bench_and_tune_leave_the_order_and_random_numbers_as_they_are(options, monkeypatch):
    store = in_memory(range(24), lambda i: {'jpg':draw(i).resize((40,30)), 'cls':'ab'[i%2]})
    monkeypatch.setattr(stats, '_candidates', lambda dl, cores: [(0,0), (1,0), (0,1)])
    def new():
        set_seed(3)
        return DataLoaders.from_store(store, item_tfms=RandomResizedCrop(16), splitter=RandomStoreSplitter(1/3, seed=1),
                                      bs=4, **{**dict(num_workers=0), **options})
    expected = batches_of(new().train)
    dls = new()
    before = states(dls.train)
    dls.train.bench(.01)
    assert states(dls.train)==before
    dls.tune(.01)
    for dl in dls.loaders:
        before_tune = {'num_workers':0, 'threads':0, 'prefetch':1, **options}
        dl.fake_l.num_workers,dl.threads,dl.prefetch = before_tune.values()
    assert states(dls.train)==before
    assert same(batches_of(dls.train), expected)

def test_tune_takes_the_fastest(monkeypatch):
    "Of workers and threads, then of batches to read in advance; for all loaders"
    dls,tried = loaders(numbered(), prefetch=1),[]
    def load_for(dl, seconds):
        tried.append((dl.fake_l.num_workers, dl.threads, dl.prefetch))
        rate = 100*(1+dl.fake_l.num_workers)+120*dl.threads+(dl.prefetch==2)
        return LoaderSpeed(None, rate)
    monkeypatch.setattr(stats, 'load_for', load_for)
    tuned = dls.tune(cores=3)
    pairs = [(0,0), (0,1), (0,2), (0,3), (1,0), (2,0), (3,0)]
    assert tried==[(0,0,1), *((*pair, 1) for pair in pairs), (0,3,2), (0,3,4)]
    assert tuned.best==(0,3,2) and list(tuned.rates)==tried[1:]
    for dl in dls.loaders: assert (dl.fake_l.num_workers,dl.threads,dl.prefetch)==(0,3,2)
    assert str(tuned).splitlines()[-1]=='num_workers=0, threads=3, prefetch=2: 4.6 times as fast as before'
    assert str(dls.tune(cores=3)).endswith(': as it was')

def test_tune_is_for_loaders_of_stores():
    "It tries no threads where these have nothing to do"
    dl = loaders(numbered(), item_tfms=[RandomResizedCrop(16), Slow()]).train
    assert stats._candidates(dl, 2)==[(0,0), (1,0), (2,0)]
    with pytest.raises(TypeError, match='not for a DataLoader'): DataLoaders(DataLoader([1]), DataLoader([1])).tune()
