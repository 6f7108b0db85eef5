"""Build the documentation site from the notebooks, the guide, the decisions and the benchmark results; check its links

python tools/docs.py            builds the site in `_docs`, from Markdown that it writes into `_proc`
python tools/docs.py --check    builds it, then checks every internal link, anchor and image,
                                and that no page loads anything from elsewhere

Neither needs the network. The packages that are needed are in the extra `docs`.
"""
import argparse, ast, base64, io, json, os, re, shutil, subprocess, sys, tokenize, tomllib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import readme, results

root = Path(__file__).resolve().parents[1]
pages_dir,site_dir = root/'_proc',root/'_docs'
package = 'fastai_remote'
PACKAGES = 'core imported parallel order codec store write source ingest load block'.split()   # the order of the layers

GUIDE = ['quick_start', 'sources', 'drawings', 'shards', 'training', 'failures', 'credentials', 'when_not']
HOW = ['how_it_works', 'interfaces', 'formats']

@dataclass
class Symbol:
    "A public function, class or method of a module"
    name:str # `RedisStore` or `RedisStore.get_many`
    page:str # The page that documents it, `store/redis`
    summary:str # First line of its docstring
    @property
    def anchor(self): return self.name.lower()

@dataclass
class Page:
    "A page of the site"
    name:str # Path on the site without a suffix, `store/redis`
    source:Path # The file that it is made from
    title:str = ''
    summary:str = ''
    text:str = '' # Markdown
    images:dict = field(default_factory=dict) # `{file name: bytes}` of the outputs of its cells

def repository()->str:
    "Address of the repository from pyproject.toml; empty until there is one"
    project = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']
    return project.get('urls', {}).get('Repository', '').rstrip('/')

# Python sources

def comments(
    source:str # Python
)->dict: # `{line: text}`
    "The comment at the end of each line"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]:t.string.lstrip('# ').rstrip() for t in tokens if t.type==tokenize.COMMENT}

def cell_text(text): return ' '.join(str(text).split()).replace('|', '\\|')
def unparsed(node): return '' if node is None else code(ast.unparse(node))

def four_columns(
    first:str, # Title of the first column
    rows:list # Of a name, a type, a default and a description
)->str: # Markdown
    "A table of arguments or fields"
    head = [f'| {first} | type | default | |', '| --- | --- | --- | --- |']
    return '\n'.join([*head, *(f"| {' | '.join(r)} |" for r in rows)])

def code(text): return f"`{' '.join(text.split())}`".replace('|', '\\|') if text else ''

def signature(
    name:str, # How it is called
    node # A function of the syntax tree
)->str: # `name(a, b=1) -> int`
    "The signature of a function without types of the arguments, which the table shows"
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None]*(len(positional)-len(a.defaults))+a.defaults
    def one(arg, default): return arg.arg if default is None else f'{arg.arg}={ast.unparse(default)}'
    parts = [one(*o) for o in zip(positional, defaults)]
    if a.vararg: parts.append(f'*{a.vararg.arg}')
    elif a.kwonlyargs: parts.append('*')
    parts += [one(*o) for o in zip(a.kwonlyargs, a.kw_defaults)]
    if a.kwarg: parts.append(f'**{a.kwarg.arg}')
    if parts and parts[0] in ('self','cls'): parts = parts[1:]
    line = f"{name}({', '.join(parts)})"
    res = f' -> {ast.unparse(node.returns)}' if node.returns else ''
    return line+res if len(line+res)<=110 else f'{name}(\n    '+',\n    '.join(parts)+f'\n){res}'

