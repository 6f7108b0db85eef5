"""Images into Redis, a model out: what fastai_remote is for, on real input, with the figures that matter; leaves demo.png

python demo.py                                          scikit-learn's handwritten digits
python demo.py --data FOLDER                            your images, one sub-folder a class
python demo.py --data FOLDER --labels FILE.csv          any folder, and lines of file,label
python demo.py --data FOLDER --labels '^(.+)_[0-9]+'    any folder, and a pattern for file names, its one group the label
"""
import argparse, csv, math, os, re, redis, sys, time, warnings
warnings.filterwarnings('ignore', category=FutureWarning)
os.environ['MPLBACKEND'] = 'agg'
from PIL import ImageOps
from fastai.vision.all import *
from fastai_remote import *
from fastai_remote.core import size_str

def label_of(folder, labels=None):
    "What labels an image file of `folder`: its sub-folder; or as `labels` says, a CSV file or a pattern"
    if labels is None: pick,why = lambda p: p.parent.name if p.parent!=folder else None,'not in a sub-folder'
    elif Path(labels).is_file() or labels.endswith('.csv'):
        with open(labels, newline='', encoding='utf-8-sig') as o: table = {r[0].strip():r[1].strip() for r in csv.reader(o) if len(r)>1}
        pick,why = lambda p: next((table[k] for k in (str(p.relative_to(folder)), p.name, p.stem) if k in table), None),f'no line in {labels}'
    else:
        try: ok = (pat:=re.compile(labels)).groups==1
        except re.error: ok = False
        if not ok: raise ValueError(f'--labels {labels!r}: neither a file that is there nor a pattern with one group, as ^(.+)_ is')
        pick,why = lambda p: m[1] if (m:=pat.search(p.name)) else None,f'{labels!r} does not match its name'
    def label(p):
        if (y:=pick(p)) is None: raise ValueError(f'no label: {why}')
        return y
    return label

def digits():
    "Scikit-learn's 1797 digits, as `(pixels, label)`"
    try: from sklearn.datasets import load_digits
    except ImportError: sys.exit('demo: the digits come with scikit-learn: pip install scikit-learn, or give --data FOLDER')
    return [((o*15).reshape(8, 8).astype(np.uint8), str(y)) for o,y in zip(*load_digits(return_X_y=True))]
def as_png(o): return {'png':Image.fromarray(o[0]), 'cls':o[1]}

def net(c_in, n_out, size):
    "Convolutions that halve the picture down to a few pixels, then their mean, then the classes"
    ws = [c_in] + [min(32*2**i, 256) for i in range(max(3, int(math.log2(size))-2))]
    convs = [ConvLayer(a, b, stride=1 if size<32 and i==0 else 2) for i,(a,b) in enumerate(zip(ws, ws[1:]))]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Dropout(.1), nn.Linear(ws[-1], n_out))

def private_bytes():
    "`{pid: bytes that it shares with no other}` of the processes that this one has started, on Linux"
    res = {}
    for p in Path('/proc').glob('[0-9]*'):
        try:
            if int((p/'stat').read_text().rpartition(')')[2].split()[1])!=os.getpid(): continue
            res[p.name] = 1024*sum(int(l.split()[1]) for l in (p/'smaps_rollup').read_text().splitlines() if l.startswith('Private_'))
        except OSError: pass   # it has ended
    return res

class Watch(Callback):
    "Times training, says how it goes, and follows the memory of the loader's workers through the last epoch"
    order = 60   # after the Recorder
    def before_fit(self): self.n,self.secs,self.mem,self.others = 0,0.,{},private_bytes()
    def before_train(self): self.t = time.perf_counter()
    def after_batch(self):
        for p,m in private_bytes().items() if self.training and self.epoch==self.n_epoch-1 else ():
            if m and p not in self.others: self.mem.setdefault(p, []).append(m)
    def after_train(self): self.secs,self.n = self.secs+time.perf_counter()-self.t,self.n+len(self.dl)*self.dl.bs   # it drops a last batch that is not full
    def after_epoch(self): print('epoch {}: training loss {:.3f}, validation loss {:.3f}, accuracy {:.1%}'.format(self.epoch+1, *self.recorder.values[-1]), flush=True)

