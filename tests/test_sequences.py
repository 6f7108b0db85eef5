"Drawings as sequences for recurrent networks: as sketch-rnn has them, padded, shown, trained on, and from new inputs"
import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from fastai.vision.all import *

from fastai_remote import *
from fastai_remote.codec.strokes import pack_strokes, simplify
from fastai_remote.load.sequences import packed_strokes, stroke_lengths, TensorStrokes

def doodle(seed):
    rng = np.random.default_rng(seed)
    return [[*np.cumsum(rng.integers(-4, 9, (2,k)), 1).tolist(), np.cumsum(rng.integers(5, 30, k)).tolist()] for k in rng.integers(1, 30, rng.integers(1, 5)).tolist()]

@pytest.fixture(scope='module')
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp('drawings')
    (folder/'a.ndjson').write_text('\n'.join(json.dumps(dict(word='cat' if i%2 else 'dog', key_id=str(i), drawing=doodle(i))) for i in range(40)))
    to_shards(drawing_samples(folder, times=True), folder/'shards', num_workers=1, progress=False, splits={'train':None, 'valid':8})
    return ShardStore(folder/'shards')

def lines_to_strokes(lines):
    "From sketch-rnn: polylines to the format with 3 columns"
    strokes = [[0, 0, 0]]
    for line in lines:
        for i in range(len(line)): strokes.append([line[i][0], line[i][1], int(i==len(line)-1)])
    strokes = np.array(strokes)
    strokes[1:,0:2] -= strokes[:-1,0:2]
    return strokes[1:,:]

def to_big_strokes(stroke, max_len):
    "From sketch-rnn: to the format with 5 columns, padded"
    result,l = np.zeros((max_len, 5)),len(stroke)
    result[0:l,0:2] = stroke[:,0:2]
    result[0:l,3] = stroke[:,2]
    result[0:l,2] = 1-result[0:l,3]
    result[l:,4] = 1
    return result

@pytest.mark.parametrize('seed', range(5))
def test_as_sketch_rnn(seed):
    strokes = simplify(doodle(seed))
    want = lines_to_strokes([s.T.tolist() for s in strokes])
    for o in (strokes, pack_strokes(strokes)):
        np.testing.assert_array_equal(StrokeSequence(3).create(o), want)
        np.testing.assert_array_equal(StrokeSequence().create(o), to_big_strokes(want, len(want)+1))
    np.testing.assert_array_equal(StrokeSequence(3, scale=.5, max_len=4).create(strokes), want[:4]*[.5,.5,1])

def test_refusals():
    for kw,match in ((dict(fmt=4),'3 or 5'), (dict(max_len=0),'at least 1')):
        with pytest.raises(ValueError, match=match): StrokeSequence(**kw)
    with pytest.raises(ValueError, match='strokes have no times.*points.npy'): StrokeSequence(time=True).create([[[1],[2]]])
    with pytest.raises(ValueError): StrokeSequence().create(b'\x05\x01')
    with pytest.raises(ValueError, match=r'want points of shape \(n,4\), got \(3, 3\)'):
        StrokeSequence().of_points(np.zeros((3,3)))

@pytest.mark.parametrize('num_workers', [0,2])
@pytest.mark.parametrize('field,width', [('strokes',5),('points.npy',6)])
def test_batches(store, field, width, num_workers):
    "Batches are padded tensors; each drawing is exactly what is stored"
    sequence = StrokeSequence(time=width==6)
    dls = DataLoaders.from_store(store, x=field, draw=sequence, bs=5, num_workers=num_workers)
    x,y = dls.valid.one_batch()
    assert type(x) is TensorStrokes and x.shape[0]==5 and x.shape[2]==width and x.dtype==torch.float32
    for k in range(5):
        i = store.splits['valid'][0]+k
        o = store[i]
        want = sequence.create(o['strokes']) if width==5 else sequence.of_points(o['points.npy'])
        assert torch.equal(torch.Tensor(x[k][:len(want)].cpu()), torch.tensor(want)) and (x[k][len(want):,:-1]==0).all() and (x[k][len(want):,-1]==1).all()
        assert int(stroke_lengths(x)[k])==len(want)-1 and dls.vocab[y[k]]==o['cls']
    assert max(stroke_lengths(x))==x.shape[1]-1 and len(packed_strokes(x).data)==(stroke_lengths(x)+1).sum()
    for x,_ in dls.train: assert type(x) is TensorStrokes

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn,self.out = nn.GRU(5, 16, batch_first=True),nn.Linear(16, 2)
    def forward(self, x): return self.out(self.rnn(packed_strokes(x))[1][-1])

def test_a_recurrent_network_learns(store, tmp_path):
    "A Learner trains, shows, predicts new drawings, and is exported and loaded"
    dls = DataLoaders.from_store(store, x='strokes', draw=StrokeSequence(scale=1/32, max_len=40), bs=8, num_workers=0)
    learn = Learner(dls, Net(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=tmp_path)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    dls.show_batch(max_n=4)
    assert len([ax for ax in plt.gcf().axes if ax.lines])==4 and {ax.get_title() for ax in plt.gcf().axes}<={'cat','dog'}
    learn.show_results(max_n=3)
    plt.close('all')
    preds,_ = learn.get_preds(dl=dls.valid)
    with learn.no_bar(): label,_,probs = learn.predict({'strokes':store[0]['strokes']})
    assert label in ('cat','dog') and len(probs)==2 and len(preds)==8
    i = store.splits['valid'][0]
    with learn.no_bar(): assert torch.allclose(learn.predict(i)[2], preds[0], atol=1e-5)
    learn.export('l.pkl')
    again = load_learner(tmp_path/'l.pkl')
    with again.no_bar(): assert torch.allclose(again.predict({'strokes':store[i]['strokes']})[2], preds[0], atol=1e-5)

def test_data_block(store):
    "RedisBlock in a DataBlock, without a store at first; pictures and sequences of the same drawings"
    dblock = DataBlock(blocks=(RedisBlock('strokes', draw=StrokeSequence(3)), RedisBlock('cls')), get_items=get_remote_items, splitter=StoreSplitter())
    x,_ = dblock.dataloaders(store, bs=4, num_workers=0).one_batch()
    assert type(x) is TensorStrokes and x.shape[-1]==3
    with pytest.raises(ValueError, match='does not say where a drawing ends'): stroke_lengths(x)
    x[0].show()
    both = DataBlock(blocks=(RedisBlock(store, 'strokes', PILImageBW), RedisBlock(store, 'strokes', draw=StrokeSequence()), RedisBlock(store, 'cls')), n_inp=2,
        get_items=get_remote_items, splitter=StoreSplitter(), item_tfms=Resize(32)).dataloaders(store, bs=4, num_workers=0)
    im,x,_ = both.one_batch()
    assert im.shape==(4,1,32,32) and type(x) is TensorStrokes

def test_other_options_are_refused(store):
    with pytest.raises(ValueError, match='normalize=True is for images'): DataLoaders.from_store(store, x='strokes', draw=StrokeSequence(), normalize=True)
    with pytest.raises(TypeError, match=r'draw takes a Rasterise\(…\) or a StrokeSequence'): Fetch('strokes', store, draw=3)
