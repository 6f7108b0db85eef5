"Every row of the table of faults in the guide: nothing is lost, repeated or wrong, and the user sees a clear message"
import json, re

import pytest
for name in 's3fs','moto','boto3': pytest.importorskip(name)

import fault_table
from fault_table import CASES, can_mount, not_tried, run_case

# What a user may see: the end of the case, or an error that says what happened
CLEAR = re.compile(r'The (epoch|ingest) continues|One writes the dataset|No process stays|Readers see nothing|'
                   r'(KeyboardInterrupt|TerminatedWorkerError|RuntimeError: DataLoader worker)|'
                   r'(Store(Unavailable|NotFound|Full|Busy|Error)|MissingSample|CorruptSample|ServerRestarted)\b')
QUICK = ['connection reset during a reply, epoch, Redis', 'connection reset during a reply, ingest, Redis Cluster',
         'CLIENT KILL, ten times, ingest, Sentinel']

def marked(case): return pytest.param(case, id=str(case), marks=() if str(case) in QUICK else pytest.mark.slow)

@pytest.mark.parametrize('found', map(marked, CASES))
def test_no_sample_is_lost_repeated_or_wrong(request, found):
    if 'disk' in found.fault and 'full' in found.fault and not can_mount(): pytest.skip('may not mount a small disk')
    row = run_case(found)
    assert (row.lost,row.repeated,row.wrong)==(0,0,0), row
    assert CLEAR.match(row.seen), row.seen

def test_the_table_of_the_guide_has_every_case_and_zeros():
    found = json.loads(fault_table.RESULT.read_text())
    rows = found['rows']
    shown = {(row['fault'], row['during'], row['backend']) for row in rows}
    def key(case): return case.fault,case.during,fault_table.BACKENDS[case.kind].name
    assert shown=={key(case) for case in CASES}
    assert all((row['lost'],row['repeated'],row['wrong'])==(0,0,0) for row in rows)
    assert all(why for _,_,why in not_tried())
    assert [(row['fault'], row['store'], row['why']) for row in found['not_tried']]==not_tried()
    assert len({str(case) for case in CASES})==len(CASES)
