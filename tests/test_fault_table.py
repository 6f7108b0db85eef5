"""Faults of the table of the guide: nothing is lost, repeated or wrong, and the user sees a clear message

`make faults` runs every row. Here each fault meets an epoch, an ingest and each kind of store for which it is another
one, but not each store in both of them."""
import json, re
from contextlib import contextmanager, ExitStack

import pytest
from torch.utils.data._utils import worker
for name in 's3fs','moto','boto3': pytest.importorskip(name)

import fault_table
from fault_table import BACKENDS, can_mount, CASES, not_tried

# What a user may see: the end of the case, or an error that says what happened
CLEAR = re.compile(r'The (epoch|ingest) continues|One writes the dataset|No process stays|Readers see nothing|'
                   r'(KeyboardInterrupt|TerminatedWorkerError|RuntimeError: DataLoader worker)|'
                   r'(Store(Unavailable|NotFound|Full|Busy|Error)|MissingSample|CorruptSample|ServerRestarted)\b')
QUICK = ['reply truncated, epoch, Redis', 'connection reset during a reply, ingest, Redis Cluster',
         'CLIENT KILL, ten times, ingest, Sentinel']

# One loop asks again, whatever the network or a server says that will be well again
OF_LOOP = re.compile('connection|.*repl(y|ies)|CLIENT|server (loads|is a replica|cannot|runs|answers)|replica')
# What happens in our own processes does not depend on the servers
OF_PROCESSES = re.compile('Ctrl-C|a worker|the .* is killed|two ingests|clock')
FAULTS = {case.fault:[] for case in CASES}
for each in CASES: FAULTS[each.fault].append(each)

def pairs(case):
    "What this case tries, as others may: each fault in an epoch and an ingest, and on stores that differ in it"
    of_kind = case.kind,case.during
    if OF_LOOP.match(case.fault): return {of_kind, (case.fault, BACKENDS[case.kind].is_redis)}
    if OF_PROCESSES.match(case.fault): return {of_kind, (case.fault, case.during)}
    way = case.kind.replace('sentinel', 'server').replace('-home', '')   # these are asked by the same client
    return {of_kind, (case.fault, case.during), (case.fault, way)}

def chosen(cases):
    "Some of `cases`: all of `pairs` are there"
    found,seen = [],set()
    for n in 3,2,1:   # first those that bring the most new pairs
        for case in cases:
            if len(pairs(case)-seen)<n: continue
            found.append(case)
            seen |= pairs(case)
    return sorted(found, key=CASES.index)

def order(case):
    "Quick cases come first, and so are tried; then those of each fault, of which each fault begins with another one"
    same = FAULTS[case.fault]
    return str(case) not in QUICK, (same.index(case)-3*[*FAULTS].index(case.fault))%len(same)

TRIED = chosen(sorted(CASES, key=order))

def marked(case): return pytest.param(case, id=str(case), marks=() if str(case) in QUICK else pytest.mark.slow)

# Faults that leave the servers as they were: a fault of the network, say. Nodes of a cluster find each other again
PASSES = 'connection|reply|slow replies|server (runs|cannot save)|CLIENT|FLUSHDB|dataset is replaced|'+OF_PROCESSES.pattern
OF_NODES = PASSES+'|server (restarts|evicts|is full)'
RENEWED = {'cluster':OF_NODES, 'cluster-home':OF_NODES, 'sentinel':PASSES, 's3':''}

@pytest.fixture(scope='module')
def backend_of():
    "A backend for a case. Several servers take seconds to find each other: they stay for cases of the same kind"
    waiting = {}
    @contextmanager
    def use(case):
        with ExitStack() as stack:
            backend = stack.enter_context(waiting.pop(case.kind, None) or BACKENDS[case.kind]())
            yield backend
            if case.kind not in RENEWED or not re.match(RENEWED[case.kind], case.fault): return
            backend.renew()
            waiting[case.kind] = backend
            stack.pop_all()
    yield use
    for backend in waiting.values(): backend.__exit__()

@pytest.mark.parametrize('found', map(marked, TRIED))
def test_no_sample_is_lost_repeated_or_wrong(backend_of, monkeypatch, found):
    if 'disk' in found.fault and 'full' in found.fault and not can_mount(): pytest.skip('may not mount a small disk')
    monkeypatch.setattr(worker, 'MP_STATUS_CHECK_INTERVAL', .5)   # when workers look for their parent, in place of 5 s
    with backend_of(found) as backend: row = found.run(found.fault, backend)
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