def parameters(
    node, # A function of the syntax tree
    notes:dict # Comments of its source by line
)->str: # A Markdown table, or an empty string if nothing is described
    "The described arguments of a function, and what it returns"
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None]*(len(positional)-len(a.defaults))+a.defaults
    starred,double_starred = [(arg,None) for arg in (a.vararg,) if arg],[(arg,None) for arg in (a.kwarg,) if arg]
    every = [*zip(positional, defaults), *starred, *zip(a.kwonlyargs, a.kw_defaults), *double_starred]
    last_on_line = {}
    for arg,default in every: last_on_line[(default or arg).end_lineno] = arg.arg
    described = {name:notes[line] for line,name in last_on_line.items() if line in notes and line!=node.lineno}
    body_line = node.body[0].lineno
    end = node.returns.end_lineno if node.returns else max(last_on_line, default=node.lineno)
    own_line = node.returns and node.lineno<end<body_line and end not in last_on_line
    returned = notes.get(end) if own_line else None
    if not described and not returned: return ''
    rows = [[code(arg.arg), unparsed(arg.annotation), unparsed(default), cell_text(described.get(arg.arg, ''))]
            for arg,default in every if arg.arg not in ('self','cls')]
    if returned: rows.append(['returns', unparsed(node.returns), '', cell_text(returned)])
    return four_columns('argument', rows)

def attributes(
    node, # A class of the syntax tree
    notes:dict # Comments of its source by line
)->str: # A Markdown table, or an empty string
    "The described fields of a dataclass"
    found = [s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    rows = [[code(s.target.id), unparsed(s.annotation), unparsed(s.value), cell_text(notes.get(s.end_lineno, ''))]
            for s in found if not s.target.id.startswith('_')]
    return four_columns('field', rows) if any(r[3] for r in rows) else ''

def patched_class(node)->str:
    "The class that `@patch` adds a method to, or an empty string"
    names = [ast.unparse(d) for d in node.decorator_list]
    if not any(n=='patch' or n.startswith('patch(') for n in names) or not node.args.args: return ''
    annotation = node.args.args[0].annotation
    return ast.unparse(annotation).split('|')[0].strip() if annotation else ''

def definitions(source:str)->list:
    "The public functions, classes and methods of a cell, as `(name, node)`"
    found = []
    functions = (ast.FunctionDef,ast.AsyncFunctionDef)
    for node in ast.parse(source).body:
        if getattr(node, 'name', '_').startswith('_'): continue
        if isinstance(node, functions):
            cls = patched_class(node)
            if not cls.startswith('_'): found.append((f'{cls}.{node.name}' if cls else node.name, node))
        elif isinstance(node, ast.ClassDef):
            found.append((node.name, node))
            methods = [m for m in node.body if isinstance(m, functions) and not m.name.startswith('_')]
            found += [(f'{node.name}.{m.name}', m) for m in methods if ast.get_docstring(m)]
    return found

def api_cell(
    source:str, # An exported cell without its directives
    page:Page, # The page that it appears on
    symbols:dict # `{name: Symbol}`, to be added to
)->str: # Markdown
    "The documentation of an exported cell: signature, docstring and arguments of each definition, then the source"
    try: found = definitions(source)
    except SyntaxError: return f'```python\n{source}\n```'
    nodes = ast.parse(source).body
    if not found:
        if all(isinstance(n, (ast.Import,ast.ImportFrom)) for n in nodes): return ''
        return f'```python\n{source}\n```'
    notes,parts = comments(source),[]
    for name,node in found:
        doc = ast.get_docstring(node) or ''
        symbol = Symbol(name, page.name, doc.strip().split('\n')[0])
        symbols.setdefault(name, symbol)
        own = symbols[name].page==page.name
        level = '####' if '.' in name and not patched_class_of(name, nodes) else '###'
        parts.append(f"{level} {name}{f' {{ #{symbol.anchor} }}' if own else ''}")
        if isinstance(node, ast.ClassDef):
            init = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name=='__init__'), None)
            bases = ', '.join(ast.unparse(b) for b in node.bases)
            head = signature(f'class {name}', init) if init else f"class {name}{f'({bases})' if bases else ''}"
            parts += [f'```python\n{head}\n```', doc, parameters(init, notes) if init else attributes(node, notes)]
        elif {ast.unparse(d) for d in node.decorator_list}&{'property','cached_property'}:
            parts += [f'*property*: {doc}']
        else: parts += [f'```python\n{signature(name, node)}\n```', doc, parameters(node, notes)]
    indented = '\n'.join(f'    {line}' if line else '' for line in source.splitlines())
    parts.append(f'??? quote "Source"\n\n    ```python\n{indented}\n    ```')
    return '\n\n'.join(p for p in parts if p)

