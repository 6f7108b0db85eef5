"""Does a test notice when the code is wrong? Make small changes of the package, and run the tests: `make mutants`

    python tests/mutants.py [--seed 0] [--mutants 40] [--limit 3600] [--jobs 2] [--list]

Each mutant is a copy of the project in which one place of `store`, `write`, `ingest`, `codec`, `order` or `load` was
changed by one of the operators below; places are drawn with `--seed`, and each operator gets about the same number.
First all quick tests run once, and coverage.py notes which of them runs which line. Then, of `--jobs` mutants at a time,
quick tests run that run the changed line. The mutants that these do not notice are made together in one copy, in which
`make test` and then the other tests run to their end: each test that fails there is tried with each of the mutants
alone, and mutants that none of them notices survive. A mutant that takes longer than `--limit` seconds counts as
noticed: the change makes the code hang. The result file `tests/bench/results/mutants-SEED.json` is written after each
mutant; a run that was stopped continues there. Delete the file to begin anew.

Operators:
- comparison: `<` becomes `>=`, `==` becomes `!=`, `is` becomes `is not`, `in` becomes `not in`, and the other way round
- checksum: a comparison of checksums or digests finds no difference
- range: the end of a `range`, an `arange` or a slice is one more
- lock: a lock is not taken, or not checked
- retry: what is tried several times is tried once
- none: a function that returns something returns `None` at once"""
import argparse, ast, json, os, random, re, shutil, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parents[1]
PACKAGES = 'store','write','ingest','codec','order','load'
OPPOSITE = {ast.Lt:'>=', ast.GtE:'<', ast.Gt:'<=', ast.LtE:'>', ast.Eq:'!=', ast.NotEq:'==', ast.Is:'is not',
    ast.IsNot:'is', ast.In:'not in', ast.NotIn:'in'}
CHECKSUM = re.compile(r'crc|checksum|digest|sha\d|adler')
LOCK = re.compile(r'lock|exclusive|publishing')

@dataclass
class Mutant:
    "A change of the text of a module"
    module:str # Path below `fastai_remote`
    function:str # Qualified name of the function that is changed
    operator:str
    line:int # Number of the changed line, from 1
    old:str # Text that is replaced
    new:str
    start:int # Where `old` begins in the text of the module
    result:str = '' # What noticed it, or 'survived'

def positions(text):
    "A function from line and column of a syntax tree (columns count bytes) to the index in `text`"
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines: starts.append(starts[-1]+len(line))
    return lambda line, column: starts[line-1]+len(lines[line-1].encode()[:column].decode())

class Finder(ast.NodeVisitor):
    "Collects all mutants of one module as `found`"
    def __init__(self, module, text):
        self.module,self.text,self.at = module,text,positions(text)
        self.scope,self.found = [],[]
        self.visit(ast.parse(text))

    def span(self, node):
        return self.at(node.lineno, node.col_offset),self.at(node.end_lineno, node.end_col_offset)

    def source(self, node): return self.text[slice(*self.span(node))]

    def add(self, operator, node, new):
        start,end = self.span(node)
        old = self.text[start:end]
        mutant = Mutant(self.module, '.'.join(self.scope), operator, node.lineno, old, new, start)
        if self.scope and old!=new: self.found.append(mutant)

    def visit_ClassDef(self, node):
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    def visit_FunctionDef(self, node):
        self.scope.append(node.name)
        returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
        is_generator = any(isinstance(n, (ast.Yield,ast.YieldFrom)) for n in ast.walk(node))
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if any(self.source(value)!='None' for value in returned) and not is_generator and len(body)>1:
            first = body[0]
            self.add('none', first, f"return None\n{' '*first.col_offset}{self.source(first)}")
        self.generic_visit(node)
        self.scope.pop()

    def visit_Compare(self, node):
        text = self.source(node)
        if len(node.ops)==1:
            left,right = self.source(node.left),self.source(node.comparators[0])
            self.add('comparison', node, f'({left} {OPPOSITE[type(node.ops[0])]} {right})')
            if CHECKSUM.search(text.lower()) and isinstance(node.ops[0], (ast.Eq,ast.NotEq)):
                self.add('checksum', node, str(isinstance(node.ops[0], ast.Eq)))
        self.generic_visit(node)

    def visit_Call(self, node):
        name = self.source(node.func).split('.')[-1]
        if name in ('range','arange') and node.args:
            end = node.args[min(1, len(node.args)-1)]
            self.add('range', end, f'({self.source(end)})+1')
        if self.source(node.func).endswith('retries.call'):
            self.add('retry', node, f'({self.source(node.args[0])})()')
        self.generic_visit(node)

    def visit_Slice(self, node):
        if node.upper is not None: self.add('range', node.upper, f'({self.source(node.upper)})+1')
        self.generic_visit(node)

    def visit_For(self, node):
        if re.fullmatch(r'range\((\d|tries|\w*attempts|_\w+)\)', self.source(node.iter) or ''):
            self.add('retry', node.iter, 'range(1)')
        self.generic_visit(node)

    def visit_With(self, node):
        for item in node.items:
            text = self.source(item.context_expr)
            if LOCK.search(text): self.add('lock', item.context_expr, '__import__("contextlib").nullcontext()')
        self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            owner,_,method = self.source(node.value.func).rpartition('.')
            guards = method in ('take','check')
            if LOCK.search(owner) and guards: self.add('lock', node, 'pass')
        self.generic_visit(node)

