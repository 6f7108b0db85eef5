"A training that is stopped anywhere goes on exactly there; a loader with a seed computes any batch again"
import inspect, io, json, os, shutil, signal, warnings

import pytest
from fastai.vision.all import *

from fastai_remote import *
from fastai_remote.load.checkpoint import CheckpointFile, decode, encode
from fastai_remote.load.equivalence import IMAGE_TFMS
from fastai_remote.load.distributed import RemoteDistributedDL
from fastai_remote.load.seeds import seed_all
from in_memory import in_memory
from inputs import encoded
from interpreters import free_port, start_fork
from resume_trainings import BatchLog, compare, digest, Jitter, learner, merged, read_lines, train

N = 60
HERE = Path(__file__).parent

def sample(i):
    pixels = np.random.default_rng(i).integers(0, 255, (20,24,3))
    return {'jpg':encoded(pixels, 'JPEG'), 'cls':f'c{i%4}', 'id':i}

def damaged():
    "A store in which every fifth image lacks its end: it opens, and cannot be decoded"
    jpgs = [sample(i)['jpg'][:None if i%5 else -200] for i in range(N)]
    return MemoryStore({'jpg':jpgs, 'cls':(np.arange(N)%4).astype('u1')}, vocab={'cls':[f'c{k}' for k in range(4)]})

def text(i):
    words = np.random.default_rng(i).integers(0, 40, 2+i%9)
    return {'txt':' '.join(f'w{word}' for word in words), 'cls':f'c{i%2}'}

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('shards')/'d'
    to_shards(list(range(N)), folder, sample, chunk=5, maxcount=5, num_workers=1, progress=False)
    return folder

@pytest.fixture(scope='module')
def shards(folder): return ShardStore(folder)

@pytest.fixture(scope='module')
def stores(shards):
    return dict(memory=in_memory(range(N), sample), shards=shards, texts=in_memory(range(N), text),
                damaged=damaged())

def loaders(store, **kwargs):
    return DataLoaders.from_store(store, **{**dict(bs=8, num_workers=0, item_tfms=RandomResizedCrop(16), seed=3,
        batch_tfms=aug_transforms(size=16), device='cpu'), **kwargs})

def digests(batches): return [digest(*b) for b in batches]

# --- a loader with a seed

@pytest.mark.slow
@pytest.mark.parametrize('kind,jitter', [('memory',True), ('shards',False)])
def test_a_batch_is_a_function_of_the_seed_the_epoch_and_the_position(stores, kind, jitter):
    "For any number of workers and threads, from any batch on, and whatever was read before"
    kwargs = dict(item_tfms=[RandomResizedCrop(16), Jitter()]) if jitter else {}
    dls = loaders(stores[kind], **kwargs)
    first,second = digests(dls.train),digests(dls.train)
    assert len({*first, *second})==12 and dls.train.epoch==2
    for workers,threads,start in (2,0,3),(0,2,0):
        set_seed(workers)
        train = loaders(stores[kind], num_workers=workers, threads=threads, **kwargs).train
        train.one_batch()
        train.set_epoch(0, start=start)
        assert digests(train)==first[start:] and (train.epoch,train.start)==(1,0)
        assert digests(train)==second
    assert digests(loaders(stores[kind], seed=4, **kwargs).train)!=first

def test_known_transforms_draw_from_random_alone():
    "Whole batches seed nothing else for a sample"
    made = [cls(8) if 'size' in inspect.signature(cls).parameters else cls(p=1.) for cls in IMAGE_TFMS]
    image,drawn = PILImage.create(np.zeros((20,24,3), np.uint8)),[]
    for tfm in [*made, *(Resize(8, method=method) for method in (ResizeMethod.Squish, ResizeMethod.Pad))]:
        before,others = random.getstate(),(np.random.get_state()[1:3],torch.get_rng_state())
        tfm(image, split_idx=0)
        drawn.append(random.getstate()!=before)
        assert str(others)==str((np.random.get_state()[1:3],torch.get_rng_state())), tfm
    assert len(made)==6 and sum(drawn)>=4

