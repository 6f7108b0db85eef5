"""How well an order shuffles

Docs: page `order/quality`"""
from dataclasses import dataclass

import numpy as np

from .permutation import Permutation

# --- What a partial shuffle costs

# A full shuffle draws each batch from the whole dataset; `ShardPermutation` draws it from `interleave` shards. Whether
# this matters depends on the data. It makes no difference if the shards were shuffled when they were written, and a
# large one if they are sorted by class. So it is measured: on some batches of an epoch, next to the same number of
# batches of a full shuffle.

def _times(ratio, word):
    "`ratio` in words, with `word` 'often' or 'much': 'as often as' near 1.0, else '4.4 times as often as'"
    if .8<ratio<1.25: return f'as {word} as'
    digits = 2 if ratio<1 else 1 if ratio<10 else 0
    return f'{ratio:,.{digits}f} times as {word} as'

@dataclass(eq=False, repr=False)
class ShuffleQuality:
    """How the batches of an order compare with those of a full shuffle

    Ratios (`near`, `labels`, `again`) are 1.0 if the order is as good as a full shuffle, and larger if it is worse.
    What was not measured is `None`."""
    bs:int                  # Samples per batch
    near:float              # Ratio: how often two samples of a batch were stored within 100 places of each other
    near_pct:float          # The share of such pairs, in %
    labels:float=None       # Ratio: variance of the class counts from batch to batch
    again:float=None        # Ratio: how often two samples of a batch are in the same batch in the next epoch
    again_pct:float=None    # The share of such pairs, in %
    span:float=None         # Mean number of shards that a batch is drawn from
    span_full:float=None    # The same for a full shuffle
    dots:tuple=()           # For the left plot: the first numbers of this order, and of a full shuffle
    # For the right plot, of this order and of a full shuffle: per batch, the samples of its most frequent class; or the
    # distances between consecutive samples, if there are no labels
    bars:tuple=()

    def __repr__(self):
        res = []
        if self.span is not None:
            res.append(f'A batch of {self.bs} draws from {self.span:.1f} shards '
                       f'(a full shuffle: {self.span_full:.1f}).')
        res.append(f'Of pairs in a batch {self.near_pct:.2g}% were stored within 100 places of each other, '
                   f'{_times(self.near, "often")} in a full shuffle.')
        if self.labels is not None:
            res.append(f'Class counts vary from batch to batch {_times(self.labels, "much")} in a full shuffle.')
        if self.again is not None:
            res.append(f'Of pairs in a batch {self.again_pct:.2g}% meet again in the next epoch, '
                       f'{_times(self.again, "often")} in a full shuffle.')
        if (self.near if self.labels is None else self.labels)>2:
            res.append('A larger `interleave` improves this; so does writing the dataset again with `to_shards`, '
                       'which shuffles it.')
        return '\n'.join(res)

    def plot(self, figsize=(9,3)): # A matplotlib `Figure`
        """Plot this order (blue) and a full shuffle (grey)

        Left: the numbers of the first samples of an epoch. Right: a histogram of how many samples of its most frequent
        class a batch has or, without labels, of the distances between consecutive samples of a batch."""
        from matplotlib.figure import Figure
        figure = Figure(figsize, dpi=72, layout='constrained')
        left,right = figure.subplots(1, 2)
        for numbers,color,zorder in zip(self.dots, ('C0','.75'), (2,1)):
            left.plot(numbers, '.', ms=2.5, color=color, zorder=zorder, aa=False)
        left.set(xlabel='position in the epoch', ylabel='number of the sample, as stored')
        left.yaxis.set_major_formatter('{x:,.0f}')
        self._histogram(right)
        return figure

    def _histogram(self, axes):
        "Draw the right plot, of `bars`, with labels and a legend into `axes` of matplotlib"
        values = np.concatenate(self.bars)
        if self.labels is not None:
            bins = np.arange(values.min(), values.max()+2)-.5
            text = dict(xlabel=f'samples of the most frequent class in a batch of {self.bs}', ylabel='% of batches')
        else:
            bins = np.geomspace(1, values.max(initial=2), 40)   # batches of one sample have no pairs
            text = dict(xlabel='distance of two samples in a batch, as stored', ylabel='% of pairs', xscale='log')
        looks = (dict(histtype='step', color='C0', lw=2, label='this order'), dict(color='.75', label='a full shuffle'))
        for bars,look in zip(self.bars, looks):
            axes.hist(bars, bins, weights=np.full(len(bars), 100/max(len(bars), 1)), **look)
        axes.set(**text)
        axes.legend(frameon=False)

    def _repr_png_(self):
        "The plot as `bytes` of a PNG, for Jupyter"
        from io import BytesIO
        from PIL import Image
        plot,png = BytesIO(),BytesIO()
        self.plot().savefig(plot, format='png')
        Image.open(plot).convert('RGB').quantize(8).save(png, 'PNG', optimize=True)   # a quarter of the bytes
        return png.getvalue()