def patched_class_of(name, nodes)->bool:
    "Is `name` a method that a function at the top level of the cell adds to its class?"
    return any(isinstance(n, ast.FunctionDef) and patched_class(n) and name.endswith(f'.{n.name}') for n in nodes)

def relative(
    page:Page, # The page that has a link
    to:str # A path on the site
)->str: # The same from the folder of `page`
    "A path on the site as a link of `page`"
    return os.path.relpath(to, Path(page.name).parent)

# Notebooks

directive = re.compile(r'^#\| *(\S+) *(.*)$', re.M)

def output(
    found:dict, # An output of a cell
    page:Page # Takes its images
)->str: # Markdown
    "An output as Markdown"
    if found['output_type']=='stream': return f"```text\n{''.join(found['text']).rstrip()}\n```"
    if found['output_type']=='error': return ''
    data = found.get('data', {})
    if 'image/png' in data:
        file = f"{page.name.replace('/', '-')}-{len(page.images)}.png"
        page.images[file] = base64.b64decode(''.join(data['image/png']))
        return f"![output]({relative(page, f'images/{file}')})"
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    if 'text/html' in data:
        html = re.sub(r'\n\s*\n', '\n', ''.join(data['text/html']).strip())   # an empty line would end it
        return f'<div class="output">\n{html}\n</div>'
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```" if 'text/plain' in data else ''

def notebook_page(
    file:Path, # A notebook
    name:str, # Its page
    symbols:dict # `{name: Symbol}`, to be added to
)->Page:
    "A notebook as a page: text, code, outputs; exported cells as documentation of what they define"
    page,parts = Page(name, file),[]
    for cell in json.loads(file.read_text(encoding='utf-8'))['cells']:
        source = ''.join(cell['source']).strip()
        if cell['cell_type']=='markdown':
            if source: parts.append(re.sub(r'\n> *\n> Docs:.*', '', source))
            continue
        if cell['cell_type']!='code': continue
        found = {m[1].rstrip(':') for m in directive.finditer(source)}
        body = directive.sub('', source).strip()
        if 'hide' in found or 'default_exp' in found or not body: continue
        if found&{'export','exports','exporti'}: parts.append(api_cell(body, page, symbols))
        else: parts += [f'```python\n{body}\n```', *(output(o, page) for o in cell.get('outputs', []))]
    page.text = '\n\n'.join(p for p in parts if p.strip())
    return page

NAMED = {'README.md':'index', 'CHANGELOG.md':'changelog', 'CONTRIBUTING.md':'contributing',
         'tests/bench/results':'benchmarks', 'nbs/decisions':'decisions'}

def page_name(
    file:Path # A notebook, Markdown file or folder of the project
)->str: # Its page, or an empty string if it has none
    "The page that a file becomes: `nbs/store/04_redis.ipynb` is `store/redis`"
    if (named:=NAMED.get(file.relative_to(root).as_posix())) or not file.is_relative_to(root/'nbs'): return named or ''
    relative = file.relative_to(root/'nbs')
    if file.suffix not in ('.ipynb','.md'): return ''
    stem = file.stem if relative.parts[0]=='decisions' else re.sub(r'^\d+[a-zA-Z0-9]*_', '', file.stem)
    return relative.with_name(stem).as_posix()

def sources()->list:
    "The files that become pages"
    files = sorted((root/'nbs').rglob('*.ipynb'))+sorted((root/'nbs').rglob('*.md'))
    files = [f for f in files if '.ipynb_checkpoints' not in f.parts]
    return files+[root/'CHANGELOG.md', root/'CONTRIBUTING.md']

# Markdown

fence = re.compile(r'^( *```.*?^ *``` *$)', re.M|re.S)
link = re.compile(r'`[^`\n]+`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)')

def outside_code(
    text:str, # Markdown
    change # Called with each part that is not in a fenced block of code
)->str:
    "Apply `change` to what is not code"
    return ''.join(part if i%2 else change(part) for i,part in enumerate(fence.split(text)))

