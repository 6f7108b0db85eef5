"Name, version, requirements and extras come from settings.ini; description and urls from pyproject.toml's [project]"
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
setup(
    name=c['lib_name'], version=c['version'], python_requires='>='+c['min_python'],
    install_requires=c['requirements'].split(),
    extras_require={k.removesuffix(sfx):v.split() for k,v in c.items() if k.endswith(sfx)},
    ext_modules=[Extension(f'{lib}._jpeg', [f'{lib}/_jpeg.c'], libraries=['jpeg'], py_limited_api=True, optional=True)],   # without a compiler, or libjpeg-turbo's header, Pillow decodes
    packages=find_packages(include=[lib, lib+'.*']), entry_points=dict(nbdev=[f'{lib}={lib}._modidx:d']),
)
