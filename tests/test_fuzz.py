"Damaged and hostile bytes give documented errors, and a changed value is noticed: `make fuzz` tries more"
import pytest

import fuzz

FILES = sorted(fuzz.FOLDER.iterdir(), key=lambda f: f.name)

@pytest.mark.parametrize('path', FILES, ids=lambda f: f.name)
def test_changed_bytes_give_documented_errors(path):
    wrong = fuzz.fuzz(path, seed=0, tries=12 if path.name.startswith('shards-') else 40)
    assert not wrong, wrong

def test_the_corpus_is_small_and_has_every_codec():
    from fastai_remote.codec.fields import _codecs
    assert sum(f.stat().st_size for f in FILES)<300_000
    there = {f.suffix[1:] for f in FILES}
    assert {name for name,codec in _codecs.items() if codec.dtype is None}-{'jpeg'}<=there
    assert {'fastai_remote','manifest','record','packed'}<=there

def test_errors_are_found():
    "A reader that fails, ends the process, or takes too much memory is reported with what is needed to repeat it"
    path = FILES[0]
    def reads(f):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(fuzz, 'reader', lambda path: lambda b, original, r: b==original or f())
            return fuzz.fuzz(path, seed=7, tries=2)
    assert f'{path.name}, seed 7, 1: ' in reads(lambda: {}['x']) and 'KeyError' in reads(lambda: {}['x'])
    assert 'MemoryError' in reads(lambda: bytes(4<<30))
    assert 'RecursionError' in reads(lambda: (f := lambda: f())())
    assert 'the process ended with -9' in reads(lambda: fuzz.os.kill(fuzz.os.getpid(), fuzz.signal.SIGKILL))
