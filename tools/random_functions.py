"""Print random functions of the package, to be read by somebody who does not know the project

python tools/random_functions.py          25 functions, drawn with seed 1
python tools/random_functions.py 2        25 others

A function is clear if one reading says what it does, and why. At least 23 of 25 should be."""
import ast, random, sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MIN_LINES = 4   # shorter ones say what they do by their name

def functions():
    "Yields `(where, source)` of each function and method of the package; `where` is its file and line"
    for file in sorted((ROOT/'fastai_remote').rglob('*.py')):
        if file.name=='_modidx.py': continue
        source = file.read_text(encoding='utf-8')
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, (ast.FunctionDef,ast.AsyncFunctionDef)): continue
            first = min([node.lineno, *(o.lineno for o in node.decorator_list)])
            if node.end_lineno-first+1<MIN_LINES: continue
            where = f'{file.relative_to(ROOT)}:{first}'
            yield where,'\n'.join(source.splitlines()[first-1:node.end_lineno])

def drawn(seed:int, n:int=25)->list:
    "`n` of the functions, `(where, source)`, drawn at random"
    return random.Random(seed).sample(sorted(functions()), n)

if __name__=='__main__':
    for where,source in drawn(int(sys.argv[1]) if len(sys.argv)>1 else 1): print(f'# {where}\n{source}\n')
