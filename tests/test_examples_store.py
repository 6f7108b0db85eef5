"What each module of `store` does, in short: examples that were tried first"
import pickle
from fastcore.test import expect_fail, test_eq
from fastai_remote.store.connection import Opener
from fastai_remote.store.storage import Storage

def connect(url, password): return [url, password]

def test_a_process_has_one_connection_with_the_same_arguments():
    opener = Opener(connect, 'localhost', url='redis://localhost', password='s3cret')
    test_eq(opener(), ['redis://localhost','s3cret'])
    assert opener() is pickle.loads(pickle.dumps(opener))() and 's3cret' not in repr(opener)

    def open_dataset(link, name): return link, name
    dataset = Opener(open_dataset, 'pets', link=opener, name='pets')
    changed = Opener(connect, 'localhost', url='redis://localhost', password='changed')
    other = Opener(open_dataset, 'pets', link=changed, name='pets')
    assert dataset()[0] is opener() and dataset() is dataset()
    test_eq(other(), (['redis://localhost','changed'], 'pets'))

def test_files_of_a_storage(tmp_path):
    "A file whose writing fails is not there"
    st = Storage(tmp_path/'pets')
    st.write('a.bin', bytes(range(10)))
    with st.create('sub/b.bin') as f: f.write(b'whole')
    test_eq(st.ranges(['a.bin','a.bin','a.bin','gone'], [0,4,8,0], [2,6,20,1]), [b'\0\1', b'\4\5', b'\x08\x09', None])
    with expect_fail(KeyError), st.create('sub/c.bin') as f:
        f.write(b'half')
        raise KeyError
    test_eq((st.names(), st.names('sub'), st.names('none')), (['a.bin','sub'], ['b.bin'], []))
    test_eq(st.read('sub/b.bin'), b'whole')
    st.remove(['a.bin','gone'])
    with expect_fail(FileNotFoundError): st.read('a.bin')