def blank_lines_before_lists(
    text:str # Markdown of a notebook
)->str: # With an empty line between a paragraph and a list, which mkdocs needs
    "A list directly after a paragraph, moved away from it"
    item = re.compile(r'\s*(?:[-*+]|\d+\.) ')
    lines = []
    for line in text.split('\n'):
        before = lines[-1] if lines else ''
        ends_paragraph = before.strip() and not item.match(before) and not before.startswith((' ','|'))
        if item.match(line) and ends_paragraph: lines.append('')
        lines.append(line)
    return '\n'.join(lines)

class Linker:
    "Makes the links of a page point to pages, and names of the API point to what documents them"
    def __init__(self,
        pages:dict, # `{name: Page}`
        symbols:dict # `{name: Symbol}`
    ):
        self.pages,self.symbols,self.repository = pages,symbols,repository()
        self.problems,self.files = [],{}

    def target(self, page, to, base):
        "Where link `to` of `page` leads on the site; None if it leads to a file that is not there"
        if urlsplit(to).scheme or to.startswith('#'): return to
        path,_,anchor = to.partition('#')
        file = (base/unquote(path)).resolve()
        if not file.exists():
            self.problems.append(f'{page.source.relative_to(root)}: {to} does not exist')
            return None
        name = page_name(file)
        if name in self.pages: return relative(page, f'{name}.md')+(f'#{anchor}' if anchor else '')
        if file.suffix in ('.png','.svg','.jpg'):
            self.files[file.name] = file
            return relative(page, f'images/{file.name}')
        if self.repository: return f'{self.repository}/blob/main/{file.relative_to(root).as_posix()}'
        return None

    def links(self, page, text):
        "The links of `text`, resolved; a link to a file that has no page becomes its path"
        base = root if page.name=='index' or page.source.parent==root else page.source.parent
        def one(m):
            if m[3] is None: return m[0]   # inline code
            if m[1] and m[3].rpartition('/')[2] in page.images: return m[0]
            to = self.target(page, m[3], base)
            if to: return f'{m[1]}[{m[2]}]({to})'
            return m[2] if '`' in m[2] else f'{m[2]} (`{m[3].lstrip("./")}`)'
        return link.sub(one, text)

    def names(self, page, text):
        "`` `RedisStore` `` in running text leads to its documentation"
        def one(m):
            symbol = self.symbols.get(m[1].removesuffix('()'))
            if symbol is None: return m[0]
            to = '' if symbol.page==page.name else relative(page, f'{symbol.page}.md')
            return f'[{m[0]}]({to}#{symbol.anchor})'
        def line(s):
            if s.startswith(('#','    ','|')) or '<' in s[:1]: return s
            return re.sub(r'(?<![\[`\w])`([A-Za-z_][\w.]*(?:\(\))?)`(?![`\]])', one, s)
        return '\n'.join(map(line, text.split('\n')))

    def render(self, page)->str:
        "The Markdown of `page` as mkdocs takes it"
        text = outside_code(page.text, lambda t: self.links(page, blank_lines_before_lists(t)))
        return outside_code(text, lambda t: self.names(page, t))

def heading(text): return (re.search(r'^# +(.+)$', text, re.M) or ['',''])[1].strip()
def quoted(text): return (re.search(r'^> +(.+)$', text, re.M) or ['',''])[1].strip()

def plain(text:str)->str:
    "The first line of a docstring as Markdown that cannot be taken for a link or a table"
    return cell_text(text).replace('[', '\\[').replace('<', '&lt;')

# The site

