"""Two ranks train together: each sample once an epoch, and every rank sees all predictions

From shards they do so in `test_resume_training.py`."""
import json

import numpy as np
import pytest

from fastai_remote.ingest.redis import to_redis

N = 403
SCRIPT = '''
import json, sys, warnings; warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.distributed import *
from fastai_remote import *

class Scale(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(1, 1)
    def forward(self, x): return self.l(x[:,None].float())[:,0]

class See(Callback):
    def before_fit(self): self.epochs = []
    def before_epoch(self): self.epochs.append([[],[]])
    def before_batch(self): self.epochs[-1][not self.training] += [int(o) for o in self.x]

if __name__=='__main__':
    where,out = sys.argv[1:]
    torch.distributed.init_process_group('gloo', init_method=f'file://{out}/meet', rank=rank_distrib(), world_size=2)
    kw = dict(x='x.f4', y='y.f4', bs=8, num_workers=2, valid_pct=.1, device='cpu')
    dls = DataLoaders.from_redis(where, 'numbers', **kw)
    learn = Learner(dls, Scale(), loss_func=MSELossFlat(), cbs=(see:=See()))
    def predictions():
        test = learn.get_preds(dl=dls.test_dl(dls.valid.items[:37]))[0]*float(learn.model.l.weight.sign())
        return [o.tolist() for o in (learn.get_preds()[1], learn.tta(n=1)[1], test)]
    def error(f):
        try: f()
        except ValueError as e: return str(e)
    with learn.no_bar(), learn.no_logging():
        with learn.distrib_ctx(cpu=True):
            learn.fit(2, 1e-6)
            epochs,together = see.epochs,predictions()
            shuffled = error(lambda: learn.get_preds(dl=dls.train.new(drop_last=False)))
        alone,loss = predictions(),list(learn.validate())
        dls.train.on_bad = 'skip'
        with learn.distrib_ctx(cpu=True): skipping = error(lambda: learn.fit(1))
        kw = dict(x='x.f4', y='cls', bs=8, num_workers=2, balance='cls', device='cpu')
        balanced = DataLoaders.from_store(dls.train.stores[0], **kw)
        learn = Learner(balanced, Scale(), loss_func=lambda p,y: p.mean()*0, cbs=(see:=See()))
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(cpu=True): learn.fit(1, 0.)
    items = [int(dls.valid_ds[k][1]) for k in range(len(dls.valid_ds))]
    results = dict(epochs=epochs, together=together, alone=alone, shuffled=shuffled, skipping=skipping, loss=loss,
                   balanced=see.epochs[0][0], items=items)
    Path(f'{out}/{rank_distrib()}.json').write_text(json.dumps(results))
'''

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
def test_two_ranks_train_together(server, tmp_path, interpreters):
    "Outside of `distrib_ctx`, each computes all predictions by itself, and gathers none from the other"
    source = [{'x.f4':i, 'y.f4':i, 'cls':'rare' if i%10==0 else 'common'} for i in range(N)]
    to_redis(source, server.url, 'numbers', num_workers=1, progress=False)
    (tmp_path/'script.py').write_text(SCRIPT)
    interpreters.ranks(tmp_path/'script.py', server.url, tmp_path)
    a,b = (json.loads((tmp_path/f'{r}.json').read_text()) for r in range(2))
    for (ta,va),(tb,vb) in zip(a['epochs'], b['epochs']):
        # of 363: short last batches are dropped, one comes twice
        assert len(ta)==len(tb)==176 and len({*ta,*tb})>=351 and not {*ta,*tb}&{*va,*vb}
        assert len(va)==len(vb)==20 and len({*va,*vb})==40
    items = [int(i) for i in a['items']]
    assert a['epochs'][0]!=a['epochs'][1] and sorted(items)==sorted({*a['epochs'][0][1],*b['epochs'][0][1]})
    # predictions are those of the items, in their order, although the ranks compute them in turn
    for rank in (a,b):
        for y,tta,test in rank['together'],rank['alone']:
            assert [int(i) for i in y]==[int(i) for i in tta]==items and len(items)==40
            assert len(test)==37 and np.argsort(test, axis=None).tolist()==np.argsort(items[:37]).tolist()
        assert 'over several ranks needs the same order on each, and this loader is shuffled' in rank['shuffled']
        assert "on_bad='skip' would give the ranks different numbers of samples" in rank['skipping']
    assert a['loss']==b['loss']
    rare = np.mean([i%10==0 for i in a['balanced']+b['balanced']])
    assert len(a['balanced'])==len(b['balanced']) and .35<rare<.65 and a['balanced']!=b['balanced']

@pytest.mark.slow
def test_loaders_made_before_fastai_distributed_was_imported_are_divided_too(interpreters):
    code = """import sys
from fastai.vision.all import *
from fastai_remote import *
from types import SimpleNamespace
store = MemoryStore({'x.f4':np.arange(8, dtype='f4'), 'cls':np.zeros(8, np.uint8)}, vocab={'cls':['a']})
dls = DataLoaders.from_store(store, x='x.f4', bs=2, num_workers=0)
assert 'fastai.distributed' not in sys.modules and 'fastai_remote.load.distributed' not in sys.modules
from fastai.distributed import DistributedTrainer
trainer = SimpleNamespace(learn=SimpleNamespace(model=SimpleNamespace(device='cpu')))
stock = DataLoader(list(range(8)), bs=2)
print([type(DistributedTrainer._wrap_dl(trainer, dl)).__name__ for dl in (dls.train, stock)])"""
    run = interpreters.run(code)
    assert run.stdout=="['RemoteDistributedDL', 'DistributedDL']\n", run.stderr
