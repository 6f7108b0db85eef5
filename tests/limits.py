"Calls in forks of this process, whose memory and CPU time are limited and measured; what costs much, or is no file"
import json, os, re, resource, signal, stat, warnings, zlib
from pathlib import Path

def megabytes_of(key):
    "An entry of the status of this process"
    return int(re.search(rf'{key}:\s+(\d+)', Path('/proc/self/status').read_text())[1])/1000

def measured(calls, seconds=30):
    """Runs the functions `{name: f}` in a fork; returns `{name: (error, megabytes)}`, of their errors kind and message

    The fork is ended after `seconds` of CPU time in one of them, or if it waits for ever: that one is named."""
    read,write = os.pipe()
    if (pid:=os.fork())==0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            warnings.simplefilter('ignore')
            for f in calls.values():
                signal.alarm(100)
                resource.setrlimit(resource.RLIMIT_CPU, (int(sum(os.times()[:2]))+seconds,-1))
                Path('/proc/self/clear_refs').write_text('5')   # forget the peak of the memory
                before,error = megabytes_of('VmRSS'),None
                try: f()
                except BaseException as e: error = type(e).__name__,str(e)
                os.write(write, json.dumps([error, megabytes_of('VmHWM')-before]).encode()+b'\n')
        finally: os._exit(0)
    os.close(write)
    with open(read) as file: done = list(map(json.loads, file))
    os.waitpid(pid, 0)
    assert len(done)==len(calls), f'{list(calls)[len(done)]}: the process was ended'
    return {name:(error and tuple(error),used) for name,(error,used) in zip(calls, done)}

def errors_of(calls, megabytes, seconds=10):
    "The errors of the functions `{name: f}` that fail; none may take more memory than `megabytes`"
    done = measured(calls, seconds)
    assert not {name:used for name,(_,used) in done.items() if used>megabytes}
    return {name:error for name,(error,_) in done.items() if error}

def zeros(n):
    "A megabyte of zeros or more, compressed; all but the first and last one are copies of the second"
    packer = zlib.compressobj(9)
    sizes = 1<<20,1<<20,n%(1<<20)
    first,again,rest = (packer.compress(bytes(size))+packer.flush(zlib.Z_FULL_FLUSH) for size in sizes)
    return first+again*((n>>20)-1)+rest+b'\3\0'+(n%65521<<16|1).to_bytes(4, 'big')   # an empty block, and a checksum

STRANGE = {
    'pipe': os.mkfifo, 'endless': lambda p: p.symlink_to('/dev/zero'), 'circle': lambda p: p.symlink_to(p.name),
    'nowhere': lambda p: p.symlink_to('nothing'), 'folder': lambda p: p.mkdir(),
    'socket': lambda p: os.mknod(p, stat.S_IFSOCK|0o600)}
