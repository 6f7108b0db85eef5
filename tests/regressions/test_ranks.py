"Two ranks, outside `distrib_ctx`: each computes all predictions by itself, and gathers none from the other"
import json, os

import pytest

SCRIPT = '''
import json, sys, warnings; warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.distributed import *
from fastai_remote import *

out = sys.argv[1]
torch.distributed.init_process_group('gloo', init_method=f'file://{out}/meet', rank=rank_distrib(), world_size=2)
store = MemoryStore({'x.f4':np.arange(30, dtype='f4'), 'cls':np.arange(30, dtype='u1')%2}, vocab={'cls':['a','b']})
dls = DataLoaders.from_store(store, x='x.f4', y='x.f4', bs=4, num_workers=0, device='cpu', valid_pct=.5)
class Same(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(1, 1)
    def forward(self, x): return x.float()+0*self.l(x[:,None].float())[:,0]
learn = Learner(dls, Same(), loss_func=MSELossFlat())
results = {}
with learn.no_bar(), learn.no_logging():
    with learn.distrib_ctx(cpu=True): learn.fit(1, 0.)
    results['preds'] = [o.tolist() for o in learn.get_preds()]
    results['tta'] = [o.tolist() for o in learn.tta(n=1)]
    results['test'] = [learn.get_preds(dl=dls.test_dl([3, 1, 2]))[0].tolist()]
    results['loss'] = list(learn.validate())
results['items'] = list(map(int, dls.valid.items))
Path(f'{out}/{rank_distrib()}.json').write_text(json.dumps(results))
'''

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
def test_ranks_outside_of_distrib_ctx_have_their_own_predictions(tmp_path, interpreters):
    (tmp_path/'script.py').write_text(SCRIPT)
    env = dict(os.environ, OMP_NUM_THREADS='1', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='1',
        GLOO_SOCKET_IFNAME='lo')
    ranks = [interpreters.start(tmp_path/'script.py', tmp_path, env=dict(env, RANK=str(r), LOCAL_RANK=str(r)))
             for r in range(2)]
    for ended in [rank.wait() for rank in ranks]: assert ended.returncode==0, ended.stderr[-2000:]
    for rank in range(2):
        results = json.loads((tmp_path/f'{rank}.json').read_text())
        assert results['preds']==results['tta']==[results['items']]*2
        assert results['test']==[[3, 1, 2]] and results['loss'][0]==0