def _batches(order, bs, k, rng):
    "The numbers in `k` random full batches of `order`, or in all if there are fewer: int array, shape (batches, bs)"
    whole = len(order)//bs
    positions = rng.choice(whole, min(whole, k), replace=False)[:,None]*bs+np.arange(bs)
    return np.asarray(order[positions.ravel()]).reshape(positions.shape)

def _near_pairs(rows, distance):
    "How many pairs of numbers in the same row differ by at most `distance`; `rows` is 2-d, each row sorted"
    offsets = range(1, min(rows.shape[1], distance+1))
    return sum(int((rows[:,k:]-rows[:,:-k]<=distance).sum()) for k in offsets)

def _pairs_in_both(a, b):
    "How many pairs of numbers are in the same row of `a` and in the same row of `b`, 2-d arrays without repeats"
    _,i,j = np.intersect1d(a, b, return_indices=True)
    counts = np.unique(i//a.shape[1]*len(b)+j//b.shape[1], return_counts=True)[1]
    return int((counts*(counts-1)//2).sum())

def _ratio(a, b): return float(a/b) if b else 1.

def shuffle_quality(
    # What to measure: a `ShardPermutation` or an `Order`; or a function of a seed that returns one, then `again` is
    # measured too. Numbers that come often, as those of a `WeightedOrder`, make the ratios wrong
    order,
    n:int, # Number of samples of the dataset
    bs:int=64, # Samples per batch
    labels=None, # Function of an array of sample numbers that returns their label codes, an int array
    starts:np.ndarray=None, # Number of the first sample of each shard, then `n`
    batches:int=200, # Number of batches to measure
    seed:int=0, # Chooses these batches; a function `order` is called with it and with `seed+1`
)->ShuffleQuality:
    """Compare batches of `order` with those of a full shuffle of `range(n)`

    Raises `ValueError` for an empty order and for `bs` below 1."""
    rng = np.random.default_rng(seed)
    epoch = order(seed) if callable(order) else order
    full_shuffle = Permutation(n, seed)
    if bs<1: raise ValueError(f'{bs=} must be at least 1')
    bs = min(bs, len(epoch), n)
    if not bs: raise ValueError('the order is empty: there is nothing to measure')
    own = _batches(epoch, bs, batches, rng)
    full = _batches(full_shuffle, bs, batches, rng)
    pairs,all_pairs = bs*(bs-1)//2,n*(n-1)//2 or 1   # of samples in a batch, in the dataset
    distance = min(100, n-1)
    near = _near_pairs(np.sort(own, 1), distance)/max(len(own)*pairs, 1)
    first = np.arange(min(len(epoch), 1500))
    res = ShuffleQuality(bs, _ratio(near, distance*(2*n-distance-1)/2/all_pairs), 100*near,
        dots=tuple(np.asarray(o[first]) for o in (epoch, full_shuffle)),
        bars=tuple(np.abs(np.diff(o, axis=1)).ravel() for o in (own, full)))
    if starts is not None:
        shards = (np.searchsorted(starts, o, 'right') for o in (own, full))
        res.span,res.span_full = (np.mean([len(np.unique(batch)) for batch in o]) for o in shards)
    if labels is not None: _measure_labels(res, own, full, labels, n)
    if callable(order):
        more = max(batches, (1<<20)//bs)   # in a full shuffle, pairs seldom meet again
        a,b = (_batches(o, bs, more, rng) for o in (epoch, order(seed+1)))
        epoch_batches = len(epoch)//bs
        again = _pairs_in_both(a, b)/max(len(a)*pairs, 1)*epoch_batches/len(b)
        res.again,res.again_pct = _ratio(again, epoch_batches*pairs/all_pairs),100*again
    return res

def _measure_labels(res, own, full, labels, n):
    """Set `labels` and `bars` of `res`, from batches of the order, `own`, and of a full shuffle, `full`

    Both are sample numbers, shape (batches, bs); the function `labels` returns their label codes."""
    codes = np.concatenate([np.asarray(labels(o.ravel())) for o in (own, full)])
    codes = np.unique(codes, return_inverse=True)[1].ravel()
    classes = codes.max()+1
    own_counts,full_counts = (np.array([np.bincount(batch, minlength=classes) for batch in o.reshape(-1, res.bs)])
        for o in np.split(codes, [own.size]))
    share = full_counts.sum(0)/full_counts.sum()   # of each class
    variance = ((own_counts-res.bs*share)**2).sum(1).mean()
    expected = res.bs*(1-(share*share).sum())*(n-res.bs)/max(n-1, 1)   # hypergeometric
    res.labels,res.bars = _ratio(variance, expected),(own_counts.max(1),full_counts.max(1))
