"Processes that are killed while they write: nothing is lost or left over, and who is still alive is not taken for dead"
import re, shutil, subprocess, sys
from pathlib import Path

import pytest

from conftest import HOLD, holding, kill, wait_for
from fastai_remote import RedisStore, StoreBusy, to_redis
from snapshots import client

KILLS = Path(__file__).parent/'kills.py'

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('processes')]

@pytest.mark.parametrize('who,n', [('parent',8), ('worker',1)])
def test_whoever_is_killed_the_same_call_finishes(interpreters, who, n):
    """The first `n` of the calls of `kills.py`; at once, while workers of a leader that was killed still run

    In a new process: workers of an ingest before would be those of a fork, too, and never answer it."""
    run = interpreters.run(KILLS, '--kills', n, '--place', 'redis', 'folder', '--who', who, '--seed', 0, fastai=False)
    assert run.returncode==0, run.stdout+run.stderr

SCRIPT = HOLD + '''
from fastai_remote import to_redis
def fn(i):
    hold()
    return {'id':i}
to_redis(list(range(2000)), _sys.argv[1], 'd', fn, chunk=50, num_workers=1, progress=False)
'''

def test_a_process_of_another_container_is_not_taken_for_dead(fresh, tmp_path):
    "It has the same host name, and its number means nothing here. The message says how far it is"
    inside = ['unshare','-Urpf','--mount-proc']
    if not shutil.which('unshare') or subprocess.run([*inside,'true'], capture_output=True).returncode:
        pytest.skip('no namespaces here')
    # a number that no process has here
    numbered = [*inside, 'sh', '-c', 'for i in $(seq 400); do /bin/true; done; "$@"; true', 'sh']
    process = subprocess.Popen([*numbered, sys.executable, '-c', SCRIPT, fresh.url], start_new_session=True,
                               env=holding(200, tmp_path/'go on'))
    try:
        wait_for(lambda: any(ingest['chunks']>2 for ingest in RedisStore.unfinished(fresh.url)))
        holder = re.search(rb'"pid": ?(\d+)', client(fresh).get('d:ingest:lock'))[1].decode()
        if Path(f'/proc/{holder}').exists(): pytest.skip('the number is taken')
        with pytest.raises(StoreBusy, match=rf"process {holder} on .* is writing 'd' now \([34] of 40 chunks done\)"):
            to_redis([{'id':1}], fresh.url, 'd', num_workers=1, progress=False)
    finally: kill(process)