def is_valid(mutant, text):
    try: ast.parse(changed(mutant, text))
    except SyntaxError: return False
    return True

def changed(mutant, text):
    "The text of a module with the change"
    end = mutant.start+len(mutant.old)
    assert text[mutant.start:end]==mutant.old, f'{mutant.module} is another one than when the mutants were drawn'
    return text[:mutant.start]+mutant.new+text[end:]

def draw(seed, n):
    "`n` mutants, drawn with `seed`: each operator in turn"
    found,texts = {},{}
    for package in PACKAGES:
        for path in sorted((ROOT/'fastai_remote'/package).glob('*.py')):
            module = f'{package}/{path.name}'
            texts[module] = path.read_text()
            for mutant in Finder(module, texts[module]).found: found.setdefault(mutant.operator, []).append(mutant)
    rng = random.Random(seed)
    for operator in sorted(found): rng.shuffle(found[operator])
    chosen = []
    while len(chosen)<n and any(found.values()):
        mutants = [found[operator].pop() for operator in sorted(found) if found[operator]]
        chosen += [mutant for mutant in mutants if is_valid(mutant, texts[mutant.module])]
    return chosen[:n]

def measured(tests, jobs):
    "Run the quick tests in `jobs` processes; returns the files that say which test has run which line"
    folder = Path(tempfile.mkdtemp(prefix='mutants-coverage-'))
    settings = folder/'settings'
    settings.write_text('[run]\nsource_pkgs = fastai_remote\ndynamic_context = test_function\n')
    files = sorted(map(str, [*tests.glob('test_*.py'), *tests.glob('regressions/test_*.py')]))
    def run_part(k):
        data = folder/f'part-{k}'
        env = {**os.environ, 'PYTHONPATH':str(ROOT), 'COVERAGE_FILE':str(data)}
        subprocess.run([sys.executable, '-m', 'coverage', 'run', f'--rcfile={settings}', '-m', 'pytest', '-q', '-p',
                        'no:xdist', '-m', 'not slow', *files[k::jobs]], cwd=ROOT, env=env)
        return data
    with ThreadPoolExecutor(jobs) as pool: return list(pool.map(run_part, range(jobs)))

def tests_of(mutant, data, tests, n=60):
    "Up to `n` of the quick tests that run the changed line, as arguments of pytest"
    names = set()
    for file in data:
        found = CoverageData(file)
        found.read()
        ending = f'/fastai_remote/{mutant.module}'
        module = next((path for path in found.measured_files() if path.endswith(ending)), None)
        if module: names.update(found.contexts_by_lineno(module).get(mutant.line, ()))
    paths = {path.stem:path.relative_to(tests) for path in tests.rglob('test_*.py')}
    found = sorted(name.split('.', 1) for name in names if name.split('.')[0] in paths)
    chosen = random.Random(0).sample(found, min(n, len(found)))
    arguments = [f'tests/{paths[file]}::{name.replace(".", "::")}' for file,name in chosen]
    return arguments and [*arguments, '-m', 'not slow']

def failed_tests(output):
    "The tests that failed, in the order in which pytest prints them, without the group that xdist appends"
    return re.findall(r'^(?:FAILED|ERROR) (tests/[^[@\n]+?(?:\[.*?\])?)(?:@\w+)?(?: - |$)', output, re.M)

@contextmanager
def project_with(mutants, tests):
    "A copy of the project with the changes and with these tests, as a folder"
    with tempfile.TemporaryDirectory(prefix='mutant-') as folder:
        copy = Path(folder)/'project'
        ignored = shutil.ignore_patterns('.venv*', '__pycache__', '_docs', '.hypothesis', '.pytest_cache')
        shutil.copytree(ROOT, copy, ignore=ignored)
        if tests!=ROOT/'tests':
            shutil.rmtree(copy/'tests')
            shutil.copytree(tests, copy/'tests', ignore=ignored)
        for mutant in sorted(mutants, key=lambda mutant: mutant.start, reverse=True):   # a change moves what is behind it
            path = copy/'fastai_remote'/mutant.module
            path.write_text(changed(mutant, path.read_text()))
        yield copy

