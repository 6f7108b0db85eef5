"""Faults of the table of the guide: nothing is lost, repeated or wrong, and the user sees a clear message

`make faults` runs every row. Here each fault meets an epoch, an ingest and each store that it is tried with, but not
each store in both of them."""
import json, re
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.utils.data._utils import worker
for name in 's3fs','moto','boto3': pytest.importorskip(name)

import fault_table
from fault_table import BACKENDS, can_mount, CASES, not_tried, run_case

# What a user may see: the end of the case, or an error that says what happened
CLEAR = re.compile(r'The (epoch|ingest) continues|One writes the dataset|No process stays|Readers see nothing|'
                   r'(KeyboardInterrupt|TerminatedWorkerError|RuntimeError: DataLoader worker)|'
                   r'(Store(Unavailable|NotFound|Full|Busy|Error)|MissingSample|CorruptSample|ServerRestarted)\b')
QUICK = ['connection reset during a reply, epoch, Redis', 'connection reset during a reply, ingest, Redis Cluster',
         'CLIENT KILL, ten times, ingest, Sentinel']

def pairwise(cases):
    "Some of `cases`: each pair of fault and store, fault and epoch or ingest, and store and epoch or ingest is there"
    chosen,seen = [],set()
    def pairs(case): return {(case.fault, case.kind), (case.fault, case.during), (case.kind, case.during)}-seen
    for n in 3,2,1:   # first those that bring the most new pairs
        for case in cases:
            if len(pairs(case))<n: continue
            chosen.append(case)
            seen |= pairs(case)
    return [case for case in cases if case in chosen]

TRIED = pairwise([*(case for case in CASES if str(case) in QUICK), *(case for case in CASES if str(case) not in QUICK)])

def marked(case): return pytest.param(case, id=str(case), marks=() if str(case) in QUICK else pytest.mark.slow)

@pytest.fixture(scope='module')
def start():
    """Starts a backend. Several servers take seconds, in which they wait for each other: those of the next case of the
    same kind do so beside this case"""
    ahead,left = {},[case.kind for case in TRIED]
    with ThreadPoolExecutor(1) as thread:
        def start(kind, is_slow):
            left.remove(kind)
            started = ahead.pop(kind, None) or thread.submit(BACKENDS[kind])
            backend = started.result()
            if is_slow and kind in left and ('cluster' in kind or 'sentinel' in kind):
                ahead[kind] = thread.submit(BACKENDS[kind])
            return backend
        yield start
        for started in ahead.values(): started.result().__exit__()

@pytest.mark.parametrize('found', map(marked, TRIED))
def test_no_sample_is_lost_repeated_or_wrong(start, request, monkeypatch, found):
    if 'disk' in found.fault and 'full' in found.fault and not can_mount(): pytest.skip('may not mount a small disk')
    monkeypatch.setattr(worker, 'MP_STATUS_CHECK_INTERVAL', .5)   # when workers look for their parent, in place of 5 s
    row = run_case(found, start(found.kind, request.node.get_closest_marker('slow')))
    assert (row.lost,row.repeated,row.wrong)==(0,0,0), row
    assert CLEAR.match(row.seen), row.seen

def test_the_table_of_the_guide_has_every_case_and_zeros():
    found = json.loads(fault_table.RESULT.read_text())
    rows = found['rows']
    shown = {(row['fault'], row['during'], row['backend']) for row in rows}
    assert shown=={(case.fault, case.during, BACKENDS[case.kind].name) for case in CASES}
    assert all((row['lost'],row['repeated'],row['wrong'])==(0,0,0) for row in rows)
    assert all(why for _,_,why in not_tried())
    assert [(row['fault'], row['store'], row['why']) for row in found['not_tried']]==not_tried()
    assert len({str(case) for case in CASES})==len(CASES)
