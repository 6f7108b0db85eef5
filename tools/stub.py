"""Write the stubs that editors and type checkers read: `fastai_remote/__init__.pyi`, and one for each module with `@patch`

Names of the package are imported when they are first used, and methods are added to classes by `@patch`. Tools that do
not run the code see neither."""
import ast
from pathlib import Path

import fastai_remote
from docs import patched_class, positional_arguments

PACKAGE = Path(fastai_remote.__file__).parent
STUB = PACKAGE/'__init__.pyi'
_KEPT = 'property','classmethod','staticmethod','cached_property','contextmanager','dataclass'   # decorators

def stub()->str:
    "The text of the stub of the package"
    modules = {}
    for name,module in sorted(fastai_remote._module_of.items()): modules.setdefault(module, []).append(name)
    imports = [f'from .{module} import {name} as {name}' for module,names in sorted(modules.items()) for name in names]
    names = ''.join(f'\n    {name!r},' for name in fastai_remote.__all__)
    return '\n'.join([f'"""{fastai_remote.__doc__}"""', *imports, '', '__version__: str', f'__all__ = [{names}\n]', ''])

# --- Modules

def name_of(decorator)->str:
    "The name of a decorator, without its arguments and its module"
    while isinstance(decorator, ast.Call): decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else decorator.id

def signature(function):
    "Makes `function`, of a syntax tree, one without a body; an argument whose default is `None` may be `None`"
    arguments = function.args
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults)
    for arg,default in [*positional_arguments(arguments), *keyword_only]:
        is_none = isinstance(default, ast.Constant) and default.value is None
        if is_none and arg.annotation is not None:
            arg.annotation = ast.BinOp(arg.annotation, ast.BitOr(), ast.Constant(None))
    function.decorator_list = [d for d in function.decorator_list
                               if name_of(d) in _KEPT or isinstance(d, ast.Attribute) and d.attr=='setter']
    function.body = [ast.Expr(ast.Constant(...))]
    return function

def as_method(function):
    "Makes `function`, which has the decorator `patch`, a method"
    patch = next(d for d in function.decorator_list if name_of(d)=='patch')
    words = [word.arg for word in patch.keywords] if isinstance(patch, ast.Call) else []
    kind = {'as_prop':'property', 'cls_method':'classmethod', 'set_prop':'property'}
    function.decorator_list = [ast.Name(kind[word]) for word in words]+function.decorator_list
    function.args.args[0].annotation = None
    return function

def members(cls, methods)->list:
    "The statements of the stub of class `cls`; `methods` are those that `@patch` adds"
    functions = [o for o in cls.body if isinstance(o, (ast.FunctionDef,ast.AsyncFunctionDef))]+methods
    known = {o.name for o in functions}
    found = [o for o in cls.body if isinstance(o, ast.AnnAssign)]
    known.update(o.target.id for o in found)
    names = [n.id for o in cls.body if isinstance(o, ast.Assign) for n in ast.walk(o) if isinstance(n, ast.Name)
             and isinstance(n.ctx, ast.Store)]
    names += [n.attr for o in functions for n in ast.walk(o) if isinstance(n, ast.Attribute)
              and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name) and n.value.id=='self']
    attributes = [ast.parse(f'{name}: Any').body[0] for name in dict.fromkeys(names) if name not in known]
    return found+attributes+[signature(o) for o in functions] or [ast.Expr(ast.Constant(...))]

def module_stub(source:str)->str: # Empty if the module has no `@patch` on a class of its own
    "The stub of a module: its names, its functions without bodies, and its classes with all of their methods"
    tree = ast.parse(source)
    classes = {o.name:[] for o in tree.body if isinstance(o, ast.ClassDef)}
    owners = {o:patched_class(o) for o in tree.body if isinstance(o, ast.FunctionDef)}
    patches = [o for o,owner in owners.items() if owner]
    for o in patches:
        if owners[o] in classes: classes[owners[o]].append(as_method(o))
    if not any(classes.values()): return ''
    body = []
    for o in tree.body:
        if isinstance(o, (ast.Import,ast.ImportFrom)): body.append(o)
        elif isinstance(o, ast.ClassDef):
            o.body,o.decorator_list = members(o, classes[o.name]),[d for d in o.decorator_list if name_of(d) in _KEPT]
            body.append(o)
        elif isinstance(o, ast.FunctionDef) and o not in patches: body.append(signature(o))
        elif isinstance(o, (ast.Assign,ast.Try)):
            names = [n.id for n in ast.walk(o) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            body += [ast.parse(f'{name}: Any').body[0] for name in dict.fromkeys(names)]
    imports = [o for o in body if isinstance(o, (ast.Import,ast.ImportFrom))]
    used = {n.id for o in body if o not in imports for n in ast.walk(o) if isinstance(n, ast.Name)}
    for o in imports: o.names = [a for a in o.names if (a.asname or a.name).split('.')[0] in used-{'Any'}]
    body = [o for o in body if o not in imports or o.names]
    text = ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))
    return f'"""{ast.get_docstring(tree).splitlines()[0]}"""\nfrom typing import Any\n{text}\n'

def stubs()->dict:
    "`{file: text}` of all stubs"
    files = {file.with_suffix('.pyi'):module_stub(file.read_text(encoding='utf-8')) for file in PACKAGE.rglob('*.py')
             if not file.name.startswith('_')}
    return {STUB:stub()}|{file:text for file,text in files.items() if text}

if __name__=='__main__':
    written = stubs()
    for file,text in written.items(): file.write_text(text, encoding='utf-8')
    for file in set(PACKAGE.rglob('*.pyi'))-set(written): file.unlink()