def reference(
    pages:dict, # `{name: Page}`
    symbols:dict # `{name: Symbol}`
)->str: # Markdown
    "The entrance to the API reference: packages with their modules, and the exported names"
    sys.path.insert(0, str(root))
    exported = __import__(package).__all__
    intro = ('Each page documents one module and is made from the notebook that the module is exported from: the '
             'reasons, the definitions, and examples with their output. A package imports only from packages above it.')
    parts = ['# API reference', intro, '## Modules']
    for top in PACKAGES:
        init = root/package/top/'__init__.py'
        if not init.exists() and top not in pages: continue
        if init.exists(): question = ast.get_docstring(ast.parse(init.read_text(encoding='utf-8'))) or ''
        else: question = pages[top].summary
        parts.append(f'### {top}\n\n{question}')
        if init.exists():
            rows = [f'| [`{n}`]({n}.md) | {plain(p.summary)} |' for n,p in pages.items() if n.startswith(f'{top}/')]
            parts.append('\n'.join(['| module | |', '| --- | --- |', *rows]))
        else: parts.append(f'[`{top}`]({top}.md)')
    rows = []
    for name in [*exported, *(n for n in symbols if n.startswith('DataLoaders.from_'))]:
        symbol = symbols.get(name)
        if symbol: rows.append(f'| [`{name}`]({symbol.page}.md#{symbol.anchor}) | {plain(symbol.summary)} |')
        else: rows.append(f'| `{name}` | |')
    names_intro = f"`from {package} import *` gives these names, and fastai's `DataLoaders` the methods below them."
    parts += ['## Names', names_intro,
              '\n'.join(['| name | |', '| --- | --- |', *rows])]
    return '\n\n'.join(parts)+'\n'

def decisions(pages)->str:
    "The list of decision notes"
    rows = [f'- [{p.title}]({n}.md)' for n,p in pages.items() if n.startswith('decisions/')]
    intro = 'Why something is as it is: context, options, choice and cost, in about ten lines each.'
    return '\n'.join(['# Decisions', '', intro, '', *rows, ''])

def navigation(pages)->list:
    "The contents of the site, in order"
    def entry(name): return {pages[name].title:f'{name}.md'}
    def section(title, names): return {title:[entry(n) for n in names if n in pages]}
    tutorials = sorted(n for n in pages if n.startswith('tutorials/'))
    api = [entry('reference')]
    for top in PACKAGES:
        inside = [n for n in pages if n.startswith(f'{top}/')]
        if inside: api.append({top:[{n.rpartition('/')[2]:f'{n}.md'} for n in inside]})
        elif top in pages: api.append({top:f'{top}.md'})
    others = sorted(n for n in pages if n.startswith('guide/') and n.partition('/')[2] not in GUIDE+HOW)
    notes = ['decisions', *(n for n in pages if n.startswith('decisions/'))]
    return [{package:'index.md'}, section('Guide', [*(f'guide/{n}' for n in GUIDE), *others]),
            section('How it works', [f'guide/{n}' for n in HOW]), entry('benchmarks'), section('Tutorials', tutorials),
            {'API reference':api}, section('Decisions', notes), entry('changelog'), entry('contributing')]

def collect()->tuple:
    "All pages, and the symbols that they document"
    symbols,pages = {},{}
    for file in sources():
        name = page_name(file)
        if file.suffix=='.ipynb' and name!='index': pages[name] = notebook_page(file, name, symbols)
        else: pages[name] = Page(name, file, text=readme.text() if name=='index' else file.read_text(encoding='utf-8'))
    for page in pages.values():
        page.title,page.summary = heading(page.text) or page.name,quoted(page.text)
        page.text = re.sub(r'<!--.*?-->\n*', '', page.text, flags=re.S)
        if page.name.split('/')[0] in PACKAGES:   # the path of a module says more than its name, such as `base`
            page.text = re.sub(r'^# .*$', f'# {page.name}', page.text, count=1, flags=re.M)
    pages['benchmarks'] = Page('benchmarks', root/'nbs/benchmarks.md', 'Benchmarks', text=results.page())
    pages['reference'] = Page('reference', root/'nbs/reference.md', 'Overview', text=reference(pages, symbols))
    pages['decisions'] = Page('decisions', root/'nbs/decisions.md', 'Overview', text=decisions(pages))
    return pages,symbols

CONFIG = dict(site_name=package, docs_dir='pages', site_dir=str(site_dir), use_directory_urls=False, plugins=['search'],
    extra_css=['style.css'],
    theme=dict(name='material', font=False, palette=[dict(scheme='default', primary='deep orange')],
               features=['navigation.sections','navigation.top','navigation.prune','content.code.copy','toc.follow']),
    markdown_extensions=['tables','attr_list','md_in_html','admonition','pymdownx.details','pymdownx.superfences',
                         {'pymdownx.highlight':dict(use_pygments=True)}, {'toc':dict(permalink=True, toc_depth=3)}],
    validation=dict(nav=dict(omitted_files='warn', not_found='warn'),
                    links=dict(not_found='warn', anchors='warn', unrecognized_links='warn')))