def test_the_generators_of_all_devices_are_seeded(monkeypatch):
    "Dropout on a GPU, also one of Apple, draws from the generator of the GPU"
    seeds = []
    for device in torch.backends.mps,torch.cuda: monkeypatch.setattr(device, 'is_available', lambda: True)
    monkeypatch.setattr(torch.mps, 'manual_seed', seeds.append)
    monkeypatch.setattr(torch.cuda, 'manual_seed_all', seeds.append)
    for devices in False,True: seed_all(5, devices)
    assert seeds==[5,5] and torch.initial_seed()==5

def test_an_epoch_is_not_disturbed_by_another_of_the_same_loader(stores):
    train,seen = loaders(stores['memory']).train,[]
    for b in train:
        seen.append(digest(*b))
        train.one_batch()
    assert seen==digests(loaders(stores['memory']).train)

def test_lanes_change_the_order_of_shards_and_workers_do_not(shards):
    def order(lanes, workers):
        train = loaders(shards, lanes=lanes, num_workers=workers).train
        train.randomize()
        return list(train.get_idxs())
    orders = [order(lanes, workers) for lanes in (2,4) for workers in (0,1,3)]
    assert [orders.index(order) for order in orders]==[0,0,0,3,3,3]
    assert all(sorted(order)==list(range(48)) for order in orders)

def test_without_a_seed_the_order_is_drawn(stores):
    train = loaders(stores['memory'], seed=None).train
    assert digests(train)!=digests(train) and train.seeds is None
    with pytest.raises(ValueError, match='needs a loader with seed='): train.set_epoch(1)
    with pytest.raises(ValueError, match='needs a loader with seed='): train.state_dict()

@pytest.mark.parametrize('kind,kwargs', [('memory',{}), ('shards',{}), ('shards',dict(balance='cls')),
                                         ('memory',dict(drop_last=False))])
