"Name, version, requirements and extras come from settings.ini; description and urls from pyproject.toml's [project]"
import os
from configparser import ConfigParser
from pathlib import Path
from setuptools import Extension, setup, find_packages

root = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf8')
c = ini['DEFAULT']
lib,sfx = c['lib_path'],'_requirements'
if f'name = "{c["lib_name"]}"' not in (root/'pyproject.toml').read_text(encoding='utf8'):
    raise SystemExit('pyproject.toml: [project] name differs from lib_name in settings.ini')
def c_module(name, **kw):
    "Left out without a compiler, or libjpeg-turbo's header: NumPy and Pillow give the same, later"
    return Extension(f'{lib}.codec._{name}', [f'{lib}/codec/c/{name}.c'], depends=[f'{lib}/codec/c/resample.h'], extra_compile_args=[] if os.name=='nt' else ['-O3','-ffp-contract=off','-fno-math-errno','-fno-trapping-math'], py_limited_api=True, optional=True, **kw)

setup(
    name=c['lib_name'], version=c['version'], python_requires='>='+c['min_python'],
    install_requires=c['requirements'].split(),
    extras_require={k.removesuffix(sfx):v.split() for k,v in c.items() if k.endswith(sfx)},
    ext_modules=[c_module('jpeg', libraries=['jpeg']), c_module('pixels')],
    packages=find_packages(include=[lib, lib+'.*']), entry_points=dict(nbdev=[f'{lib}={lib}._modidx:d']),
)