CSS = '.output { overflow-x: auto; font-size: .7rem; }\n.md-typeset table:not([class]) { font-size: .7rem; }\n'

def build()->list:
    "Write the pages and build the site; returns the links that lead nowhere"
    pages,symbols = collect()
    linker = Linker(pages, symbols)
    for folder in (pages_dir, site_dir): shutil.rmtree(folder, ignore_errors=True)
    for page in pages.values():
        generated = page.name in ('reference','decisions')
        text = page.text if generated else linker.render(page)
        file = pages_dir/'pages'/f'{page.name}.md'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding='utf-8')
    images = pages_dir/'pages/images'
    images.mkdir(exist_ok=True)
    for page in pages.values():
        for name,data in page.images.items(): (images/name).write_bytes(data)
    for name,file in linker.files.items(): shutil.copy(file, images/name)
    (pages_dir/'pages/style.css').write_text(CSS)
    config = {**CONFIG, 'nav':navigation(pages)}
    if linker.repository: config['repo_url'] = linker.repository
    (pages_dir/'mkdocs.yml').write_text(json.dumps(config, indent=1))   # JSON is YAML
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '-f', str(pages_dir/'mkdocs.yml')]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, 'NO_MKDOCS_2_WARNING':'1'})
    if run.returncode==0: return linker.problems
    return linker.problems+[f'mkdocs: {line}' for line in (run.stdout+run.stderr).splitlines() if line.strip()]

class Links(HTMLParser):
    "The links, the anchors and the resources of an HTML page"
    def __init__(self):
        super().__init__()
        self.links,self.anchors,self.resources = [],set(),[]
    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if found.get('id'): self.anchors.add(found['id'])
        if tag=='a' and found.get('name'): self.anchors.add(found['name'])
        if tag=='a' and found.get('href'): self.links.append(found['href'])
        if tag in ('img','script','iframe','source','video') and found.get('src'): self.resources.append(found['src'])
        navigation = found.get('rel') in ('canonical','prev','next','alternate')
        if tag=='link' and found.get('href') and not navigation: self.resources.append(found['href'])

def check(
    site:Path=site_dir # Folder of HTML files
)->list: # One line for each problem
    "Internal links, anchors and resources that are not there, and resources that would be loaded from elsewhere"
    parsed = {}
    for file in sorted(site.rglob('*.html')):
        parsed[file.resolve()] = links = Links()
        links.feed(file.read_text(encoding='utf-8'))
    problems = []
    for file,links in parsed.items():
        where = file.relative_to(site.resolve())
        if where.name=='404.html': continue   # its links are absolute: where the site lies is not known
        for url in links.links+links.resources:
            parts = urlsplit(url)
            if parts.scheme=='data' or url.startswith('javascript:'): continue
            if parts.scheme or parts.netloc:
                if url in links.resources: problems.append(f'{where}: loads {url}')
                continue
            target = (file.parent/unquote(parts.path)).resolve() if parts.path else file
            if target.is_dir(): target = target/'index.html'
            if not target.exists(): problems.append(f'{where}: {url} does not exist')
            elif parts.fragment and target in parsed and unquote(parts.fragment) not in parsed[target].anchors:
                problems.append(f'{where}: {url}: no such anchor')
    if not parsed: problems.append(f'{site}: no pages')
    return problems

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='check the links of the site after it is built')
    options = parser.parse_args()
    try: import material, mkdocs  # noqa: F401
    except ImportError: sys.exit('docs: mkdocs-material is not installed: run `make docs`, or pip install ".[docs]"')
    problems = build()
    if options.check: problems += check()
    for problem in dict.fromkeys(problems): print(problem, file=sys.stderr)
    if problems: sys.exit(f'docs: {len(set(problems))} problems')
    n,name = len(list(site_dir.rglob('*.html'))),site_dir.name
    print(f'{n} pages in {name}: open {name}/index.html; to search, use python -m http.server -d {name}')

if __name__=='__main__': main()
