"The machine and the versions that a benchmark ran with, for its result file"
import os, platform
from importlib.metadata import version
from pathlib import Path

from PIL import features

from fastai_remote.store.redis_link import RedisLink

def cpu_name():
    "Name of the processor"
    lines = Path('/proc/cpuinfo').read_text().splitlines()
    return next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), platform.processor())

def about(
    url, # URL of the Redis server; None if the benchmark uses none
    packages, # Names of packages, separated by spaces
): # `{'machine': …, 'versions': …}`
    "Describe the machine and the versions, for a result file"
    memory = os.sysconf('SC_PAGE_SIZE')*os.sysconf('SC_PHYS_PAGES')
    machine = dict(cpu=cpu_name(), cores=os.cpu_count(), memory_gb=round(memory/1e9, 1), platform=platform.platform())
    versions = {'python':platform.python_version(), **{name:version(name) for name in packages.split()},
                'libjpeg_turbo':features.version('libjpeg_turbo')}
    if url:
        info = RedisLink(url).call(lambda client: client.info('server'))
        server = 'valkey' if 'valkey_version' in info else 'redis'
        versions['server'] = f"{server} {info.get('valkey_version') or info['redis_version']}"
    return dict(machine=machine, versions=versions)