def short(s, n=14): return s if len(s)<=n else s[:n-1]+'…'
def grid(fig, ims, titles, colors):
    "Nine pictures with titles"
    for ax in (axs:=fig.subplots(3, 3).ravel()): ax.axis('off')
    for ax,im,t,c in zip(axs, ims, titles, colors):
        ax.imshow(im, cmap='gray', vmin=0, vmax=1 if np.asarray(im).dtype.kind=='f' else 255)
        ax.set_title(t, fontsize=12 if len(t)<18 else 10, color=c, pad=4)
def confusion(fig, guess, targs, vocab):
    "Which label was taken for which"
    ax,cm,names = fig.subplots(),np.zeros((len(vocab),)*2, int),[short(v) for v in vocab]
    np.add.at(cm, (targs.numpy(), guess.numpy()), 1)
    share = cm/cm.sum(1, keepdims=True).clip(1)
    for cmap,hide in (('Reds',(cm==0)|np.eye(len(vocab), dtype=bool)), ('Blues',~np.eye(len(vocab), dtype=bool))): ax.imshow(np.ma.array(share, mask=hide), cmap=cmap, vmin=-.2, vmax=1.1)
    for (i,j),v in np.ndenumerate(cm):
        if v: ax.text(j, i, v, ha='center', va='center', fontsize=14, color='white' if share[i,j]>.5 else 'black')
    ax.set_xticks(range(len(vocab)), names, fontsize=12, rotation=30 if len(vocab)>4 and max(map(len, names))>3 else 0)
    ax.set_yticks(range(len(vocab)), names, fontsize=12)
    ax.set(xlabel='predicted', ylabel='true')
