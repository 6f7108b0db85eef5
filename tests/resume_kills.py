"""Random SIGKILLs, SIGTERMs and SIGINTs of trainings of three epochs, which go on with other numbers of workers

make resume                                   30 of them, from Redis and from shards
python tests/resume_kills.py --kills 100 --seed 7

Each signal comes from outside, at a random moment after a random batch. Every second pair of trainings keeps its states
on an S3 server, the others in files. When a training has ended, it is compared with the same one that nothing stopped:
batches, weights after each batch, optimiser, recorder, log of `CSVLogger` and predictions are the same bits. A line per
signal says how far the training was.
"""
import argparse, itertools, os, random, signal, sys, tempfile, time, warnings
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch

from fastai_remote import redis_server, to_redis, to_shards
from inputs import encoded
from resume_trainings import compare, read_lines, training
from s3servers import moto_server

N,EPOCHS,BATCHES = 200,3,20   # samples, 160 of them for training; batches of an epoch
OPTIONS = ['mixup jitter csv save', 'fine_tune train_metrics csv', 'accumulate balance csv', 'lr_find plateau flat csv']

def sample(i):
    pixels = np.random.default_rng(i).integers(0, 255, (20,24,3))
    return {'jpg':encoded(pixels, 'JPEG'), 'cls':f'c{i%4}', 'id':i}

def train_here(url, folder, options, workers, s3):
    "In a process of its own, and in a group of its own: train, and write to a file what is printed"
    os.setpgid(0, 0)
    out = os.open(folder/'output.txt', os.O_WRONLY|os.O_CREAT|os.O_APPEND)
    for number in 1,2: os.dup2(out, number)
    state = dict(place=f's3://{s3.bucket}/{folder.name}', storage_options=s3.options) if s3 else {}
    training(url, folder, options, workers, epochs=EPOCHS, **state)

def start(url, folder, options, workers, s3=None):
    "A new process that trains; its state is in a file, or on the server `s3`"
    process = get_context('fork').Process(target=train_here, args=(url, folder, options, workers, s3))
    process.start()
    return process

def ended(process):
    "The exit code of a process that has ended; its workers are killed, as they would end by themselves a little later"
    process.join()
    try: os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError: pass
    return process.exitcode

def n_lines(folder):
    file = folder/'lines.txt'
    return file.read_bytes().count(b'\n') if file.exists() else 0

def is_in_epoch(place):
    _,_,training,k = place
    return training and k+2<BATCHES

def stop_somewhere(rng, process, folder, number):
    """Send the signal `number` after a random number of batches; returns the place, `None` if the training ended before

    Most come in the middle of an epoch, the others anywhere."""
    wanted,in_epoch = n_lines(folder)+rng.randrange(1, BATCHES),rng.random()<.8
    while n_lines(folder)<wanted or in_epoch and not is_in_epoch(read_lines(folder/'lines.txt')[-1][0]):
        if not process.is_alive(): return
        time.sleep(.002)
    time.sleep(rng.random()*.02)   # somewhere in a batch
    os.kill(process.pid, number)
    return read_lines(folder/'lines.txt')[-1][0]

def stopped_training(rng, url, folder, options, kills, s3):
    "Train with `kills` signals, fewer if it ends before; returns how many came, and how many in the middle of an epoch"
    n,in_epoch = 0,0
    for _ in range(kills):
        number,workers = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]),rng.choice([0,1,2,3])
        process = start(url, folder, options, workers, s3)
        place = stop_somewhere(rng, process, folder, number)
        if place is None:
            assert ended(process)==0, (folder/'output.txt').read_text()[-3000:]
            break
        code = ended(process)
        fit,epoch,training,k = place
        n,in_epoch = n+1,in_epoch+(training and k+1<BATCHES)
        print(f'  {number.name} with {workers} workers: fit {fit+1}, epoch {epoch+1}, '
              f'{"batch" if training else "validation batch"} {k+1}; exit code {code}', flush=True)
        wanted = {signal.SIGKILL:-9, signal.SIGTERM:143, signal.SIGINT:1}[number]
        assert code==wanted, (folder/'output.txt').read_text()[-3000:]
    code = ended(start(url, folder, options, rng.choice([0,1,2,3]), s3))
    assert code==0, (folder/'output.txt').read_text()[-3000:]
    return n,in_epoch

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=30)
    parser.add_argument('--seed', type=int, default=random.randrange(1<<20))
    args = parser.parse_args()
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    rng,in_epoch,n = random.Random(args.seed),0,0   # signals in the middle of an epoch, and all signals
    print(f'seed {args.seed}')
    with tempfile.TemporaryDirectory() as tmp, redis_server() as server, moto_server() as s3_server:
        tmp = Path(tmp)
        to_redis(list(range(N)), server.url, 'd', sample, num_workers=1, progress=False)
        to_shards(list(range(N)), tmp/'shards', sample, chunk=20, maxcount=20, num_workers=1, progress=False)
        for run in itertools.count():
            if n==args.kills: break
            options,kills = OPTIONS[run%len(OPTIONS)],min(5, args.kills-n)
            url = server.url if run%2 else str(tmp/'shards')
            s3 = s3_server if run%4 in (1,2) else None
            print(f'{options}, from {"Redis" if run%2 else "shards"}, to {"S3" if s3 else "a file"}')
            a,b = tmp/f'a{run}',tmp/f'b{run}'
            for folder in a,b: folder.mkdir()
            assert ended(start(url, a, options, 1))==0, (a/'output.txt').read_text()[-3000:]
            came,inside = stopped_training(rng, url, b, options, kills, s3)
            n,in_epoch = n+came,in_epoch+inside
            compare(a, b)
    print(f'{n} signals, {in_epoch} of them in the middle of an epoch: all trainings are the same bits')

if __name__=='__main__': main()
