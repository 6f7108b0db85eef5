"Every row of the table of sources in the guide: samples arrive with their names, files and splits, in constant memory"
import json

import pytest
pytest.importorskip('datasets')
pytest.importorskip('torchvision')

import source_table
from source_table import KINDS, check, growth

def is_right(row):
    return [row[k] for k in ('lost','wrong','names','splits')]==[0,0,'yes','yes'] and row['files'] in ('yes','-')

@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_all_samples_arrive_in_constant_memory(kind, server, tmp_path, monkeypatch):
    """With what belongs to them: every second kind in Redis, the others in shards. `make sources` writes each to both

    250 samples more are 11 MB of images. Libraries hold up to a thousand samples, and the allocator may grow with the
    first ones, but not with more after them."""
    row = check(kind, server if KINDS.index(kind)%2 else None, tmp_path/'check')
    assert is_right(row) and row['written']==60, row
    monkeypatch.setattr(source_table, 'PADDING', 40_000)
    monkeypatch.setattr(source_table, 'CHUNK', 20)
    for i in range(source_table.CONTENTS): source_table.content(i)   # once, and not in each process
    few = growth(kind, None, tmp_path/'few', 150, 400)
    if few[1]-few[0]<4: return
    many = growth(kind, None, tmp_path/'many', 1100, 1350)
    assert many[1]-many[0]<4, (few, many)

def test_the_table_of_the_guide_has_every_row():
    rows = json.loads(source_table.RESULT.read_text())['rows']
    stores = [(kind.name,store) for kind in KINDS for store in ('Redis','shards')]
    assert sorted((row['source'],row['store']) for row in rows)==sorted(stores)
    for row in rows: assert row['flat']=='yes' and is_right(row), row
