"Drawings as sequences for recurrent networks: as sketch-rnn has them, padded, shown, trained on, and from new inputs"
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from fastai.vision.all import *

from fastai_remote import *
from fastai_remote.codec.strokes import pack_strokes, simplify
from fastai_remote.load.targets import packed_strokes, stroke_lengths, TensorStrokes
from in_memory import written

def doodle(seed):
    rng = np.random.default_rng(seed)
    return [[*np.cumsum(rng.integers(-4, 9, (2,k)), 1).tolist(), np.cumsum(rng.integers(5, 30, k)).tolist()]
            for k in rng.integers(1, 30, rng.integers(1, 5)).tolist()]

@pytest.fixture(scope='module')
def store(tmp_path_factory):
    file = tmp_path_factory.mktemp('drawings')/'a.ndjson'
    lines = [dict(word='cat' if i%2 else 'dog', key_id=str(i), drawing=doodle(i)) for i in range(40)]
    file.write_text('\n'.join(map(json.dumps, lines)))
    return written(drawing_samples(file, times=True), splits={'train':None, 'valid':8})[0]

def load(store, **kw): return DataLoaders.from_store(store, **{'x':'strokes', 'bs':8, 'num_workers':0, **kw})

def of_sketch_rnn(lines):
    "What sketch-rnn makes of polylines: the format with 3 columns, and the one with 5 columns and one row of padding"
    three = np.array([[0,0,0], *([x, y, k==len(line)-1] for line in lines for k,(x,y) in enumerate(line))])
    three[1:,:2] -= three[:-1,:2]
    three = three[1:]
    five = np.zeros((len(three)+1, 5))
    five[:-1,:2] = three[:,:2]
    five[:-1,2] = 1-three[:,2]
    five[:-1,3] = three[:,2]
    five[-1,4] = 1
    return three,five

def test_sequences_are_those_of_sketch_rnn():
    for strokes in map(simplify, map(doodle, range(5))):
        three,five = of_sketch_rnn([stroke.T.tolist() for stroke in strokes])
        for o in strokes,pack_strokes(strokes):
            np.testing.assert_array_equal(StrokeSequence(3).create(o), three)
            np.testing.assert_array_equal(StrokeSequence().create(o), five)
        np.testing.assert_array_equal(StrokeSequence(3, scale=.5, max_len=4).create(strokes), three[:4]*[.5,.5,1])

def test_what_is_no_sequence_is_refused(store):
    for kw,match in ((dict(fmt=4),'3 or 5'), (dict(max_len=0),'at least 1')):
        with pytest.raises(ValueError, match=match): StrokeSequence(**kw)
    with pytest.raises(ValueError, match='strokes have no times.*points.npy'):
        StrokeSequence(time=True).create([[[1],[2]]])
    with pytest.raises(ValueError, match='strokes'): StrokeSequence().create(b'\x05\x01')
    with pytest.raises(ValueError, match=r'want points of shape \(n,4\), got \(3, 3\)'):
        StrokeSequence().of_points(np.zeros((3,3)))
    with pytest.raises(ValueError, match='normalize=True is for images'):
        load(store, draw=StrokeSequence(), normalize=True)
    with pytest.raises(TypeError, match=r'draw takes a Rasterise\(…\) or a StrokeSequence'):
        Fetch('strokes', store, draw=3)

@pytest.mark.parametrize('field,width,num_workers', [('strokes',5,2), ('points.npy',6,0)])
def test_batches_are_padded_and_each_drawing_is_what_is_stored(store, field, width, num_workers):
    sequence = StrokeSequence(time=width==6)
    dls = load(store, x=field, draw=sequence, bs=5, num_workers=num_workers)
    x,y = dls.valid.one_batch()
    assert type(x) is TensorStrokes and x.shape[0]==5 and x.shape[2]==width and x.dtype==torch.float32
    lengths = stroke_lengths(x)
    for k,o in enumerate(store[store.splits['valid'][0]:][:5]):
        want = sequence.create(o['strokes']) if width==5 else sequence.of_points(o['points.npy'])
        n = len(want)
        assert torch.equal(torch.Tensor(x[k][:n].cpu()), torch.tensor(want)) and dls.vocab[y[k]]==o['cls']
        assert (x[k][n:,:-1]==0).all() and (x[k][n:,-1]==1).all() and lengths[k]==n-1
    assert max(lengths)==x.shape[1]-1 and len(packed_strokes(x).data)==(lengths+1).sum()
    assert {type(x) for x,_ in dls.train}=={TensorStrokes}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn,self.out = nn.GRU(5, 16, batch_first=True),nn.Linear(16, 2)
    def forward(self, x): return self.out(self.rnn(packed_strokes(x))[1][-1])

@pytest.mark.slow
def test_a_recurrent_network_learns(store, tmp_path):
    "A Learner trains, shows, predicts new drawings, and is exported and loaded"
    dls = load(store, draw=StrokeSequence(scale=1/32, max_len=40))
    learn = Learner(dls, Net(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=tmp_path)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    dls.show_batch(max_n=4)
    axes = plt.gcf().axes
    assert len([ax for ax in axes if ax.lines])==4 and {ax.get_title() for ax in axes}<={'cat','dog'}
    learn.show_results(max_n=3)
    plt.close('all')
    i,(preds,_) = store.splits['valid'][0],learn.get_preds(dl=dls.valid)
    learn.export('l.pkl')
    sample = {'strokes':store[i]['strokes']}
    for model,o in (learn,i),(learn,sample),(load_learner(tmp_path/'l.pkl'),sample):
        with model.no_bar(): label,_,probs = model.predict(o)
        assert label==dls.vocab[probs.argmax()] and torch.allclose(probs, preds[0], atol=1e-5) and len(preds)==8

def test_a_data_block_has_sequences_and_pictures_of_the_same_drawings(store):
    "RedisBlock in a DataBlock, without a store at first"
    def first(*blocks, **kw):
        block = DataBlock(blocks=blocks, get_items=get_remote_items, splitter=StoreSplitter(), **kw)
        return block.dataloaders(store, bs=4, num_workers=0).one_batch()
    x,_ = first(RedisBlock('strokes', draw=StrokeSequence(3)), RedisBlock('cls'))
    assert type(x) is TensorStrokes and x.shape[-1]==3
    with pytest.raises(ValueError, match='does not say where a drawing ends'): stroke_lengths(x)
    x[0].show()
    im,x,_ = first(RedisBlock(store, 'strokes', PILImageBW), RedisBlock(store, 'strokes', draw=StrokeSequence()),
                   RedisBlock(store, 'cls'), n_inp=2, item_tfms=Resize(32))
    assert im.shape==(4,1,32,32) and type(x) is TensorStrokes