def curves(fig, values):
    "Losses, epoch by epoch"
    ax = fig.subplots()
    for k,name in enumerate(('training loss','validation loss')): ax.plot(range(1, len(values)+1), [v[k] for v in values], 'o-', lw=2, label=name)
    ax.legend(fontsize=13, frameon=False)
    ax.set(xlabel='epoch', xticks=range(1, len(values)+1, max(1, len(values)//10)))
def key_bytes(c, m):
    "MEMORY USAGE of a sample's keys, a field: the mean of the first 200"
    k = min(m.n, 200)
    return {f:sum(c.memory_usage(f'{m.prefix}:{f}:{i}') for i in range(k))/k if d['dtype'] is None else c.memory_usage(f'{m.prefix}:{f}#0')/m.n for f,d in m.fields.items()}

def draw(learn, history, title, foot, file='demo.png'):
    "A batch, what it makes of held-out images, and where it goes wrong"
    vocab,(x,y),(preds,targs,losses) = list(learn.dls.vocab),learn.dls.train.decode(learn.dls.train.one_batch()),learn.get_preds(with_loss=True)
    guess,hard = preds.argmax(1),losses.argsort(descending=True)[:9]
    pairs = [(short(vocab[g], 9), short(vocab[t], 9), bool(g==t)) for g,t in zip(guess[hard], targs[hard])]
    plt.rc('axes', labelsize=13)
    fig = plt.figure(figsize=(18, 6.9), layout='constrained')
    a,b,c = fig.subfigures(1, 3, width_ratios=(1, 1, 1.2), wspace=.03)
    grid(a, [o.permute(1,2,0).numpy() for o in x[:9]], [short(vocab[i]) for i in y[:9]], ['black']*9)
    grid(b, [ImageOps.fit(im:=learn.dls.valid_ds[i][0], (min(im.size),)*2) for i in hard.tolist()], [t if ok else f'{g}, not {t}' for g,t,ok in pairs],
         ['#1a7f37' if ok else '#c62828' for *_,ok in pairs])
    confusion(c, guess, targs, vocab) if (few:=len(vocab)<=16) else curves(c, history)
    for f,t in ((a,'A batch from Redis'), (b,'Held out: the nine hardest'), (c,'Held out: truth and prediction' if few else 'Epoch by epoch')): f.suptitle(t, fontsize=15, weight='bold')
    fig.get_layout_engine().set(rect=(.005, .01, .99, .975))
    fig.suptitle(title, fontsize=20, weight='bold')
    fig.supxlabel(foot, fontsize=13, color='#444')
    fig.savefig(file, dpi=100)

def main(data=None, labels=None, epochs=12, size=None):
    t0 = time.perf_counter()
    set_seed(0)
    torch.set_num_threads(max(1, os.cpu_count()-2))   # two are the workers': threads that wait for a core spin, up to ten times slower
    if data is None: src,fn,kw = digits(),as_png,dict(bs=64, img_cls=PILImageBW, item_tfms=Resize(size) if size else None)
    else:
        src,size = image_samples(data, label=label_of(Path(data), labels)),size or 128
        if labels is None and all(p.parent==Path(data) for p in src.paths):
            raise ValueError(f'{data}: {len(src)} images and no sub-folders, so no labels: give --labels, a CSV file of file,label or a pattern for file names')
        fn,kw = shrink(size*5//4),dict(bs=max(2, min(32, len(src)//10)), item_tfms=RandomResizedCrop(size, min_scale=.5), batch_tfms=Flip())
    with redis_server() as s:
        before = (c:=redis.Redis.from_url(s.url)).info('memory')['used_memory']
        print(f"{to_redis(src, s.url, 'demo', fn=fn, num_workers=2)}")
        n,m = len(store:=RedisStore(s.url, 'demo')),store.manifest
        each = (c.info('memory')['used_memory']-before)/n
        if n<10 or len(store.vocab)<2: raise ValueError(f"{data}: images {n}, classes {len(store.vocab)}: want 10 of 2 at least")
        print(f"in Redis: {each:,.0f} bytes a sample, everything counted; {m.nbytes/n:,.0f} encoded; MEMORY USAGE: {', '.join(f'{k} {v:,.1f}' for k,v in key_bytes(c, m).items())}")
        dls = DataLoaders.from_store(store, normalize=True, num_workers=2, device='cpu', **kw)
        print(f'{len(dls.train_ds):,} to train on, {len(dls.valid_ds):,} held out, {len(dls.vocab)} classes, {size or 8} pixels')
        learn = Learner(dls, net(1 if data is None else 3, len(dls.vocab), size or 8), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=(w:=Watch()))
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(epochs, 1e-2 if data is None else 3e-3)
            history,speed,grown = learn.recorder.values,w.n/w.secs,[(v[0]/1e6, v[-1]/1e6) for v in w.mem.values()]
            print(f'accuracy {history[-1][2]:.1%} on the {len(dls.valid_ds):,} held out; {speed:,.0f} samples/s in training')
            if grown: print('private memory of the workers over the last epoch:', ', '.join(f'{a:.1f} to {b:.1f} MB' for a,b in grown))
            learn.remove_cb(w)
            foot = f'{n:,} samples, {size_str(each)} each in Redis · {speed:,.0f} samples/s in training'
            if grown: foot += f' · a worker grew by {max(b-a for a,b in grown):.1f} MB in an epoch'
            draw(learn, history, f"{'Handwritten digits' if data is None else Path(data).resolve().name}, trained from Redis: {history[-1][2]:.1%} right", foot)
    print(f'demo.png written; {time.perf_counter()-t0:.0f} s in all')

if __name__=='__main__':
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for k,t,d,h in (('data', str, None, 'folder of images'), ('labels', str, None, 'where sub-folders are not classes: a CSV file or a pattern'),
                    ('epochs', int, 12, '12'), ('size', int, None, 'pixels to train at; 8 for the digits, 128 for images')): ap.add_argument(f'--{k}', type=t, default=d, help=h)
    try: main(**vars(ap.parse_args()))
    except (OSError,ValueError,IngestError,StoreError) as e: sys.exit(f'demo: {e}')
