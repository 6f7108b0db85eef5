"Name, version, requirements and extras come from settings.ini; description and URLs come from pyproject.toml"
import os, sys, sysconfig
from configparser import ConfigParser
from pathlib import Path
from setuptools import Extension, setup, find_packages

root = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf8')
settings = ini['DEFAULT']
library,suffix = settings['lib_path'],'_requirements'
if f'name = "{settings["lib_name"]}"' not in (root/'pyproject.toml').read_text(encoding='utf8'):
    raise SystemExit('pyproject.toml: [project] name differs from lib_name in settings.ini. Make them equal.')

# -ffp-contract=off keeps floating-point results equal to NumPy's. The last two flags allow vector instructions.
FLAGS = ['-O3','-ffp-contract=off','-fno-math-errno','-fno-trapping-math']

def c_module(
    name, # Name of the C file in `codec/c`, without its suffix
    **kwargs # Passed to `Extension`
): # An `Extension`
    """A C module of the package

    It is optional: without a compiler or the header of libjpeg-turbo it is left out, and NumPy and Pillow give the same
    results more slowly. Where `LIBJPEG` is set, a wheel for others is built, which must have it.
    """
    return Extension(f'{library}.codec._{name}', [f'{library}/codec/c/{name}.c'],
        depends=[f'{library}/codec/c/resample.h'], extra_compile_args=[] if os.name=='nt' else FLAGS,
        py_limited_api=True, optional='LIBJPEG' not in os.environ, **kwargs)

def libjpeg()->dict:
    """Arguments of the `Extension` that needs libjpeg-turbo: that of the system, or a static one for wheels

    The environment variable `LIBJPEG` is the path of a static library, such as `/usr/lib/libjpeg.a`. Its names stay
    hidden, so that they do not get in the way of the copy in Pillow. The header has to be beside it, in `../include`,
    or where the compiler looks."""
    if not (path := os.environ.get('LIBJPEG')): return dict(libraries=['jpeg'])
    headers = dict(include_dirs=[str(Path(path).parent.parent/'include')])
    if sys.platform=='darwin': return dict(headers, extra_link_args=[f'-Wl,-load_hidden,{path}'])
    return dict(headers, extra_objects=[path], extra_link_args=['-Wl,--exclude-libs,ALL'])

# One wheel for this version of Python and all later ones, as `py_limited_api` promises; free-threaded ones lack that
oldest = f"cp{settings['min_python'].replace('.', '')}"
wheel = {} if sysconfig.get_config_var('Py_GIL_DISABLED') else dict(py_limited_api=oldest)

setup(
    name=settings['lib_name'], version=settings['version'], python_requires=f">={settings['min_python']}",
    install_requires=settings['requirements'].split(),
    extras_require={k.removesuffix(suffix):v.split() for k,v in settings.items() if k.endswith(suffix)},
    ext_modules=[c_module('jpeg', **libjpeg()), c_module('pixels')],
    options=dict(bdist_wheel=wheel),
    packages=find_packages(include=[library, f'{library}.*']), package_data={library:['py.typed','*.pyi','view/page/*']},
    entry_points=dict(nbdev=[f'{library}={library}._modidx:d'], console_scripts=[settings['console_scripts']]),
)
