"What a result was measured on"
import os, platform
from importlib.metadata import version
from pathlib import Path

from PIL import features

from fastai_remote.store.redis_link import RedisLink

def about(
    url, # Of the Redis server; `None`: there is none
    packages, # Names of packages, separated by spaces
): # `{'machine': …, 'versions': …}`
    "Machine and versions, for a result file"
    info = url and RedisLink(url).call(lambda c: c.info('server'))
    cpu = next((l.split(':')[1].strip() for l in Path('/proc/cpuinfo').read_text().splitlines() if l.startswith('model name')), platform.processor())
    return dict(machine=dict(cpu=cpu, cores=os.cpu_count(), memory_gb=round(os.sysconf('SC_PAGE_SIZE')*os.sysconf('SC_PHYS_PAGES')/1e9, 1), platform=platform.platform()),
        versions={'python':platform.python_version(), **{k:version(k) for k in packages.split()}, 'libjpeg_turbo':features.version('libjpeg_turbo'),
                  **({'server':f"{'valkey' if 'valkey_version' in info else 'redis'} {info.get('valkey_version') or info['redis_version']}"} if info else {})})
