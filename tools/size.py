"""Print how large the package and its tests are, in lines of code and characters: `make size`

A line of code has code on it: blank lines, comments, docstrings and the generated `_modidx.py` do not count. Characters
are those of these lines without indentation."""
import ast, io, tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

def docstring_lines(tree):
    "The numbers of the lines of all docstrings of a syntax tree, as a set"
    lines = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module,ast.ClassDef,ast.FunctionDef,ast.AsyncFunctionDef)): continue
        if ast.get_docstring(node, clean=False) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno+1))
    return lines

def code_size(path):
    "How many lines of code a file has, and how many characters these have without indentation"
    source = path.read_text()
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE: lines.update(range(token.start[0], token.end[0]+1))
    lines -= docstring_lines(ast.parse(source))
    texts = [line.strip() for number,line in enumerate(source.splitlines(), 1) if number in lines]
    texts = [text for text in texts if text]
    return len(texts),sum(map(len, texts))

def main():
    groups = {}
    for path in sorted([*(ROOT/'fastai_remote').rglob('*.py'), *(ROOT/'tests').rglob('*.py')]):
        parts = path.relative_to(ROOT).parts
        if path.name=='_modidx.py': continue
        if parts[0]=='fastai_remote': group = parts[1].removesuffix('.py')
        else: group = 'benchmarks' if 'bench' in parts else 'tests'
        lines,characters = code_size(path)
        before = groups.get(group, (0,0))
        groups[group] = before[0]+lines,before[1]+characters
    package = [size for group,size in groups.items() if group not in ('tests','benchmarks')]
    groups['package'] = sum(size[0] for size in package),sum(size[1] for size in package)
    print(f"{'':12}{'lines':>8}{'characters':>12}")
    for group in sorted(groups, key=lambda group: (group in ('package','tests','benchmarks'), group)):
        lines,characters = groups[group]
        print(f'{group:12}{lines:8,}{characters:12,}')

if __name__=='__main__': main()
