"""Is this checkout slower than another one? Both read the same data, in turns

Purpose: what `peers.py` measures of this package, in samples per CPU second, for this checkout and for another one,
         such as `git worktree add ../before COMMIT` makes. Each of them has processes of its own; in every round, each
         contender runs one epoch with both, the first of the two being another one each time. The benchmark's own code
         is that of this checkout.

Command: python tests/bench/before.py CHECKOUT [FOLDER] [--drawings FILE.ndjson] [--n 640] [--values 20000]
         [--rounds 15] [--only from_redis] [--kinds photographs,digits]
         The other checkout needs its C modules: `python setup.py build_ext --inplace`, or a copy of ours.

Prints the median of the ratios of the rounds, new over old, and the interval that contains the median of all possible
rounds in 95 of 100 cases (of the order statistics). Nothing is written: a result is about one change.
"""
import argparse, json, os, statistics, subprocess, sys
from pathlib import Path

from rounds import interval

HERE = Path(__file__).parent

def serve(options):
    "Run in a process of its own: names the contenders on its output, and measures an epoch of each that it reads"
    answers = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)   # what is printed here is no answer
    import fastai_remote, peers
    with peers.started(**options) as (processes,missing,_):
        if missing: raise ImportError(f'{missing}')
        print(json.dumps([str(Path(fastai_remote.__file__).parents[1]), list(processes)]), file=answers)
        for line in sys.stdin:
            print(json.dumps(processes[tuple(json.loads(line))].epoch()['samples_cpu_s']), file=answers)

class Checkout:
    "The contenders of the package in a folder, in a process of its own"
    def __init__(self, folder, options):
        path = os.pathsep.join([str(folder), os.environ.get('PYTHONPATH', '')])
        self.process = subprocess.Popen([sys.executable, '-W', 'ignore', __file__, '--serve', json.dumps(options)],
                                        env={**os.environ, 'PYTHONPATH':path}, text=True, bufsize=1,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        found,jobs = json.loads(self.process.stdout.readline())
        if Path(found)!=Path(folder).resolve(): raise ValueError(f'{folder}: fastai_remote comes from {found}')
        self.jobs = [tuple(job) for job in jobs]

    def epoch(self, job):
        "Samples per CPU second of an epoch of `job`, a kind of data and the name of a contender"
        self.process.stdin.write(json.dumps(job)+'\n')
        return json.loads(self.process.stdout.readline())

def run(checkout, rounds, options):
    "`{job: ratios}` of `rounds`: samples per CPU second of this checkout over those of another one"
    old,new = (Checkout(folder, options) for folder in (checkout, HERE.parents[1]))
    ratios = {job:[] for job in new.jobs if job in old.jobs}
    for k in range(rounds+1):   # the first epochs are not counted
        for job in ratios:
            speeds = {side:side.epoch(job) for side in ((old,new) if k%2 else (new,old))}
            if k: ratios[job].append(speeds[new]/speeds[old])
        print(f'round {k} of {rounds}', file=sys.stderr)
    return ratios

if __name__=='__main__':
    if sys.argv[1]=='--serve': sys.exit(serve(json.loads(sys.argv[2])))
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('checkout', type=Path, help='a folder with another version of the project')
    parser.add_argument('folder', nargs='?', help='photographs; default: make some')
    parser.add_argument('--drawings', help='Quick, Draw! drawings, .ndjson; default: make some')
    parser.add_argument('--n', type=int, default=640, help='number of photographs')
    parser.add_argument('--values', type=int, default=20_000, help='number of values of 2 KB')
    parser.add_argument('--rounds', type=int, default=15, help='timed epochs of each contender')
    parser.add_argument('--only', default='ours', help='parts of the names of contenders, separated by |')
    parser.add_argument('--kinds', default='photographs,drawings,digits,values', help='kinds of data')
    options = vars(parser.parse_args())
    measured = run(options.pop('checkout'), options.pop('rounds'), options)
    for (kind,name),ratios in measured.items():
        low,high = interval(ratios)
        print(f'{kind:12} {name:40} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), {len(ratios)} rounds')
