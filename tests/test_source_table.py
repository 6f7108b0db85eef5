"Every row of the table of sources in the guide: all samples arrive, with their names, files and splits, in constant memory"
import json

import pytest
pytest.importorskip('datasets'); pytest.importorskip('torchvision')

import source_table
from source_table import KINDS, LARGE, SMALL, check, growth, run

def is_right(row): return (row.lost,row.wrong,row.names,row.splits)==(0,0,'yes','yes') and row.files in ('yes','-')

@pytest.mark.parametrize('place', ['redis','shards'])
@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_all_samples_arrive_with_what_belongs_to_them(kind, place, request, tmp_path):
    server = request.getfixturevalue('server') if place=='redis' else None
    row = check(kind, server, tmp_path)
    assert is_right(row) and row.written==60, row

@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_memory_is_constant(kind, tmp_path):
    row = run(kind, None, tmp_path)
    if not row.is_flat:   # the allocator may grow for the first 3,000 samples, but not for as many again after them
        row.small,row.large = row.large,growth(kind, None, tmp_path/'more', 2*LARGE-SMALL)
    assert row.is_flat, row

def test_the_table_of_the_guide_has_every_row():
    rows = json.loads(source_table.RESULT.read_text())['rows']
    assert {(row['source'],row['store']) for row in rows}=={(kind.name,store) for kind in KINDS for store in ('Redis','shards')}
    for row in rows:
        flat = row.pop('flat')
        assert is_right(source_table.Row(**row)) and flat=='yes', row
