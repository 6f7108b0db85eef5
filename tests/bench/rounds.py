"What the measures of several rounds amount to"
import statistics
from math import comb

def spread(values):
    "Median, minimum and maximum of `values`, rounded"
    def rounded(value): return round(value, 3) if value<100 else round(value, 1)
    return dict(median=rounded(statistics.median(values)), min=rounded(min(values)), max=rounded(max(values)))

def interval(ratios):
    """The interval of the median, from the order statistics of `ratios`: it contains that of all rounds in 95% of cases

    With fewer than 6 rounds, it is from the smallest to the largest, and contains it less often."""
    n,ratios = len(ratios),sorted(ratios)
    below = [sum(comb(n, i) for i in range(k+1))/2**n for k in range(n)]   # that at most k of n lie below the median
    k = max((k for k in range(n//2) if below[k]<=.025), default=0)
    return ratios[k],ratios[n-1-k]

def compare(a, b, unit):
    """`median`, and the `low` and `high` end of its interval, of the ratios of rounds `a` to rounds `b`

    Both are lists of dicts, or of `None` for a round that failed. All three are 0 if both were never in one round."""
    ratios = [x[unit]/y[unit] for x,y in zip(a, b) if x and y] or [0.]
    low,high = interval(ratios)
    return {key:round(value, 3) for key,value in dict(median=statistics.median(ratios), low=low, high=high).items()}
