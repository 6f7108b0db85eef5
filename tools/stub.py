"""Write fastai_remote/__init__.pyi, from which editors and type checkers know the public names and their modules

The names are imported when they are first used, which static tools do not see."""
from pathlib import Path

import fastai_remote

STUB = Path(fastai_remote.__file__).with_suffix('.pyi')

def stub()->str:
    "The text of the stub"
    modules = {}
    for name,module in sorted(fastai_remote._module_of.items()): modules.setdefault(module, []).append(name)
    imports = [f'from .{module} import {name} as {name}' for module,names in sorted(modules.items()) for name in names]
    names = ''.join(f'\n    {name!r},' for name in fastai_remote.__all__)
    return '\n'.join([f'"""{fastai_remote.__doc__}"""', *imports, '', '__version__: str', f'__all__ = [{names}\n]', ''])

if __name__=='__main__': STUB.write_text(stub())
