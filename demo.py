"""Writes images to Redis, trains a model from there, and prints the numbers that matter. Draws demo.png.

python demo.py                                          scikit-learn's handwritten digits
python demo.py --data FOLDER                            your images, one subfolder per class
python demo.py --data FOLDER --labels FILE.csv          any folder, and a CSV file with lines of file,label
python demo.py --data FOLDER --labels '^(.+)_[0-9]+'    any folder, and a pattern; its group in the file's name is the
                                                        label; a pattern with a slash is looked for in the whole path
"""
import argparse, csv, math, os, re, redis, sys, time, warnings
warnings.filterwarnings('ignore', category=FutureWarning)
os.environ['MPLBACKEND'] = 'agg'
from PIL import ImageOps
from fastai.vision.all import *
from fastai_remote import *
from fastai_remote.cli import command
from fastai_remote.core import size_str

# Labels and data

def subfolder_label(folder):
    "A function from a file to the name of its subfolder of `folder`; None for a file that is in `folder` itself"
    return lambda file: file.parent.name if file.parent!=folder else None

def csv_label(folder, csv_file):
    "A function from a file to its label in `csv_file`, which contains paths, names or stems; None if it is not there"
    with open(csv_file, newline='', encoding='utf-8-sig') as lines:
        table = {row[0].strip():row[1].strip() for row in csv.reader(lines) if len(row)>1}
    def label(file):
        keys = (str(file.relative_to(folder)), file.name, file.stem)
        return next((table[key] for key in keys if key in table), None)
    return label

def pattern_label(pattern):
    "A function from a file to what the one group of `pattern` matches, as `--label` of the command line; else None"
    try: is_valid = re.compile(pattern).groups==1
    except re.error: is_valid = False
    if not is_valid:
        raise ValueError(f'--labels {pattern!r} is neither a file nor a pattern with one group, such as ^(.+)_')
    find = partial(command.pattern_label, pattern)
    def label(file):
        try: return find(file)
        except ValueError: return None
    return label

def label_of(
    folder, # Folder of images
    labels=None, # A CSV file or a pattern; default: the subfolder of an image is its label
): # A function from a file to its label, which raises `ValueError` for a file without one
    "How the image files of `folder` are labelled"
    if labels is None: find,reason = subfolder_label(folder),'not in a subfolder'
    elif Path(labels).is_file() or labels.endswith('.csv'):
        find,reason = csv_label(folder, labels),f'no line in {labels}'
    else: find,reason = pattern_label(labels),f'{labels!r} does not match its name'
    def label(file):
        found = find(file)
        if found is None: raise ValueError(f'no label: {reason}')
        return found
    return label

def digits():
    "scikit-learn's 1,797 digits, as a list of `(pixels, label)`"
    try: from sklearn.datasets import load_digits
    except ImportError: sys.exit('demo: the digits need scikit-learn: pip install scikit-learn, or pass --data FOLDER')
    images,labels = load_digits(return_X_y=True)
    return [((image*15).reshape(8, 8).astype(np.uint8), str(label)) for image,label in zip(images, labels)]

def as_png(digit): return {'png':Image.fromarray(digit[0]), 'cls':digit[1]}

# Model and measurements

def simple_cnn(
    c_in, # Number of input channels
    n_out, # Number of classes
    size # Width and height of an image, in pixels
):
    "Convolutions that halve the image until a few pixels are left, then the mean over these, then the classes"
    n_convs = max(3, int(math.log2(size))-2)
    channels = [c_in]+[min(32*2**i, 256) for i in range(n_convs)]
    convs = [ConvLayer(a, b, stride=1 if size<32 and i==0 else 2) for i,(a,b) in enumerate(zip(channels, channels[1:]))]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Dropout(.1), nn.Linear(channels[-1], n_out))

