"An ingest in which more than a tenth of the samples failed is not committed, unless the caller allows it"
import pytest

from fastai_remote.core import StoreNotFound
from fastai_remote.ingest.report import IngestError
from fastai_remote.ingest.shards import to_shards
from fastai_remote.ingest.stores import ShardStore

def ingest(folder, n, failing, kind=list, **kwargs):
    "Write `n` samples of which those in `failing` fail; returns how many were looked at, and the error or `None`"
    seen = []
    def fn(i):
        seen.append(i)
        if i in failing: raise ValueError('bad')
        return {'a.i8':i}
    try: to_shards(kind(range(n)), folder, fn=fn, shuffle=False, num_workers=0, progress=False, **kwargs)
    except IngestError as e: return len(seen),e
    return len(seen),None

@pytest.mark.parametrize('kind', [list,iter])
@pytest.mark.parametrize('n,failed,is_committed', [(9, 6, False), (9, 2, False), (9, 1, True), (2, 1, True),
    (40, 4, True), (40, 5, False), (99, 10, False), (100, 10, True), (1000, 11, False), (1200, 12, True)])
def test_at_most_a_tenth_may_fail(tmp_path, n, failed, is_committed, kind):
    _,error = ingest(tmp_path, n, range(failed, 2*failed), kind)
    assert (error is None)==is_committed
    if is_committed: assert len(ShardStore(tmp_path))==n-failed
    else:
        with pytest.raises(StoreNotFound): ShardStore(tmp_path)
        assert ingest(tmp_path, n, range(failed, 2*failed), kind, max_failed=failed)[1] is None

def test_a_stream_stops_early_if_more_than_a_tenth_fails(tmp_path):
    seen,error = ingest(tmp_path/'a', 20_000, range(0, 20_000, 5), iter, chunk=100)
    assert seen<2000 and 'at most a tenth' in str(error)
    seen,error = ingest(tmp_path/'b', 3000, range(1, 101), iter, chunk=100)   # 101 would be too many at that point
    assert seen>=3000 and '100 of 3,000' in str(error)