def test_a_batch_of_all_ranks_does_not_depend_on_their_number(stores, kind, kwargs):
    def batches(world_size):
        ranks = [loaders(stores[kind], bs=16//world_size, batch_tfms=None, **kwargs).train for _ in range(world_size)]
        ranks = [list(RemoteDistributedDL(dl, rank=r, world_size=world_size)) for r,dl in enumerate(ranks)]
        assert len({len(rank) for rank in ranks})==1
        return [torch.cat([x for x,_ in parts]) for parts in zip(*ranks)]
    one,*others = [batches(world_size) for world_size in (1,2,4)]
    assert len(one)==3
    for other in others: assert digests(zip(other))==digests(zip(one))

@pytest.mark.parametrize('lanes,overlaps', [(4,False), (2,False), (8,False), (3,True), (6,True)])
def test_ranks_that_divide_the_lanes_read_shards_of_their_own(shards, lanes, overlaps):
    "Others read some shards twice, and one warning says so"
    def shards_of(rank):
        train = loaders(shards, bs=8, lanes=lanes, interleave=1, batch_tfms=None).train
        dl = RemoteDistributedDL(train, rank=rank, world_size=2)
        for _ in range(2):
            dl.randomize()
            numbers = train.dataset.items.numbers_at(dl.get_idxs()[np.arange(24)])
        return set(shards.shards.at(numbers)[0].tolist())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        first,second = map(shards_of, range(2))
    told = [str(w.message) for w in found if 'some shards are read by several ranks' in str(w.message)]
    assert bool(first&second)==overlaps and len(told)==overlaps
    if told: assert f'2 ranks with batches of 16 samples together do not divide {lanes} lanes evenly' in told[0]

def test_each_pass_of_tta_draws_other_numbers(stores):
    dls = loaders(stores['memory'])
    learn = Learner(dls, nn.Sequential(Flatten(), nn.Linear(3*16*16, dls.c)), loss_func=CrossEntropyLossFlat())
    with learn.no_bar(), dls.valid.dataset.set_split_idx(0):
        passes = [digest(learn.get_preds(dl=dls.valid.new())[0]) for _ in range(2)]
    assert len(set(passes))==2

def test_a_transform_with_a_generator_of_its_own_is_named(stores):
    class Own(ItemTransform):
        def __init__(self): self.rng = np.random.default_rng(0)
        def encodes(self, x): return x
    train = loaders(stores['memory'], item_tfms=[RandomResizedCrop(16), Own()]).train
    with pytest.warns(UserWarning, match='Own has a random generator of its own'): train.one_batch()

# --- a state for other training loops

@pytest.mark.slow
def test_another_loop_goes_on_where_the_state_was_saved(stores):
    everything = [digests(dl) for dl in [loaders(stores['shards']).train]*3]
    for stop in 1,6,8:
        train,seen = loaders(stores['shards']).train,[]
        for _ in range(2):
            for b in train:
                seen.append(digest(*b))
                if len(seen)==stop: break
            if len(seen)==stop: break
        state = json.loads(json.dumps(train.state_dict()))
        again = loaders(stores['shards'], num_workers=stop%3).train
        again.load_state_dict(state)
        while again.epoch<3: seen += digests(again)
        assert seen==sum(everything, [])

@pytest.mark.parametrize('kwargs,message', [
    (dict(seed=4), 'had seed 3, and cannot be continued with 4'), (dict(lanes=4), 'had lanes 8, .* with 4'),
    (dict(bs=4), 'had batch_of_all_ranks 8, .* with 4'), (dict(interleave=2), 'had interleave 4'),
    (dict(valid_pct=.5), 'had samples 48, and cannot be continued with 30'),
    (dict(splitter=RandomStoreSplitter(.2, seed=9)), 'was of other samples')])
def test_a_state_of_another_loader_is_refused_with_both_values(stores, kwargs, message):
    state = loaders(stores['shards']).train.state_dict()
    with pytest.raises(ValueError, match=message): loaders(stores['shards'], **kwargs).train.load_state_dict(state)

# --- trainings that are stopped

class Crash(Exception): "Stands for whatever ends a process"

def crash(): raise Crash('here')

def straight(store, folder, options, **kwargs):
    "A training that nothing stops: what it did, and its results"
    folder.mkdir()
    lines = []
    learn = learner(store, folder, options, lines, Resume(folder/'run.ckpt', every=1000))
    result = train(learn, options, **kwargs)
    return merged(lines),result

def stopped(store, folder, options, stops, every=2, stop=crash, error=Crash, **kwargs):
    "The same training, which `stop` ends after each of `stops` batches, and which then goes on with other workers"
    folder.mkdir()
    lines = []
    for k,at in enumerate([*stops, None]):
        resume = Resume(folder/'run.ckpt', every=every)
        learn = learner(store, folder, options, lines, resume, BatchLog(lines, at, stop), threads=k%2)
        if at is None:
            result = train(learn, options, **kwargs)
            return merged(lines),result
        with pytest.raises(error): train(learn, options, **kwargs)
        if resume.writing is not None: resume.writing.result()   # a process that is killed may not get so far

CASES = [('mixup', [3,6]), ('jitter train_metrics', [1,7]), ('fine_tune save csv', [2,9,8]), ('accumulate flat', [5]),
    ('lr_find plateau csv', [8]), ('short csv', [3,4]), ('balance early', [4,9]), ('bf16', [7]),
    ('cutmix ranger', [3]), ('skip torch_adamw', [2,7]), ('replace', [4,3]), ('texts', [4,9]), ('gpu mixup', [3,6]),
    ('gpu fp16 train_metrics', [2,9])]

@pytest.mark.slow
@pytest.mark.parametrize('options,stops', CASES)
def test_a_training_goes_on_exactly_where_it_was_stopped(stores, tmp_path, monkeypatch, options, stops):
    "Batches, weights after each of them, optimiser, recorder, log and predictions are the same bits"
    if 'gpu' in options and not torch.cuda.is_available(): pytest.skip('there is no GPU')
    monkeypatch.setattr(defaults, 'use_cuda', 'gpu' in options)
    names = {'csv':'shards', 'balance':'shards', 'skip':'damaged', 'replace':'damaged', 'texts':'texts'}
    store = stores[next((name for word,name in names.items() if word in options), 'memory')]
    done,result = straight(store, tmp_path/'a', options)
    done_again,result_again = stopped(store, tmp_path/'b', options, stops)
    assert done_again==done and result_again==result

terminate,interrupt = (partial(signal.raise_signal, number) for number in (signal.SIGTERM, signal.SIGINT))

@pytest.mark.parametrize('stop,error', [(terminate,SystemExit), (interrupt,KeyboardInterrupt)])
def test_a_signal_saves_after_the_batch(stores, tmp_path, stop, error):
    "Also in validation; no batch is trained twice"
    done,result = straight(stores['memory'], tmp_path/'a', 'mixup')
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    done_again,result_again = stopped(stores['memory'], tmp_path/'b', 'mixup', [3,4,4], 10**6, stop, error)
    assert done_again==done and result_again==result
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]==handlers

@pytest.mark.slow
def test_a_killed_process_goes_on_with_other_workers(folder, tmp_path, interpreters):
    def run(name, workers, at=0, number=0):
        return interpreters.run(HERE/'resume_trainings.py', folder, tmp_path/name, 'mixup jitter csv save', workers, at,
                                int(number), env=dict(os.environ, PYTHONPATH=str(HERE)))
    for name in 'ab': (tmp_path/name).mkdir()
    assert run('a', 0).returncode==0
    assert [run('b', 2, 7, signal.SIGKILL).returncode, run('b', 1, 3, signal.SIGTERM).returncode]==[-9,143]
    last = run('b', 3)
    assert last.returncode==0, last.stderr[-2000:]
    compare(tmp_path/'a', tmp_path/'b')

# --- what it says, and what does not fit

def plain(store, folder, resume=None, **kwargs):
    resume = resume or Resume(folder/'run.ckpt', every=2)
    learn = learner(store, folder, '', [], resume, kwargs.pop('log', None), **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

@pytest.fixture(scope='module')
def stopped_training(stores, tmp_path_factory):
    "The folder of a training of 2 epochs that was stopped after batch 3"
    folder = tmp_path_factory.mktemp('stopped')
    learn = plain(stores['shards'], folder, log=BatchLog([], 3, terminate))
    with pytest.raises(SystemExit, match='^143$'): learn.fit(2, 1e-2)   # the exit code
    return folder

@pytest.fixture
def half(stopped_training, tmp_path): return shutil.copytree(stopped_training, tmp_path/'half')

def test_it_says_where_it_goes_on(stores, half, capsys):
    "With `again`, too, if it has not ended"
    plain(stores['shards'], half, Resume(half/'run.ckpt', again=True)).fit(2, 1e-2)
    plain(stores['shards'], half).fit(2, 1e-2)
    said = capsys.readouterr().out.splitlines()
    assert said==['run.ckpt: goes on in epoch 1 of 2 at batch 3 of 6', 'run.ckpt: finished (fit 1, 2 epochs), nothing '
                  'is trained; Resume(…, again=True) begins a new training']

def test_a_finished_training_has_its_results_and_trains_what_is_new(stores, tmp_path):
    def run(fits, **kwargs):
        learn = plain(stores['memory'], tmp_path, Resume(tmp_path/'run.ckpt', **kwargs))
        for epochs in fits: learn.fit(epochs, 1e-2)
        return learn
    first = run([1])
    again = run([1])
    assert digest(*again.model.parameters())==digest(*first.model.parameters())
    assert again.recorder.losses==first.recorder.losses and not again.resume.is_fitting
    longer = run([1,2])
    assert len(longer.recorder.values)==2
    assert digest(*run([1,2]).model.parameters())==digest(*longer.model.parameters())
    anew = run([1], again=True)
    assert digest(*anew.model.parameters())==digest(*first.model.parameters())   # the same first weights and batches
    with pytest.raises(ValueError, match='fit 1 had 1 epochs, and cannot be continued with 3'): run([3])

@pytest.mark.parametrize('epochs,kwargs,message', [
    (3, {}, 'had 2 epochs, and cannot be continued with 3'), (2, dict(bs=4), 'batch_of_all_ranks 8, .* with 4'),
    (2, dict(lanes=2), 'had lanes 8'), (2, dict(seed=9), 'had seed 0, and cannot be continued with 9'),
    (2, dict(valid_pct=.4), 'had samples 48')])
def test_what_does_not_fit_is_refused_with_both_values(stores, half, epochs, kwargs, message):
    with pytest.raises(ValueError, match=message): plain(stores['shards'], half, **kwargs).fit(epochs, 1e-2)

def test_another_model_is_refused(stores, half):
    learn = plain(stores['shards'], half)
    learn.model[4] = nn.Linear(8, 7)
    with pytest.raises(ValueError, match=r'4.weight of shape \[4, 8\], and this one has 4.weight of shape \[7, 8\]'):
        learn.fit(2, 1e-2)

def test_a_damaged_file_is_not_used(stores, half):
    whole = CheckpointFile(half/'run.ckpt').read()
    content = bytearray((half/'run.ckpt').read_bytes())
    content[len(content)//2] ^= 1
    (half/'run.ckpt').write_bytes(content)
    with pytest.warns(UserWarning, match='run.ckpt .* is damaged: the training goes on from run.ckpt.before'):
        before = CheckpointFile(half/'run.ckpt').read()
    assert (before['loader']['batch'],whole['loader']['batch'])==(2,3)
    (half/'run.ckpt.before').write_bytes(content[:1000])
    with pytest.raises(StoreError, match='run.ckpt .* and run.ckpt.before .*: damaged; remove'):
        CheckpointFile(half/'run.ckpt').read()

@pytest.mark.parametrize('url', ['{}/run.ckpt', 'memory://{}/run.ckpt'])
def test_a_damaged_file_does_not_replace_the_one_that_is_used(url, tmp_path, monkeypatch):
    "If the training is killed while it saves, that one is still there"
    file = CheckpointFile(url.format(tmp_path))
    for n in 1,2: file.write(dict(n=n))
    file.storage.write('run.ckpt', b'damaged')
    again = CheckpointFile(url.format(tmp_path))
    def read():
        with pytest.warns(UserWarning, match='damaged'): return again.read()
    assert read()==dict(n=1)
    def interrupted(state, file): raise KeyboardInterrupt
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch, 'save', interrupted)
        again.write(dict(n=3))
    assert read()==dict(n=1)
    again.write(dict(n=4))
    assert again.read()==dict(n=4) and CheckpointFile(url.format(f'{tmp_path}')+'.before').read()==dict(n=1)
    again.write(dict(n=5))
    assert CheckpointFile(url.format(f'{tmp_path}')+'.before').read()==dict(n=4)

def test_a_killed_training_leaves_no_part_of_a_file(tmp_path):
    def killed():
        torch.save = lambda state, file: file.write(bytes(100)) and file.flush() or os.kill(os.getpid(), signal.SIGKILL)
        CheckpointFile(tmp_path/'run.ckpt').write({})
    with pytest.raises(EOFError): start_fork(killed)()
    (tmp_path/'run.ckpt.json').touch()   # of somebody else, and without a number
    (tmp_path/'run.ckpt.more.part').touch()
    assert len(os.listdir(tmp_path))==3
    CheckpointFile(tmp_path/'run.ckpt').write({})
    assert sorted(os.listdir(tmp_path))==['run.ckpt', 'run.ckpt.json', 'run.ckpt.more.part']

def test_a_checkpoint_is_plain_data_at_any_url(half):
    state = torch.load(half/'run.ckpt', weights_only=True)
    assert state['fit']==state['epoch']==0 and state['iter']==3
    file = CheckpointFile('memory://bucket/run.ckpt')
    assert file.read() is None
    values = {'l':L(1,(2,)), 'a':np.arange(3), 's':[torch.tensor(float(k)) for k in range(20)], 'd':{1:None, 'x':{}}}
    for n in 1,2: file.write(encode(dict(n=n, values=values)))
    found = decode(file.read())
    assert found['n']==2 and str(found['values'])==str(values) and type(found['values']['l']) is L
    with pytest.raises(TypeError): encode(object())

class OnGpu(torch.Tensor):
    "Says that it is on a GPU"
    device = torch.device('cuda:1')

def test_what_was_on_a_gpu_returns_to_the_device_of_the_model():
    "The state of an optimizer has to be where the weights are, and what was on the CPU stays there"
    ones = torch.ones(2).as_subclass(OnGpu)
    state = encode({'sqr':ones, 'step':torch.ones(2), 'losses':[ones]})
    with io.BytesIO() as file:
        torch.save(state, file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    found = decode(state, 'meta')
    assert [found['sqr'].device.type, found['step'].device.type, found['losses'][0].device.type]==['meta','cpu','meta']
    assert type(found['sqr']) is torch.Tensor and decode(state)['sqr'].tolist()==[1,1]

def test_attributes_that_cannot_be_saved_are_named_once(stores, tmp_path):
    class Mine(Callback):
        def before_fit(self): self.gathered = {object()}
    learn = plain(stores['memory'], tmp_path)
    learn.add_cb(Mine())
    with pytest.warns(UserWarning, match='Mine: gathered is no plain data, and is not saved') as found:
        learn.fit(1, 1e-2)
    assert len([w for w in found if 'plain data' in str(w.message)])==1

@pytest.mark.slow
def test_validating_and_predicting_in_between_change_nothing(stores, tmp_path):
    def run(name, between):
        (tmp_path/name).mkdir()
        learn = plain(stores['memory'], tmp_path/name)
        for _ in range(2):
            learn.fit(1, 1e-2)
            if between:
                learn.validate()
                learn.get_preds()
                learn.dls.show_batch()
        return digest(*learn.model.parameters())
    assert run('a', False)==run('b', True)

def test_a_learner_with_a_resume_is_exported(stores, tmp_path):
    learn = plain(stores['memory'], tmp_path)
    learn.fit(1, 1e-2)
    learn.export('export.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert type(load_learner(tmp_path/'export.pkl').resume) is Resume

def test_resume_needs_loaders_of_ours(tmp_path):
    dls = DataLoaders.from_dsets([(torch.ones(2), 0)]*8, [(torch.ones(2), 0)]*8, bs=4)
    with pytest.raises(ValueError, match='Resume needs a training loader of fastai_remote'):
        Learner(dls, nn.Linear(2, 2), loss_func=CrossEntropyLossFlat(), cbs=Resume(tmp_path/'r')).fit(1)

# --- what the model saw

@pytest.mark.parametrize('options', ['', 'mixup jitter'])
def test_batch_at_is_what_the_model_saw(stores, tmp_path, options):
    lines = []
    learn = learner(stores['memory'], tmp_path, options, lines, Resume(tmp_path/'run.ckpt'))
    train(learn, options)
    seen = {(epoch,k):batch for (_,epoch,training,k),(batch,*_) in merged(lines).items() if training}
    assert {place:digest(*learn.batch_at(*place)) for place in seen}==seen
    with pytest.raises(IndexError, match='no batch 6: an epoch has 6'): learn.batch_at(0, 6)

# --- several ranks

RANKS = '''
import os, signal, sys, warnings; warnings.filterwarnings('ignore')
sys.path.insert(0, os.environ['TESTS'])
from fastai.vision.all import *
from fastai.distributed import *
from fastai_remote import *
from resume_trainings import BatchLog, digest, LogFile

class Each(BatchLog):
    "Writes down each sample of each training batch, and the weights after it; rank 1 asks to stop after batch `at`"
    def after_batch(self):
        if not self.training: return
        self.lines.append([[self.epoch, self.iter], [digest(x) for x in self.x], digest(*self.model.parameters())])
        self.seen += 1
        if self.seen==self.at and rank_distrib()==num_distrib()-1: os.kill(os.getpid(), signal.SIGTERM)

if __name__=='__main__':
    folder,out,at,bs = sys.argv[1:]
    torch.set_num_threads(1)
    meet = os.environ.get('MEET')   # else whoever launched the ranks says where they meet
    if num_distrib() and meet: torch.distributed.init_process_group(
        'gloo', init_method=f'file://{meet}', rank=rank_distrib(), world_size=num_distrib())
    set_seed(1)
    dls = DataLoaders.from_shards(folder, bs=int(bs), num_workers=1, item_tfms=RandomResizedCrop(16), device='cpu')
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(4, dls.c))
    lines = LogFile(f'{out}/{max(num_distrib(), 1)}.{rank_distrib()}.txt')
    cbs = [Each(lines, int(at)), Resume(f'{out}/run.ckpt', every=2)]
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=cbs, path=out)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(2, 1e-2)
'''

def rank_that_reads(file, store, half, rank):
    "What a process of two ranks says when it begins to train with the state in `file`"
    torch.distributed.init_process_group('gloo', init_method=f'file://{half}/meet', rank=rank, world_size=2)
    with pytest.raises(ValueError) as error: plain(store, half, Resume(half/file)).fit(2, 1e-2)
    torch.distributed.destroy_process_group()
    return str(error.value)

def test_ranks_that_read_different_states_say_so(stores, half, monkeypatch):
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'lo')
    ranks = [start_fork(rank_that_reads, file, stores['shards'], half, rank)
             for rank,file in enumerate(('run.ckpt','on_another_disk.ckpt'))]
    expected = 'rank 0 reads a state of fit 1, epoch 1, batch 3, and rank 1 reads no state; give a path or URL'
    for said in [rank() for rank in ranks]: assert expected in said

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
def test_other_ranks_go_on_with_the_same_global_batches(folder, tmp_path, interpreters):
    """What 2 ranks of `accelerate launch` began, 1, 2 and 4 continue

    The samples and pixels are the same, with 2 the weights too."""
    (script := tmp_path/'script.py').write_text(RANKS)
    def run(name, world_size):
        env = dict(TESTS=str(HERE), MEET=str(tmp_path/f'meet {name}'))
        interpreters.ranks(script, folder, tmp_path/name, 0, 8//world_size, n=world_size, **env)
    def seen(name):
        "`{(epoch, batch): samples of all ranks}`, and the same of the weights"
        samples,weights = {},{}
        for world_size in 1,2,4:
            files = [tmp_path/name/f'{world_size}.{r}.txt' for r in range(world_size)]
            for lines in zip(*(read_lines(file) for file in files if file.exists())):
                place = tuple(lines[0][0])
                everything = sum((line[1] for line in lines), [])
                assert samples.setdefault(place, everything)==everything
                weights.setdefault(place, lines[0][2])
        return samples,weights
    for name in 'straight','begun': (tmp_path/name).mkdir()
    run('straight', 2)
    expected = seen('straight')
    assert len(expected[0])==12
    options = '--multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no'.split()
    begun = interpreters.run('from accelerate.commands.accelerate_cli import main; main()', 'launch', *options,
        f'--main_process_port={free_port()}', script, folder, tmp_path/'begun', 4, 4,
        env=dict(os.environ, OMP_NUM_THREADS='1', GLOO_SOCKET_IFNAME='lo', TESTS=str(HERE), ACCELERATE_USE_CPU='1'))
    assert begun.returncode and 'exitcode  : 143' in begun.stderr, begun.stderr[-2000:]
    assert 4<=len(seen('begun')[0])<=6
    for name in '1','2','4':
        shutil.copytree(tmp_path/'begun', tmp_path/name)
        run(name, int(name))
        assert seen(name)[0]==expected[0]
    assert seen('2')[1]==expected[1]

def test_what_comes_before_the_batch_is_not_computed():
    "At nine tenths of fifty million samples"
    from fastai_remote.order.base import Order
    from fastai_remote.order.permutation import Permutation
    from fastai_remote.order.ranks import worker_batches
    class Counted(Permutation):
        asked = 0
        def _at(self, i):
            self.asked += len(i)
            return super()._at(i)
    order = Counted(50_000_000, 1)
    first = next(worker_batches(Order(50_000_000, order), 64, 1, 2, 700_000))
    assert order.asked<=1024 and first.tolist()==order[np.arange(64*700_001, 64*700_002)].tolist()