def private_bytes():
    "`{pid: bytes}` of the memory that each child process shares with no other process. Works on Linux only."
    found = {}
    for folder in Path('/proc').glob('[0-9]*'):
        try:
            parent = int((folder/'stat').read_text().rpartition(')')[2].split()[1])
            if parent!=os.getpid(): continue
            private = [line for line in (folder/'smaps_rollup').read_text().splitlines() if line.startswith('Private_')]
            found[folder.name] = 1024*sum(int(line.split()[1]) for line in private)
        except OSError: pass   # the process has ended
    return found

class Watch(Callback):
    "Measures the time of training, prints the metrics, and records the workers' memory during the last epoch"
    order = 60   # after the Recorder

    def before_fit(self):
        self.n_samples,self.seconds,self.memory = 0,0.,{}
        self.other_processes = private_bytes()

    def before_train(self): self.started = time.perf_counter()

    def after_batch(self):
        if not self.training or self.epoch!=self.n_epoch-1: return
        for pid,nbytes in private_bytes().items():
            if nbytes and pid not in self.other_processes: self.memory.setdefault(pid, []).append(nbytes)

    def after_train(self):
        self.seconds += time.perf_counter()-self.started
        self.n_samples += len(self.dl)*self.dl.bs   # exact, because the loader drops a last batch that is not full

    def after_epoch(self):
        message = 'epoch {}: training loss {:.3f}, validation loss {:.3f}, accuracy {:.1%}'
        print(message.format(self.epoch+1, *self.recorder.values[-1]), flush=True)

    @property
    def speed(self): return self.n_samples/self.seconds
    @property
    def growth(self): return [(sizes[0]/1e6, sizes[-1]/1e6) for sizes in self.memory.values()]   # MB, start and end

def key_bytes(
    client, # A client of redis-py
    manifest # Of the dataset
): # `{field: bytes}`
    "The server's MEMORY USAGE of one sample, per field: the mean of the first 200 samples"
    n = min(manifest.n, 200)
    found = {}
    for field,entry in manifest.fields.items():
        if entry['dtype'] is None:
            found[field] = sum(client.memory_usage(f'{manifest.prefix}:{field}:{i}') for i in range(n))/n
        else: found[field] = client.memory_usage(f'{manifest.prefix}:{field}#0')/manifest.n
    return found

# The picture

def short(text, n=14): return text if len(text)<=n else text[:n-1]+'…'

def grid_shape(n):
    "Rows and columns of a grid without holes, of at most nine of `n` images"
    return next(shape for shape in ((3,3), (2,3), (2,2), (1,3), (1,2), (1,1)) if math.prod(shape)<=n)

def grid(figure, images, titles, colors):
    "Draw at most nine images with titles"
    axes = figure.subplots(*grid_shape(len(images)), squeeze=False).ravel()
    for ax in axes: ax.axis('off')
    for ax,image,title,color in zip(axes, images, titles, colors):
        ax.imshow(image, cmap='gray', vmin=0, vmax=1 if np.asarray(image).dtype.kind=='f' else 255)
        ax.set_title(title, fontsize=12 if len(title)<18 else 10, color=color, pad=4)

def confusion(figure, predicted, targets, vocab):
    "Draw the confusion matrix: correct predictions are blue, wrong ones red"
    ax,names = figure.subplots(),[short(name) for name in vocab]
    counts,diagonal = np.zeros((len(vocab),)*2, int),np.eye(len(vocab), dtype=bool)
    np.add.at(counts, (targets.numpy(), predicted.numpy()), 1)
    share = counts/counts.sum(1, keepdims=True).clip(1)
    for cmap,hidden in (('Reds',(counts==0)|diagonal), ('Blues',~diagonal)):
        ax.imshow(np.ma.array(share, mask=hidden), cmap=cmap, vmin=-.2, vmax=1.1)
    for (i,j),count in np.ndenumerate(counts):
        color = 'white' if share[i,j]>.5 else 'black'
        if count: ax.text(j, i, count, ha='center', va='center', fontsize=14, color=color)
    rotation = 30 if len(vocab)>4 and max(map(len, names))>3 else 0
    ax.set_xticks(range(len(vocab)), names, fontsize=12, rotation=rotation)
    ax.set_yticks(range(len(vocab)), names, fontsize=12)
    ax.set(xlabel='predicted', ylabel='true')

