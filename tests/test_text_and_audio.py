"Texts, tokens, recordings and numbers: batches and losses of stock fastai, shown, trained, exported"
import struct, wave
from importlib.util import find_spec

import pytest
from fastai.text.all import *
from joblib import parallel_config

import fastai_remote.load.texts as texts_module
from conftest import fails
from fastai_remote import *
from fastai_remote.codec.base import Codec
from fastai_remote.codec.fields import get_codec, register_codec
from fastai_remote.codec.audio import audio_floats, read_audio
from fastai_remote.load.audio import pad_audio, TensorAudio
from fastai_remote.load.distributed import RemoteDistributedDL
from fastai_remote.load.texts import RemoteLMDL, StoreNumericalize, StoreTokenizer, text_lengths
from fastai_remote.order.base import Order
from fastai_remote.order.lengths import longest_of, LongestFirst, SortedWindows
from fastai_remote.order.permutation import Permutation
from fastai_remote.order.ranks import rank_share
from fastai_remote.order.shards import ShardPermutation
from in_memory import written
from inputs import wav_file

N,N_VALID = 64,16
N_TRAIN = N-N_VALID

def some_texts():
    rng = np.random.default_rng(0)
    words = [f'w{k}' for k in range(40)]
    def text(i): return ' '.join(rng.choice(words, rng.integers(1, 25)))+(' Good' if i%2 else ' bad  <br />!')
    return [text(i) for i in range(N)]

TEXTS,LABELS = some_texts(),[['neg','pos'][i%2] for i in range(N)]
SAMPLES = [dict(txt=text, cls=label) for text,label in zip(TEXTS, LABELS)]
SPLITS = {'train':None, 'valid':N_VALID}
QUIET = dict(num_workers=1, progress=False)
TOK = TextOptions(tok=BaseTokenizer(), seq_len=16)
LM = TextOptions(tok=BaseTokenizer(), seq_len=8, is_lm=True)

@pytest.fixture(scope='module')
def store():
    "The texts in memory, with the splits `train` and `valid`"
    return written(SAMPLES, splits=SPLITS)[0]

def stock_dls(store, **kwargs):
    "Stock fastai's loaders of the same texts, in the order of the store"
    table = pd.DataFrame(dict(text=[store[i]['txt'] for i in range(N)], label=[store[i]['cls'] for i in range(N)]))
    table['valid'] = np.arange(N)>=store.splits['valid'][0]
    return TextDataLoaders.from_df(table, text_col='text', label_col='label', valid_col='valid', num_workers=0, bs=8,
                                   tok_tfm=BaseTokenizer(), **kwargs)

def our_dls(store, text=TOK, **kwargs):
    return DataLoaders.from_store(store, text=text, **{'num_workers':0, 'bs':8, **kwargs})

def same(a, b):
    "Are two batches the same, with the same types?"
    return all(type(x)==type(y) and torch.equal(x, y) for x,y in zip(a, b, strict=True))

def same_epochs(a, b):
    a,b = list(a),list(b)
    return len(a)==len(b)>0 and all(map(same, a, b))

def sizes(dl):
    "How many tokens each text of an epoch has"
    return [int((row!=1).sum()) for x,_ in dl for row in x]

def quietly(learn, method, *args, **kwargs):
    with learn.no_bar(), learn.no_logging(): return getattr(learn, method)(*args, **kwargs)

def losses(learn, epochs=2):
    quietly(learn, 'fit', epochs, 1e-2)
    return [float(v) for row in learn.recorder.values for v in row]+[float(loss) for loss in learn.recorder.losses]

def trained_and_shown(learn):
    "`learn` after an epoch; its data and results are shown"
    losses(learn, 1)
    learn.dls.show_batch(max_n=3)
    quietly(learn, 'show_results', max_n=3)
    return learn

def assert_predicts_the_same(learn, *inputs):
    "The same for each of `inputs`, and once more after `learn` was exported and loaded; returns it"
    first,*others = (quietly(learn, 'predict', o)[2] for o in inputs)
    learn.export('a.pkl')
    others.append(quietly(load_learner(learn.path/'a.pkl'), 'predict', inputs[0])[2])
    for other in others: assert torch.equal(first, other)
    return first

def small(config): return {**config, 'emb_sz':8, 'n_hid':8, 'n_layers':1}