# Not a test of what the code does: a change may make its line longer
FORM = '--deselect=tests/test_package.py::test_lines_have_at_most_120_characters'

def run_tests(folder, arguments, limit=None):
    "The tests of the project in `folder` that fail; `['time']` if `limit` seconds are not enough"
    env = {**os.environ, 'PYTHONPATH':str(folder), 'PYTHONDONTWRITEBYTECODE':'1'}
    process = subprocess.Popen([sys.executable, '-m', 'pytest', FORM, *arguments], cwd=folder, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try: output,_ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired: return ['time']
    finally:
        try: os.killpg(process.pid, 9)
        except ProcessLookupError: pass
        process.wait()
    if process.returncode in (0,5): return []   # 5: none of them is to run
    if 'ERROR: not found' in output: sys.exit(output)   # a name that pytest does not know says nothing of the code
    return failed_tests(output) or [output.strip()[-200:] or 'no output']

def first_failure(mutant, tests, chosen, limit):
    "The first of the tests `chosen` that notices a mutant, 'time' if it hangs; `''` if none does"
    if not chosen: return ''
    with project_with([mutant], tests) as folder: return next(iter(run_tests(folder, ['-x', *chosen], limit)), '')

def apart(mutants):
    "Lists of mutants whose changes do not overlap, each as long as possible"
    lists = []
    for mutant in mutants:
        def overlaps(other):
            return mutant.module==other.module and max(mutant.start, other.start)<min(
                mutant.start+len(mutant.old), other.start+len(other.old))
        free = next((chosen for chosen in lists if not any(map(overlaps, chosen))), None)
        if free is None: lists.append(free := [])
        free.append(mutant)
    return lists

def failures_together(mutants, tests):
    "The tests that fail when all of `mutants` are in one project"
    with project_with(mutants, tests) as folder:
        kinds = ['-n', '2', '--dist', 'loadgroup', '-m']
        found = [name for kind in ('not slow','slow') for name in run_tests(folder, [*kinds, kind])]
    unknown = [text for text in found if not text.startswith('tests/')]
    if unknown: sys.exit('\n'.join(['the tests ended before their end:', *unknown]))
    return found

def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--mutants', type=int, default=40)
    parser.add_argument('--limit', type=float, default=3600, help='seconds for each mutant')
    parser.add_argument('--jobs', type=int, default=2, help='mutants at a time, where one process tests each')
    parser.add_argument('--tests', type=Path, default=ROOT/'tests', help='another folder of tests, as of before')
    parser.add_argument('--only', help='numbers of mutants, with commas; the file of results is not written')
    parser.add_argument('--list', action='store_true', help='only print the mutants')
    args = parser.parse_args()
    mutants = draw(args.seed, args.mutants)
    if args.only: mutants = [mutants[int(k)] for k in args.only.split(',')]
    file = ROOT/'tests/bench/results'/f'mutants-{args.seed}.json'
    done = {}
    if file.exists() and not args.only:
        done = {(m['module'], m['start'], m['new']):m['result'] for m in json.loads(file.read_text())['mutants']}
    for mutant in mutants:
        key = mutant.module,mutant.start,mutant.new
        mutant.result = 'not run' if args.list else done.get(key, '')
        if mutant.result: show(mutants, mutant)
    tests = args.tests.resolve()
    def try_one(mutant, chosen, otherwise=''):
        began = time.monotonic()
        mutant.result = first_failure(mutant, tests, chosen, args.limit) or otherwise
        if not mutant.result: return
        show(mutants, mutant, f'({time.monotonic()-began:.0f} s)')
        if not args.only: write_results(file, args.seed, mutants)
    left = [mutant for mutant in mutants if not mutant.result]
    if not left: return
    data = measured(tests, args.jobs)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda mutant: try_one(mutant, tests_of(mutant, data, tests)), left))
    for together in apart([mutant for mutant in left if not mutant.result]):
        failed = failures_together(together, tests)
        print(f'{len(together)} mutants together: {len(failed)} tests fail', *failed, sep='\n    ', flush=True)
        for mutant in together: try_one(mutant, failed, 'survived')

def show(mutants, mutant, took=''):
    old = ' '.join(mutant.old.split())[:60]
    where = f'{mutants.index(mutant):3} {mutant.operator:10} {mutant.module}:{mutant.line} {mutant.function}'
    print(f'{where}: {old!r} -> {mutant.result} {took}', flush=True)

def write_results(file, seed, mutants):
    known = [vars(m) for m in mutants if m.result]
    survivors = sum(m['result']=='survived' for m in known)
    summary = {'seed':seed, 'noticed':len(known)-survivors, 'survived':survivors, 'mutants':known}
    file.write_text(json.dumps(summary, indent=1)+'\n')

if __name__=='__main__': main()