def curves(figure, values):
    "Draw the losses of each epoch"
    ax,epochs = figure.subplots(),range(1, len(values)+1)
    for k,name in enumerate(('training loss','validation loss')):
        ax.plot(epochs, [row[k] for row in values], 'o-', lw=2, label=name)
    ax.legend(fontsize=13, frameon=False)
    ax.set(xlabel='epoch', xticks=range(1, len(values)+1, max(1, len(values)//10)))

TITLE = '{}, trained from Redis: {:.1%} accuracy' # Of the picture

def titles(
    n_hardest:int, # Images of the validation set in the picture
    has_few_classes:bool # Is there a confusion matrix?
)->list:
    "The titles of the three parts of the picture"
    return ['A batch from Redis', f'Validation set: the {math.prod(grid_shape(n_hardest))} hardest images',
            'Validation set: labels and predictions' if has_few_classes else 'Losses of each epoch']

def square(image): return ImageOps.fit(image, (min(image.size),)*2)

def draw(
    learn, # A trained `Learner`
    history, # Losses and accuracy of each epoch
    title, # Text above the picture
    footer, # Text below it
    file='demo.png' # Where to save it
):
    "Draw a batch, the hardest images of the validation set with their predictions, and the confusion matrix"
    vocab = list(learn.dls.vocab)
    batches = [learn.dls.train.decode(batch) for batch,_ in zip(learn.dls.train, range(9))]   # nine small ones suffice
    images,labels = [image for x,_ in batches for image in x][:9],[label for _,y in batches for label in y][:9]
    predictions,targets,losses = learn.get_preds(with_loss=True)
    predicted,hardest = predictions.argmax(1),losses.argsort(descending=True)[:9]
    is_right = (predicted[hardest]==targets[hardest]).tolist()
    pairs = [(short(vocab[p], 9), short(vocab[t], 9)) for p,t in zip(predicted[hardest], targets[hardest])]
    answers = [target if ok else f'{guess}, not {target}' for (guess,target),ok in zip(pairs, is_right)]
    has_few_classes = len(vocab)<=16
    plt.rc('axes', labelsize=13)
    figure = plt.figure(figsize=(18, 6.9), layout='constrained')
    left,middle,right = figure.subfigures(1, 3, width_ratios=(1, 1, 1.2), wspace=.03)
    grid(left, [image.permute(1,2,0).numpy() for image in images], [short(vocab[i]) for i in labels], ['black']*9)
    grid(middle, [square(learn.dls.valid_ds[i][0]) for i in hardest.tolist()], answers,
         ['#1a7f37' if ok else '#c62828' for ok in is_right])
    if has_few_classes: confusion(right, predicted, targets, vocab)
    else: curves(right, history)
    names = titles(len(hardest), has_few_classes)
    for part,text in zip((left, middle, right), names): part.suptitle(text, fontsize=15, weight='bold')
    figure.get_layout_engine().set(rect=(.005, .01, .99, .975))
    figure.suptitle(title, fontsize=20, weight='bold')
    figure.supxlabel(footer, fontsize=13, color='#444')
    figure.savefig(file, dpi=100, metadata={'Title':title, 'Description':'; '.join(names)})

# The demo

def choose_data(data, labels, size):
    "The source, the function that makes a sample, the options of `from_store`, and the size of an image in pixels"
    if data is None:
        options = dict(bs=64, img_cls=PILImageBW, item_tfms=Resize(size) if size else None)
        return digits(),as_png,options,size or 8
    source,size = image_samples(data, label=label_of(Path(data), labels)),size or 128
    if labels is None and all(path.parent==Path(data) for path in source.paths):
        raise ValueError(f'{data} contains {len(source)} images and no subfolders, so they have no labels. '
                         'Pass --labels with a CSV file of file,label or a pattern for file names.')
    options = dict(bs=max(2, min(32, len(source)//10)), item_tfms=RandomResizedCrop(size, min_scale=.5),
                   batch_tfms=Flip())
    return source,shrink(size*5//4),options,size

def write(server, source, fn):
    "Write the samples to Redis and print what they take there; returns the store and the server's bytes per sample"
    client = redis.Redis.from_url(server.url)
    print(f"{to_redis(source, server.url, 'demo', fn=fn, num_workers=2)}")
    store = RedisStore(server.url, 'demo')
    n,manifest = len(store),store.manifest
    if n<10 or len(store.vocab)<2:
        raise ValueError(f'{n} images of {len(store.vocab)} classes are too few. '
                         'The demo needs at least 10 images of 2 classes.')
    fields = key_bytes(client, manifest)
    bytes_per_sample = sum(fields.values())
    memory_usage = ', '.join(f'{k} {v:,.1f}' for k,v in fields.items())
    print(f'in Redis: {bytes_per_sample:,.0f} bytes per sample, with its keys ({memory_usage}); '
          f'{manifest.nbytes/n:,.0f} encoded')
    return store,bytes_per_sample

def train(store, n_channels, size, epochs, lr, **options):
    "Train a model from `store`; returns the learner and what was measured"
    dls = DataLoaders.from_store(store, normalize=True, num_workers=2, device='cpu', **options)
    print(f'{len(dls.train_ds):,} training images, {len(dls.valid_ds):,} validation images, '
          f'{len(dls.vocab)} classes, {size} pixels')
    model,watch = simple_cnn(n_channels, len(dls.vocab), size),Watch()
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=watch)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(epochs, lr)
    print(f'accuracy {learn.recorder.values[-1][2]:.1%} on {len(dls.valid_ds):,} validation images; '
          f'{watch.speed:,.0f} samples/s in training')
    if watch.growth:
        growth = ', '.join(f'{start:.1f} to {end:.1f} MB' for start,end in watch.growth)
        print(f'private memory of the workers during the last epoch: {growth}')
    learn.remove_cb(watch)
    return learn,watch

def main(data=None, labels=None, epochs=12, size=None):
    started = time.perf_counter()
    set_seed(0)
    # Two cores are left to the workers: threads that wait for a core spin, which makes them up to ten times slower.
    torch.set_num_threads(max(1, os.cpu_count()-2))
    source,fn,options,size = choose_data(data, labels, size)
    n_channels,lr,name = (1, 1e-2, 'Handwritten digits') if data is None else (3, 3e-3, Path(data).resolve().name)
    with redis_server() as server:
        store,bytes_per_sample = write(server, source, fn)
        learn,watch = train(store, n_channels, size, epochs, lr, **options)
        history = learn.recorder.values
        footer = (f'{len(store):,} samples, {size_str(bytes_per_sample)} each in Redis · '
                  f'{watch.speed:,.0f} samples/s in training')
        if watch.growth:
            footer += f' · a worker grew by {max(end-start for start,end in watch.growth):.1f} MB in an epoch'
        with learn.no_bar(), learn.no_logging():
            draw(learn, history, TITLE.format(name, history[-1][2]), footer)
    print(f'demo.png written; {time.perf_counter()-started:.0f} s in total')

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', help='folder of images; default: digits of scikit-learn')
    parser.add_argument('--labels', help='a CSV file or a pattern, if the subfolders are not the classes')
    parser.add_argument('--epochs', type=int, default=12, help='number of epochs; default: 12')
    parser.add_argument('--size', type=int, help='width and height in training, in pixels; default: 8 for the digits, '
                                                 '128 for images')
    try: main(**vars(parser.parse_args()))
    except (OSError,ValueError,IngestError,StoreError) as error: sys.exit(f'demo: {error}')