def classifier(dls, path):
    set_seed(1, True)
    return text_classifier_learner(dls, AWD_LSTM, config=small(awd_lstm_clas_config), pretrained=False, seq_len=16,
                                   path=path)

@pytest.fixture
def tables(monkeypatch):
    "The tables that are shown"
    shown = []
    def keep(table):
        shown.append(table)
        return ''
    monkeypatch.setattr(pd.DataFrame, 'to_html', keep)
    return shown

# Orders

@pytest.mark.parametrize('n', [1,2,5,130])
def test_orders_by_length_are_those_of_SortedDL(n, monkeypatch):
    lengths,bs = np.random.default_rng(n).integers(1, 60, n).astype(np.int32),2
    shuffled,batches = Permutation(n, 1),Permutation(max(0, -(-n//bs)-2), 2)
    dl = SortedDL([(torch.zeros(1),)]*n, res=lengths.tolist(), bs=bs)
    def permutation(o):   # NumPy's, which shuffles the samples and then the batches
        if isinstance(o, int): return shuffled[np.arange(n)]
        return np.array(o)[batches[np.arange(len(o))]]
    monkeypatch.setattr(np.random, 'permutation', permutation)
    ours = SortedWindows(shuffled, n, lengths, bs, 2, longest=longest_of(lengths, n))
    assert ours[np.arange(n)].tolist()==list(dl.shuffle_fn(None))
    assert LongestFirst(lengths, n)[np.arange(n)].tolist()==dl.get_idxs()

def test_with_shards_the_batches_of_a_worker_stay_with_it():
    n,bs,workers = 1003,4,3
    lengths = np.random.default_rng(0).integers(1, 60, n)
    got = SortedWindows(Order(n), n, lengths, bs, 5, lanes=workers, window=10)[np.arange(n)]
    for worker in range(workers):
        starts = range(worker*bs, n, workers*bs)
        mine = np.concatenate([np.arange(n)[start:start+bs] for start in starts])
        visited = np.concatenate([got[start:start+bs] for start in starts])
        assert sorted(visited)==sorted(mine) and list(visited)!=list(mine)
        for k in range(0, len(mine), 10*bs): assert sorted(visited[k:k+10*bs])==sorted(mine[k:k+10*bs])

def test_ranks_share_an_order_by_length():
    n,lengths = 203,np.random.default_rng(0).integers(1, 60, 203)
    order = Order(n, SortedWindows(ShardPermutation(np.array([40,60,50,53]), 1, 2, 4, 2), n, lengths, 4, 5, 2))
    shares = [rank_share(order, rank, 2, consecutive=True)[np.arange(102)] for rank in range(2)]
    assert np.mean([np.ptp(lengths[share[k:k+4]]) for share in shares for k in range(0, len(share), 4)])<15

# Classifiers of texts

@pytest.mark.parametrize('text', [TOK,LM], ids=['classifier','language_model'])
def test_workers_make_the_same_batches(store, text):
    dls = our_dls(store, text)
    dls.train.shuffle = False
    assert same_epochs(dls.train, dls.train.new(num_workers=2, prefetch=0))

def test_similar_lengths_share_a_batch_and_the_longest_comes_first(store):
    dls = our_dls(store)
    assert len(first(dls.train)[0][0])==max(len(o[0]) for o in dls.train_ds)
    padding = [sum(int((x==1).sum()) for x,_ in dl) for dl in (dls.train, dls.train.new(lengths=None))]
    assert padding[0]<padding[1]/2
    with fails(TypeError, 'function of the dataset'): dls.train.new(lengths=[1])

@pytest.mark.slow
@pytest.mark.parametrize('put', ['shards'], indirect=True)
def test_a_classifier_is_trained_as_in_stock_fastai_shown_and_exported(put, tables, tmp_path):
    store,_ = put(SAMPLES, splits=SPLITS, shuffle=False, chunk=12)   # in several shards
    stock,ours = stock_dls(store, seq_len=16),our_dls(store)
    assert ours.vocab[0]==stock.vocab[0] and list(ours.vocab[1])==list(stock.vocab[1])
    assert same_epochs(ours.valid, stock.valid)
    order = list(ours.train.get_idxs())
    assert sorted(order)==list(range(N_TRAIN)) and order!=list(ours.train.get_idxs())
    found = []
    for dls in stock,ours:
        dls.train.get_idxs = lambda: order
        learn = classifier(dls, tmp_path)
        found.append(losses(learn))
    assert found[0]==found[1]
    trained_and_shown(learn)
    assert [list(table.columns) for table in tables]==[['text','category'], ['text','category','category_']]
    assert tables[0].text[0].startswith('xxbos ') and len(tables[0])==3
    assert_predicts_the_same(learn, TEXTS[5], 5, {'txt':TEXTS[5]})
    want = torch.stack([quietly(learn, 'predict', TEXTS[k])[2] for k in range(9)])
    other,_ = written(SAMPLES)
    for items in TEXTS[:9],get_remote_items(other)[:9],[dict(txt=text) for text in TEXTS[:9]]:
        torch.testing.assert_close(quietly(learn, 'get_preds', dl=dls.test_dl(items))[0], want)

def test_options_are_those_of_TextBlock(store):
    kwargs = dict(tok=BaseTokenizer(), rules=[str.lower], backwards=True)
    counts = dict(min_freq=1, max_vocab=24)
    table = pd.DataFrame(dict(text=TEXTS, label=LABELS))
    block = DataBlock((TextBlock.from_df('text', **kwargs, **counts), CategoryBlock), get_x=ColReader('text'),
                      get_y=ColReader('label'), splitter=IndexSplitter(range(N_TRAIN, N)))
    stock = block.dataloaders(table, bs=8, num_workers=0)
    for options in counts,dict(vocab=stock.vocab[0]):
        ours = our_dls(store, TextOptions(**kwargs, **options))
        assert ours.vocab[0]==stock.vocab[0] and same_epochs(ours.valid, stock.valid)

def test_a_DataBlock_with_getters_and_any_other_block(store):
    block = DataBlock((RedisBlock('txt', text=TOK), CategoryBlock(vocab=['neg','pos'])), get_items=get_remote_items,
                      get_x=lambda text: text.replace('w', 'v'), get_y=Fetch('cls'), splitter=StoreSplitter())
    dls = block.dataloaders(store, bs=8, num_workers=0)
    assert 'v3' in dls.vocab[0] and 'w3' not in dls.vocab[0]
    assert sizes(dls.valid)==sorted(sizes(dls.valid), reverse=True) and len(sizes(dls.valid))==N_VALID

def test_counts_of_many_workers_are_those_of_one(store, monkeypatch):
    one = our_dls(store)
    monkeypatch.setattr(texts_module, '_SERIAL', 0)
    monkeypatch.setattr(texts_module, '_BLOCK', 5)
    with parallel_config('threading', n_jobs=4): many = our_dls(store)
    assert many.vocab[0]==one.vocab[0] and same_epochs(many.valid, one.valid)

class Trained:
    "A tokenizer that is trained on all texts, as fastai's for sentencepiece is"
    def setup(self, items, rules=None): self.seen = len(items),sum(len(text) for text in items)
    def __call__(self, items): return (text.split() for text in items)

def test_a_tokenizer_that_is_trained_gets_all_texts(store):
    tok = Trained()
    our_dls(store, TextOptions(tok=tok))
    assert tok.seen==(N, sum(map(len, TEXTS)))

def test_a_splitter_may_use_a_part_of_the_samples():
    some,_ = written([dict(txt=f'a{i} b' if i%2 else 'zzz', cls='xy'[i%2]) for i in range(20)])
    dls = our_dls(some, TextOptions(tok=BaseTokenizer(), min_freq=1), splitter=lambda items: (range(5), range(5, 9)))
    assert sum(len(y) for _,y in dls.valid)==4

def test_a_tokenizer_that_is_used_again_counts_again(store):
    "Also for a part of the same texts, beside a pipeline that was set up before, and after items of no store"
    items,tok = get_remote_items(store),StoreTokenizer(BaseTokenizer())
    def pipeline(items, tok): return TfmdLists(items, [Fetch('txt', store), tok, StoreNumericalize(min_freq=1)])
    for some in (items, items, items[:10]):
        again,new = pipeline(some, tok),pipeline(some, StoreTokenizer(BaseTokenizer()))
        assert again.numericalize.vocab==new.numericalize.vocab and torch.equal(again[0], new[0])
        assert text_lengths(again)[np.arange(len(some))].tolist()==[len(o) for o in new]
        assert TfmdLists(['other words'], [tok, StoreNumericalize()]).tfms.fs[1].vocab is None

def test_lengths_are_those_of_the_field():
    "One transform in the pipelines of two fields of a store, or after different getters"
    store = MemoryStore({'a.txt':[b'a b', b'a b c d'], 'b.txt':[b'a', b'a b c']}, 'texts')
    transform = StoreTokenizer(BaseTokenizer(), rules=[], counts=False)
    def twice(text): return f'{text} {text}'
    tls = [TfmdLists(get_remote_items(store), [Fetch(field, store), *getters, transform])
           for field in store.fields for getters in ([], [twice])]
    for tl in tls*2: assert text_lengths(tl)[np.arange(2)].tolist()==[len(o) for o in tl]

@pytest.mark.parametrize('x,on_bad', [('txt','replace'), ('tokens.npy','skip')])
def test_damaged_texts_are_replaced_or_skipped(x, on_bad):
    "The length of a damaged text counts as 0, so that the order is known before the text is read"
    columns = {'txt':[f'some text {"more "*(i%7)}'.encode() for i in range(60)], 'cls':np.arange(60)%2}
    columns['tokens.npy'] = [get_codec('npy').to_bytes(np.arange(1+i%7, dtype=np.uint16)) for i in range(60)]
    store = MemoryStore(columns, 'texts', vocab={'cls':['a','b'], 'tokens.npy':list('abcdefg')})
    for number in 7,31: store.columns[x][number] = b'damaged'
    text = TextOptions(tok=BaseTokenizer(), vocab=['xxunk','xxpad','some','text'])
    dls = our_dls(store, text, x=x, on_bad=on_bad, valid_pct=0.2)
    with warnings.catch_warnings(action='ignore'):
        assert sum(len(y) for dl in dls for _,y in dl.new(drop_last=False))==(60 if on_bad=='replace' else 58)
    with pytest.raises(CorruptSample): [batch for dl in dls for batch in dl.new(drop_last=False, on_bad='raise')]

def test_a_damaged_text_is_an_error_with_advice_while_the_vocabulary_is_counted():
    store = MemoryStore({'txt':[b'some text']*60, 'cls':np.arange(60)%2}, 'texts', vocab={'cls':['a','b']})
    store.columns['txt'][7] = b'damaged'
    with fails(CorruptSample, match=r'sample 7.*') as e: our_dls(store, x='txt', on_bad='skip')
    assert 'on_bad= does not apply' in e.value.__notes__[0] and 'vocab=' in e.value.__notes__[0]
    with fails(CorruptSample): our_dls(store, TextOptions(tok=BaseTokenizer(), vocab=['some'], is_lm=True))

# Language models

@pytest.mark.slow
@pytest.mark.parametrize('put', ['redis'], indirect=True)
def test_a_language_model_is_trained_as_in_stock_fastai_and_writes_texts(put, tables, tmp_path):
    store,_ = put(SAMPLES, splits=SPLITS, shuffle=False, chunk=12)
    stock,ours = stock_dls(store, is_lm=True, seq_len=8),our_dls(store, LM)
    assert type(ours.train) is RemoteLMDL and ours.vocab==stock.vocab and len(ours.train)==len(stock.train)
    assert same_epochs(ours.valid, stock.valid)
    first = list(ours.train)
    order = ours.train._sequence.base[np.arange(N_TRAIN)].tolist()
    assert sorted(order)==list(range(N_TRAIN))!=order and not same(first[0], next(iter(ours.train)))
    stock.train.shuffle = False
    stock.train.items.idxs[:] = order
    stock.train.make_chunks()
    assert same_epochs(first, stock.train)
    found = []
    for dls in stock_dls(store, is_lm=True, seq_len=8),ours:
        dls.train.shuffle = False
        set_seed(1, True)
        learn = language_model_learner(dls, AWD_LSTM, config=small(awd_lstm_lm_config), pretrained=False, path=tmp_path)
        found.append(losses(learn, 1))
        set_seed(2, True)
        found[-1].append(learn.predict('w1 w2', 4, no_bar=True))
    assert found[0]==found[1] and len(found[0][-1].split())>=4
    dls.show_batch(max_n=2)
    quietly(learn, 'show_results', max_n=2)
    assert [list(table.columns) for table in tables]==[['text','target'], ['input','target','pred']]
    learn.export('lm.pkl')
    again = load_learner(tmp_path/'lm.pkl')
    set_seed(2, True)
    assert again.predict('w1 w2', 4, no_bar=True)==found[0][-1]

class RandomTokens:
    "A tokenizer that makes another number of tokens each time"
    def __call__(self, items): return (text.split()[:random.randint(1, 3)] for text in items)

def test_what_a_language_model_cannot_do_is_an_error(store):
    for kwargs,says in ((dict(y='cls'),"no target y='cls'"), (dict(on_bad='skip'),"on_bad='skip'"),
                        (dict(shuffle_fn=list),'shuffle_fn=.*an order of your own')):
        with fails(ValueError, says): our_dls(store, LM, **kwargs)
    random.seed(0)
    with fails(ValueError, 'tokens, and .* were counted'):
        list(our_dls(store, TextOptions(tok=RandomTokens(), is_lm=True, seq_len=4)).train)
    with fails(ValueError, r'memory: \d+ tokens are too few for a batch with bs=900 rows: give a smaller bs='):
        our_dls(store, LM, bs=900)
    dataset = our_dls(store, LM).train_ds
    for options in dict(bs=0),dict(bs=None),dict(seq_len=0):
        with fails(ValueError, 'bs and seq_len must be at least 1, not bs='): RemoteLMDL(dataset, **options)
    numbers = MemoryStore({'n.i4':np.arange(6)}, 'numbers')
    for tfms in [],[StoreTokenizer(BaseTokenizer()), StoreNumericalize()]:
        datasets = Datasets(get_remote_items(numbers), [[Fetch('n.i4', numbers), *tfms]])
        with fails(ValueError, 'numbers: no texts for a language model'): RemoteLMDL(datasets, bs=2, seq_len=4)

def test_options_of_texts_that_cannot_be_used(store):
    for seq_len in 0,2.5:
        with fails(ValueError, f'seq_len must be at least 1, not {seq_len}'): TextOptions(seq_len=seq_len)
    for use in (lambda: our_dls(store, True), lambda: RedisBlock('txt', text={'is_lm':True})):
        with fails(TypeError, r'text takes TextOptions\(…\), not '): use()

@pytest.mark.parametrize('world_size,bs', [(2,3), (2,2), (3,2), (4,3)])
def test_ranks_share_a_language_model_by_whole_batches(world_size, bs):
    "Otherwise one rank may have rows of the last batch, which is shorter, beside others: it fails, and the others wait"
    options = TextOptions(is_lm=True, tok=BaseTokenizer(), seq_len=3, min_freq=1)
    for n in 8,9,10:
        dls = our_dls(MemoryStore({'txt':[b'a b c d']*n}, 'lm'), options, bs=bs, device='cpu', valid_pct=0)
        train = dls.train.new(shuffle=False)
        batches = [x.tolist() for x,_ in train]
        ranks = [[x.tolist() for x,_ in RemoteDistributedDL(train, rank, world_size)] for rank in range(world_size)]
        each = -(-len(batches)//world_size)
        assert sum(ranks, [])==(batches*2)[:each*world_size] and {len(rank) for rank in ranks}=={each}

# Tokens

def test_stored_tokens_give_the_batches_of_texts(store, tmp_path, tables):
    "Also where some tokens are not in the vocabulary"
    some = dict(tok=BaseTokenizer(), max_vocab=24)
    tokenize_store(store, tmp_path/'tokens', text=TextOptions(**some), splits=None, **QUIET)
    tokenized = ShardStore(tmp_path/'tokens')
    assert tokenized[0]['tokens.npy'].dtype==np.uint16 and tokenized.fields[-2:]==['tokens.npy','tokens_length.i4']
    dls,texts = our_dls(tokenized, x='tokens.npy'),our_dls(store, TextOptions(**some))
    assert dls.vocab[0]==texts.vocab[0] and same_epochs(dls.valid, texts.valid)
    assert 0 in torch.cat([x.flatten() for x,_ in dls.valid])
    lm = our_dls(tokenized, TextOptions(is_lm=True, seq_len=8), x='tokens.npy')
    assert same_epochs(lm.valid, our_dls(store, TextOptions(**some, is_lm=True, seq_len=8)).valid)
    learn = trained_and_shown(classifier(dls, tmp_path))
    assert tables[0].text[0].startswith('xxbos ')
    numbers = tokenized[3]['tokens.npy']
    assert_predicts_the_same(learn, numbers, 3, numbers.tolist(), {'tokens.npy':numbers})

def test_tokens_become_a_new_field(server, monkeypatch):
    to_redis(SAMPLES, server.url, 'grown', **QUIET)
    store = tokenize_store(RedisStore(server.url, 'grown'), text=TOK, **QUIET)
    assert store.fields==['txt','cls','tokens.npy','tokens_length.i4']
    lengths = store.get_many(range(5), 'tokens_length.i4')['tokens_length.i4'].tolist()
    assert [len(store[i]['tokens.npy']) for i in range(5)]==lengths
    monkeypatch.setattr(texts_module, '_measured', None)   # the lengths are read, and no tokens are
    found = sizes(our_dls(store, x='tokens.npy').valid)
    assert found==sorted(found, reverse=True)

def test_rare_tokens_are_not_kept():
    "fastai's `Numericalize` would keep each token that is not in the vocabulary, so that memory grows with the texts"
    store = MemoryStore({'txt':[b'common rare%d' % i for i in range(50)], 'x.f4':np.zeros(50, 'f4')}, 'rare')
    dls = our_dls(store, y='x.f4', valid_pct=.5)
    o2i,n = dls.numericalize.o2i,len(dls.numericalize.o2i)
    batches = [*dls.train, *dls.valid]
    assert len(o2i)==n and 0 in batches[0][0] and type(batches[0][0]) is TensorText

def test_only_texts_are_tokenized():
    store = MemoryStore({'a.json':[b'{}'], 'x.f4':np.zeros(1, 'f4'), 'txt':[b'a']}, 'd')
    for field,codec in ('a.json','json'), ('x.f4','f4'):
        with fails(TypeError, f"d: field '{field}' holds {codec}, and no texts to tokenize"):
            tokenize_store(store, field=field, text=TOK)
    with fails(ValueError, 'd: no samples, so that there are no tokens to count'):
        tokenize_store(MemoryStore({'txt':[]}, 'd'), text=TOK)

def test_tokens_without_a_vocabulary_or_lengths(tables):
    rng = np.random.default_rng(0)
    samples = [{'tokens.npy':rng.integers(2, 30, rng.integers(1, 12)), 'cls':i%2} for i in range(30)]
    dls = our_dls(written(samples)[0], None, x='tokens.npy', bs=4)
    dls.show_batch(max_n=2)
    assert all(set(text)<=set('0123456789 ') for text in tables[0].text)
    assert sizes(dls.valid)==sorted(sizes(dls.valid), reverse=True)
    wrong,_ = written([{**o, 'tokens.npy':np.ones((2,2))} for o in samples])
    with fails(ValueError, 'whole numbers in an array of one dimension'):
        list(our_dls(wrong, None, x='tokens.npy', bs=4, lengths=None).train)

# Recordings

def tones(n=24):
    rng = np.random.default_rng(0)
    def tone(i): return 20000*np.sin(np.arange(rng.integers(300, 900))*(.05+.2*(i%2)))
    return [tone(i).astype(np.int16) for i in range(n)]

def wav_header(n_bytes, bits=16, channels=2, riff=None, kind=1, extension=b'', before=b''):
    "How a wav file begins whose values have `n_bytes`, as its header says; `before` are other chunks"
    width = (bits+7)//8*channels
    form = struct.pack('<HHIIHH', kind, channels, 8000, 8000*width, width, bits)+extension
    riff = 4+8+len(form)+len(before)+8+n_bytes if riff is None else riff
    chunks = b'fmt '+struct.pack('<I', len(form))+form+before+b'data'+struct.pack('<I', n_bytes)
    return b'RIFF'+struct.pack('<I', riff)+b'WAVE'+chunks

TONES = tones()
RECORDS = [{'wav':wav_file(tone), 'audio.npy':tone, 'cls':['low','high'][i%2]} for i,tone in enumerate(TONES)]

def audio_dls(store, x, **kwargs): return DataLoaders.from_store(store, x=x, **{'bs':2, 'num_workers':0, **kwargs})

def test_what_is_no_recording_is_refused():
    for content in b'',b'RIFF',b'RIFF\0\0\0\0WAV':   # no package is needed to tell
        with fails(ValueError, f'a damaged recording of {len(content)} bytes'): read_audio(content)
    for dtype in 'i8','u2','u4','u8','?','c8':   # an array of Python's integers has 64 bits: it would become silence
        with fails(ValueError, f'floats, or whole numbers of 8 bits or signed ones of 16 or 32, not {np.dtype(dtype)}'):
            audio_floats(np.array([1,0], dtype))
    for n in 0,-2,2.5:
        with fails(ValueError, f'CropAudio takes a number of values of at least 1, not {n}'): CropAudio(n)

def test_a_wav_file_of_unknown_length_is_read_to_its_end():
    "A program that writes it into a pipe cannot go back to write the length"
    values = np.arange(-6, 6, dtype='<i2')
    unknown = 0xFFFFFFFF   # as ffmpeg writes it; others write zeros, or only one of the two lengths
    for n_bytes,riff in (unknown,unknown),(0,0),(0,None),(0,unknown),(unknown,0):
        header = wav_header(n_bytes, riff=riff, before=b'LIST'+struct.pack('<I', 3)+b'abc\0')
        found,rate = read_audio(header+values.tobytes())
        assert rate==8000 and np.array_equal(found, values.reshape(-1, 2).T/np.float32(1<<15))
        assert read_audio(header)[0].shape==(2,0)
        with fails(ValueError, 'the wav file ends within a value: it has 23 bytes of them'):
            read_audio(header+values.tobytes()[:-1])
    after = b'LIST'+struct.pack('<I', 4)+b'abcd'   # no values, whatever follows
    assert read_audio(wav_header(0, riff=36+len(after))+after)[0].shape==(2,0)

def extension(bits, kind):
    "What the header of an extensible wav file ends with; `kind` is the first byte of the name of its format"
    return struct.pack('<HHI', 22, bits, 3)+bytes([kind])+bytes.fromhex('00000000001000800000aa00389b71')

@pytest.mark.parametrize('bits', [8,16,24,32])
def test_wav_files_with_whole_numbers_need_no_package(bits):
    "As soundfile reads them, and extensible ones as well; a value has at least 8 bits, and zeros after these"
    values = np.array([[0,127,-128,5],[1,2,3,-4]])
    content = b''.join(bytes(bits//8-1)+bytes([v+128 if bits==8 else v%256]) for v in values.T.ravel().tolist())
    with wave.open(plain:=io.BytesIO(), 'wb') as w:
        w.setparams((2, bits//8, 8000, 0, 'NONE', ''))
        w.writeframes(content)
    for file in plain.getvalue(),wav_header(len(content), bits, kind=0xFFFE, extension=extension(bits, 1))+content:
        found,rate = read_audio(file)
        assert rate==8000 and found.dtype==np.float32 and np.array_equal(found, values.astype(np.float32)/128)

def test_other_wav_files_need_a_package():
    floats = wav_header(8, 32, kind=3),wav_header(8, 32, kind=0xFFFE, extension=extension(32, 3))
    for header in () if find_spec('soundfile') or find_spec('torchaudio') else floats:
        with fails(ImportError, 'needs a decoder: install soundfile'): read_audio(header+bytes(8))
    with pytest.raises((ImportError,ValueError), match='needs a decoder: install soundfile|soundfile: '):
        read_audio(wav_header(32, 64, channels=1)+bytes(32))

def test_damaged_headers_of_wav_files_are_named():
    good = wav_header(8)+bytes(8)
    for content,why in ((good[:40],'it has no values'), (good[:12]+good[36:],'description of its format is missing'),
                        (wav_header(8, channels=0)+bytes(8),'0 channels of 16 bits'),
                        (wav_header(8, bits=0)+bytes(8),'2 channels of 0 bits')):
        with fails(ValueError, f'a damaged wav file.*{why}'): read_audio(content)
    with fails(ValueError, 'promises 2 values, and 1 are there'): read_audio(good[:-1])

@pytest.mark.parametrize('put,field', [('redis','wav'), ('shards','audio.npy')], indirect=['put'])
def test_recordings_have_the_batches_of_plain_torch(put, field):
    audio,_ = put(RECORDS, shuffle=False, chunk=7)
    dls = audio_dls(audio, field, y='cls', bs=8, seed=1)
    numbers = list(dls.train_ds.items)
    dls.train.get_idxs = lambda: list(range(len(numbers)))
    for k,(x,y) in enumerate(dls.train):
        batch = numbers[8*k:8*k+8]
        tones = [torch.from_numpy(TONES[i].astype(np.float32)/32768) for i in batch]
        want = torch.nn.utils.rnn.pad_sequence(tones, batch_first=True)[:,None]
        assert torch.equal(x.as_subclass(torch.Tensor), want)
        assert [dls.vocab[int(o)] for o in y]==[RECORDS[i]['cls'] for i in batch]

@pytest.mark.slow
@pytest.mark.parametrize('field', ['wav','audio.npy'])
def test_recordings_are_trained_shown_predicted_and_exported(field, tmp_path):
    dls = audio_dls(written(RECORDS)[0], field, y='cls', bs=8, item_tfms=CropAudio(256))
    net = nn.Sequential(nn.Conv1d(1, 4, 9, 4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    learn = Learner(dls, net, path=tmp_path)
    losses(learn, 1)
    dls.show_batch(max_n=8, nrows=2)
    axes = [ax for ax in plt.gcf().axes if ax.lines]
    assert [len(ax.lines[0].get_ydata()) for ax in axes]==[256]*8 and {ax.get_title() for ax in axes}=={'low','high'}
    assert axes[0].get_xlabel()==('seconds' if field=='wav' else 'values')
    quietly(learn, 'show_results', max_n=4)
    assert all(len(ax.get_title().split('\n'))==2 for ax in plt.gcf().axes[:4])
    (file:=tmp_path/'a.wav').write_bytes(RECORDS[3]['wav'])
    tone = TONES[3]
    assert_predicts_the_same(learn, tone, 3, {field:tone}, torch.from_numpy(tone), file, str(file), file.read_bytes())

def test_crops_are_random_in_training_only():
    dls = audio_dls(written(RECORDS)[0], 'wav', bs=4, item_tfms=CropAudio(100))
    assert same_epochs(dls.valid, dls.valid) and dls.one_batch()[0].shape==(4,1,100)
    long = TensorAudio(torch.arange(1000.)[None])
    starts = {int(CropAudio(10)(long, split_idx=0)[0,0]) for _ in range(20)}
    assert len(starts)>10 and int(CropAudio(10)(long, split_idx=1)[0,0])==495

def test_recordings_that_cannot_be_read_are_named():
    store,_ = written([dict(wav=wav_file(TONES[0])[:-2], flac=b'fLaC....', cls='a')]*8)
    with fails(CorruptSample, r"memory: sample \d+, field 'wav'.*promises"): audio_dls(store, 'wav').one_batch()
    if not (find_spec('soundfile') or find_spec('torchaudio')):
        with fails(ImportError, 'pip install soundfile'): audio_dls(store, 'flac').one_batch()
    one,slow,stereo = (TensorAudio(torch.zeros(n, 5)) for n in (1,1,2))
    slow.rate = 8000
    for other,what in (slow,'values per second'), (stereo,'channels'):
        with fails(ValueError, f'different {what}'): pad_audio([(one,), (other,)])

class ReversedAudio(Codec):
    "A codec of its own for recordings: their values as bytes, from back to front"
    def pack(self, o): return np.asarray(o, np.int16)[::-1].tobytes()
    def unpack(self, b): return np.frombuffer(b, np.int16)[::-1]

def test_a_codec_of_its_own_decodes_recordings():
    register_codec(ReversedAudio('flac'))
    dls = audio_dls(written([dict(flac=tone, cls='a') for tone in TONES[:8]])[0], 'flac')
    x,want = dls.train_ds[0][0],TONES[dls.train_ds.items[0]]/np.float32(32768)
    assert torch.equal(x.as_subclass(torch.Tensor)[0], torch.from_numpy(want))

# Numbers

class Sum(Module):
    def __init__(self, n_in, n_out): self.linear = nn.Linear(n_in, n_out)
    def forward(self, *x): return self.linear(torch.cat([o.reshape(len(o), -1) for o in x], 1))

def test_numbers_are_shown_fitted_and_predicted(tables, tmp_path):
    "Several of them, and arrays of them; those that are inputs are tested with blocks"
    table,_ = written([{'a.f4':float(i), 'b.f4':i*.5, 'v.npy':np.arange(3.)+i} for i in range(40)])
    x,y = ['a.f4','b.f4'],'v.npy'
    dls = DataLoaders.from_store(table, x=x, y=y, bs=4, num_workers=0)
    learn = trained_and_shown(Learner(dls, Sum(2, 3), path=tmp_path))
    assert [list(table.columns) for table in tables]==[[*x, y], [*x, y, f'predicted {y}']]
    assert len(tables[0])==3
    for field in *x,y: assert np.ravel(tables[0].iloc[0][field]).tolist()[-1]>=0
    assert len(assert_predicts_the_same(learn, 3, table[3]))==3
