"""Build the documentation site from the notebooks, the guide, the decision notes and the benchmark results

python tools/docs.py            builds the site in `_docs`, from Markdown files that it writes to `_proc`
python tools/docs.py --check    builds the site, then checks every internal link, anchor and image,
                                and that no page loads anything from another server

Neither command needs the network. The packages that are needed are in the extra `docs`.
"""
import argparse, ast, base64, io, json, os, re, shutil, subprocess, sys, tokenize, tomllib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import guide, readme, results

root = Path(__file__).resolve().parents[1]
pages_dir,site_dir = root/'_proc',root/'_docs'
package = 'fastai_remote'
# In the order of the layers: a package imports only from packages before it.
PACKAGES = 'core clock parallel order codec store write source ingest load block view cli'.split()

GUIDE = ['quick_start', 'sources', 'drawings', 'shards', 'training', 'speed', 'resuming', 'kinds', 'looking', 'changing', 'failures',
         'servers', 'sizing', 'credentials', 'command_line', 'coming_from', 'when_not', 'glossary']
HOW = ['how_it_works', 'interfaces', 'formats']
# In the order in which one would read them: what most users need first, engines last
TUTORIALS = ['images', 'shards', 'drawings', 'resume', 'label_errors', 'fastai_api', 'kinds_labels', 'kinds_masks', 'kinds_boxes',
             'kinds_points', 'kinds_pairs', 'kinds_captions', 'kinds_numbers', 'kinds_texts', 'kinds_audio', 'own_store', 'spark',
             'dask', 'ray']

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
    "The comment of each line: the one at its end, otherwise those on the lines directly above it"
    lines,found,own_lines = source.splitlines(),{},{}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type!=tokenize.COMMENT: continue
        number,column = token.start
        is_own_line = not lines[number-1][:column].strip()
        (own_lines if is_own_line else found)[number] = token.string.lstrip('# ').rstrip()
    block = []
    for number in sorted(own_lines):
        block = [*block, own_lines[number]] if number-1 in own_lines else [own_lines[number]]
        if number+1 not in own_lines: found.setdefault(number+1, ' '.join(block))
    return found

def cell_text(text):
    "Text in a cell of a table: `|` is escaped, but for inline code, where mkdocs would show the backslash"
    parts = re.split(r'(`[^`]*`)', ' '.join(str(text).split()))
    return ''.join(part if i%2 else part.replace('|', '\\|') for i,part in enumerate(parts))

def code(text): return f"`{' '.join(text.split())}`" if text else ''
def unparsed(node): return '' if node is None else code(ast.unparse(node))

def four_columns(
    first:str, # Title of the first column
    rows:list # Lists of a name, a type, a default and a description
)->str: # Markdown
    "A table of arguments or fields"
    head = [f'| {first} | type | default | |', '| --- | --- | --- | --- |']
    return '\n'.join([*head, *(f"| {' | '.join(row)} |" for row in rows)])

def positional_arguments(arguments)->list:
    "The positional arguments of a function as `(argument, default)`; the default is None if there is none"
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None]*(len(positional)-len(arguments.defaults))+arguments.defaults
    return [*zip(positional, defaults)]

def signature(
    name:str, # The name that is shown
    node # A function of the syntax tree
)->str: # `name(a, b=1) -> int`
    "The signature of a function, without the types of its arguments, which the table shows"
    arguments = node.args
    def with_default(arg, default): return arg.arg if default is None else f'{arg.arg}={ast.unparse(default)}'
    parts = [with_default(*pair) for pair in positional_arguments(arguments)]
    if arguments.posonlyargs: parts.insert(len(arguments.posonlyargs), '/')
    if arguments.vararg: parts.append(f'*{arguments.vararg.arg}')
    elif arguments.kwonlyargs: parts.append('*')
    parts += [with_default(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg: parts.append(f'**{arguments.kwarg.arg}')
    if parts and parts[0] in ('self','cls'): parts = parts[1:]
    line = f"{name}({', '.join(parts)})"
    returned = f' -> {ast.unparse(node.returns)}' if node.returns else ''
    if len(line+returned)<=110: return line+returned
    return f'{name}(\n    '+',\n    '.join(parts)+f'\n){returned}'

def parameters(
    node, # A function of the syntax tree
    notes:dict # Comments of its source by line
)->str: # A Markdown table, or an empty string if nothing is described
    "The described arguments of a function, and what it returns"
    arguments = node.args
    starred = [(arg,None) for arg in (arguments.vararg,) if arg]
    double_starred = [(arg,None) for arg in (arguments.kwarg,) if arg]
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults)
    every = [*positional_arguments(arguments), *starred, *keyword_only, *double_starred]
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
    rows = []
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name): continue
        name,description = statement.target.id,cell_text(notes.get(statement.end_lineno, ''))
        if name.startswith('_'): continue
        rows.append([code(name), unparsed(statement.annotation), unparsed(statement.value), description])
    return four_columns('field', rows) if any(row[3] for row in rows) else ''

def patched_class(node)->str:
    "The class that `@patch` adds a method to, or an empty string"
    decorators = [ast.unparse(d) for d in node.decorator_list]
    is_patch = any(d=='patch' or d.startswith('patch(') for d in decorators)
    if not is_patch or not node.args.args: return ''
    annotation = node.args.args[0].annotation
    return ast.unparse(annotation).split('|')[0].strip() if annotation else ''

def definitions(source:str)->list:
    "The public functions and classes of a cell, and their methods with a docstring, as `(name, node)`"
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

def is_patched_method(name, nodes)->bool:
    "Is `name` a method that a function at the top level of the cell adds to its class?"
    return any(isinstance(n, ast.FunctionDef) and patched_class(n) and name.endswith(f'.{n.name}') for n in nodes)

def definition_text(
    name:str, # Of the definition
    node, # A function or class of the syntax tree
    notes:dict # Comments of its source by line
)->list: # Parts of Markdown
    "The documentation of a definition below its heading: signature, docstring and arguments"
    doc = ast.get_docstring(node) or ''
    if isinstance(node, ast.ClassDef):
        init = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name=='__init__'), None)
        bases = ', '.join(ast.unparse(base) for base in node.bases)
        head = signature(f'class {name}', init) if init else f"class {name}{f'({bases})' if bases else ''}"
        return [f'```python\n{head}\n```', doc, parameters(init, notes) if init else attributes(node, notes)]
    if {ast.unparse(d) for d in node.decorator_list}&{'property','cached_property'}: return [f'*property*: {doc}']
    return [f'```python\n{signature(name, node)}\n```', doc, parameters(node, notes)]

def api_cell(
    source:str, # An exported cell without its directives
    page:Page, # The page that it appears on
    symbols:dict # `{name: Symbol}`; the symbols of the cell are added to it
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
        symbol = Symbol(name, page.name, (ast.get_docstring(node) or '').strip().split('\n')[0])
        symbols.setdefault(name, symbol)
        anchor = f' {{ #{symbol.anchor} }}' if symbols[name].page==page.name else ''
        level = '####' if '.' in name and not is_patched_method(name, nodes) else '###'
        parts += [f'{level} {name}{anchor}', *definition_text(name, node, notes)]
    indented = '\n'.join(f'    {line}' if line else '' for line in source.splitlines())
    parts.append(f'??? quote "Source"\n\n    ```python\n{indented}\n    ```')
    return '\n\n'.join(p for p in parts if p)

def relative(
    page:Page, # The page that contains the link
    path:str # A path on the site
)->str: # The path relative to the folder of `page`
    "A link from `page` to a path on the site"
    return os.path.relpath(path, Path(page.name).parent)

# Notebooks

directive = re.compile(r'^#\| *(\S+) *(.*)$', re.M)

def output(
    found:dict, # An output of a cell
    page:Page # The page that it appears on; images are added to it
)->str: # Markdown
    "An output as Markdown"
    if found['output_type']=='stream': return guide.printed(''.join(found['text']))
    if found['output_type']=='error': return ''
    data = found.get('data', {})
    if 'image/png' in data:
        file = f"{page.name.replace('/', '-')}-{len(page.images)}.png"
        page.images[file] = base64.b64decode(''.join(data['image/png']))
        return f"![output]({relative(page, f'images/{file}')})"
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    if 'text/html' in data:
        html = re.sub(r'\n\s*\n', '\n', ''.join(data['text/html']).strip())   # an empty line would end the HTML
        return f'<div class="output">\n{html}\n</div>'
    return guide.printed(''.join(data['text/plain'])) if 'text/plain' in data else ''

def notebook_page(
    file:Path, # A notebook
    name:str, # The name of its page
    symbols:dict # `{name: Symbol}`; the symbols of the notebook are added to it
)->Page:
    "A notebook as a page: text, code and outputs. Exported cells become documentation of what they define."
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

def sections(
    source:str # Of a module
)->list: # `[text]` and `[source code]` in turn, from the first text on
    "A module in parts: each comment at its top level that a blank line follows, and the code up to the next one"
    parts,lines = [['',[]]],source.splitlines()
    tree = ast.parse(source)
    inside = {row for node in tree.body for row in range(node.lineno, node.end_lineno+1)}
    blocks,block = [],[]
    for number,line in enumerate(lines, 1):
        if line.startswith('#') and number not in inside: block.append((number,line))
        elif block:
            if not line.strip(): blocks.append(block)   # otherwise it belongs to the next definition
            block = []
    texts = {row:block for block in blocks for row,_ in block}
    for number,line in enumerate(lines, 1):
        if number not in texts: parts[-1][1].append(line)
        elif number==texts[number][0][0]: parts.append(['\n'.join(text[2:] for _,text in texts[number]), []])
    return [(text, '\n'.join(code).strip('\n')) for text,code in parts]

def module_page(
    file:Path, # A module that has no notebook
    name:str, # The name of its page
    symbols:dict # `{name: Symbol}`; those of the module are added to it
)->Page:
    "A module as a page: its docstring, and below each comment what the code after it defines"
    source = file.read_text(encoding='utf-8')
    tree = ast.parse(source)
    summary,_,reasons = ast.get_docstring(tree).rpartition('\n\nDocs: ')[0].partition('\n')
    page = Page(name, file)
    parts = [f'# {name}', f'> {summary}', reasons.strip()]
    code = '\n'*tree.body[0].end_lineno+'\n'.join(source.splitlines()[tree.body[0].end_lineno:])
    for text,body in sections(code):
        parts += [re.sub(r'(?m)^--- ', '## ', text), api_cell(body, page, symbols) if body else '']
    page.text = '\n\n'.join(p for p in parts if p.strip())
    return page

NAMED = {'README.md':'index', 'CHANGELOG.md':'changelog', 'CONTRIBUTING.md':'contributing',
         'tests/bench/results':'benchmarks', 'nbs/decisions':'decisions'}

def page_name(
    file:Path # A notebook, Markdown file or folder of the project
)->str: # Its page, or an empty string if it has none
    "The page that a file becomes: `nbs/store/08_redis.ipynb` and `fastai_remote/store/redis.py` are `store/redis`"
    named = NAMED.get(file.relative_to(root).as_posix())
    if named: return named
    if file.suffix=='.py' and file.is_relative_to(root/package):
        return file.relative_to(root/package).with_suffix('').as_posix()
    if not file.is_relative_to(root/'nbs') or file.suffix not in ('.ipynb','.md'): return ''
    path = file.relative_to(root/'nbs')
    stem = file.stem if path.parts[0]=='decisions' else re.sub(r'^\d+[a-zA-Z0-9]*_', '', file.stem)
    return path.with_name(stem).as_posix()

def sources()->list:
    "The files that become pages"
    files = sorted((root/'nbs').rglob('*.ipynb'))+sorted((root/'nbs').rglob('*.md'))
    files = [f for f in files if '.ipynb_checkpoints' not in f.parts]
    return [*files, *plain_modules(), root/'CHANGELOG.md', root/'CONTRIBUTING.md']

def plain_modules()->list:
    "The modules that have no notebook, and a page nevertheless"
    files = [f for f in sorted((root/package).rglob('*.py')) if not f.name.startswith('_')]
    return [f for f in files if '# AUTOGENERATED!' not in f.read_text(encoding='utf-8')]

# Markdown

fence = re.compile(r'^( *```.*?^ *``` *$)', re.M|re.S)
link = re.compile(r'`[^`\n]+`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)')

def outside_code(
    text:str, # Markdown
    change # Called with each part that is not in a fenced block of code
)->str:
    "Apply `change` to the text outside of blocks of code"
    return ''.join(part if i%2 else change(part) for i,part in enumerate(fence.split(text)))

def blank_lines_before_lists(
    text:str # Markdown of a notebook
)->str: # Markdown
    "Add an empty line between a paragraph and the list that follows it, because mkdocs needs one"
    item = re.compile(r'\s*(?:[-*+]|\d+\.) ')
    lines = []
    for line in text.split('\n'):
        before = lines[-1] if lines else ''
        ends_paragraph = before.strip() and not item.match(before) and not before.startswith((' ','|'))
        if item.match(line) and ends_paragraph: lines.append('')
        lines.append(line)
    return '\n'.join(lines)

class Linker:
    "Makes links to files point to their pages, and names of the API point to their documentation"
    def __init__(self,
        pages:dict, # `{name: Page}`
        symbols:dict # `{name: Symbol}`
    ):
        self.pages,self.symbols,self.repository = pages,symbols,repository()
        self.problems,self.files = [],{}

    def target(self, page, to, base):
        "The address on the site of link `to` of `page`, which is relative to folder `base`; None if there is none"
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
        "Resolve the links of `text`. A link to a file that has no page becomes the path of the file."
        base = root if page.name=='index' or page.source.parent==root else page.source.parent
        def resolve(match):
            mark,title,address = match.groups()   # the mark of an image is `!`
            if address is None: return match[0]   # inline code
            if mark and address.rpartition('/')[2] in page.images: return match[0]
            target = self.target(page, address, base)
            if target: return f'{mark}[{title}]({target})'
            return title if '`' in title else f'{title} (`{address.lstrip("./")}`)'
        return link.sub(resolve, text)

    def names(self, page, text):
        "Link names of the API in running text, such as `` `RedisStore` ``, to their documentation"
        def link_name(match):
            symbol = self.symbols.get(match[1].removesuffix('()'))
            if symbol is None: return match[0]
            target = '' if symbol.page==page.name else relative(page, f'{symbol.page}.md')
            return f'[{match[0]}]({target}#{symbol.anchor})'
        def link_names(line):
            if line.startswith(('#','    ','|','<')): return line
            return re.sub(r'(?<![\[`\w])`([A-Za-z_][\w.]*(?:\(\))?)`(?![`\]])', link_name, line)
        return '\n'.join(map(link_names, text.split('\n')))

    def render(self, page)->str:
        "The Markdown of `page` as mkdocs needs it"
        text = outside_code(page.text, lambda part: self.links(page, blank_lines_before_lists(part)))
        return outside_code(text, lambda part: self.names(page, part))

def heading(text): return (re.search(r'^# +(.+)$', text, re.M) or ['',''])[1].strip()
def quoted(text): return (re.search(r'^> +(.+)$', text, re.M) or ['',''])[1].strip()

def plain(text:str)->str:
    "The first line of a docstring, escaped so that Markdown does not read it as a link or a table"
    return cell_text(text).replace('[', '\\[').replace('<', '&lt;')

# The site

def reference(
    pages:dict, # `{name: Page}`
    symbols:dict # `{name: Symbol}`
)->str: # Markdown
    "The first page of the API reference: the packages with their modules, and the exported names"
    intro = ('Each page documents one module: the reasons, the definitions, and where the module has a notebook, '
             'examples with their output. A package imports only from packages above it.')
    parts = ['# API reference', intro, '## Modules']
    for top in PACKAGES:
        init = root/package/top/'__init__.py'
        if init.exists():
            question = ast.get_docstring(ast.parse(init.read_text(encoding='utf-8'))) or ''
            inside = [(name, page) for name,page in pages.items() if name.startswith(f'{top}/')]
            rows = [f'| [`{name}`]({name}.md) | {plain(page.summary)} |' for name,page in inside]
            parts += [f'### {top}\n\n{question}', '\n'.join(['| module | |', '| --- | --- |', *rows])]
        elif top in pages: parts += [f'### {top}\n\n{pages[top].summary}', f'[`{top}`]({top}.md)']
    return '\n\n'.join([*parts, '## Names', exported_names(symbols)])+'\n'

def exported_names(symbols)->str:
    "A table of the names that the package exports"
    sys.path.insert(0, str(root))
    ours = __import__(package)
    by_name = ', '.join(f'`{name}`' for name in sorted(set(ours._module_of)-set(ours.__all__)))
    intro = (f"`from {package} import *` imports these names. It also adds the methods at the end of the table to "
             f"fastai's `DataLoaders`. {by_name} are imported by name: `from {package} import …`.")
    rows = []
    for name in [*ours.__all__, *(n for n in symbols if n.startswith('DataLoaders.from_'))]:
        symbol = symbols.get(name)
        if symbol: rows.append(f'| [`{name}`]({symbol.page}.md#{symbol.anchor}) | {plain(symbol.summary)} |')
        else: rows.append(f'| `{name}` | |')
    return intro+'\n\n'+'\n'.join(['| name | |', '| --- | --- |', *rows])

def decisions(pages)->str:
    "The list of decision notes"
    rows = [f'- [{page.title}]({name}.md)' for name,page in pages.items() if name.startswith('decisions/')]
    intro = ('Each note explains one decision in about ten lines: the context, the options, the choice and what it '
             'costs.')
    return '\n'.join(['# Decisions', '', intro, '', *rows, ''])

def navigation(pages)->list:
    "The table of contents of the site"
    def entry(name): return {pages[name].title:f'{name}.md'}
    def section(title, names): return {title:[entry(n) for n in names if n in pages]}
    more = sorted(n for n in pages if n.startswith('tutorials/') and n.partition('/')[2] not in TUTORIALS)
    tutorials = [*(f'tutorials/{n}' for n in TUTORIALS), *more]
    api = [entry('reference')]
    for top in PACKAGES:
        inside = [n for n in pages if n.startswith(f'{top}/')]
        if inside: api.append({top:[{n.rpartition('/')[2]:f'{n}.md'} for n in inside]})
        elif top in pages: api.append({top:f'{top}.md'})
    others = sorted(n for n in pages if n.startswith('guide/') and n.partition('/')[2] not in GUIDE+HOW)
    notes = ['decisions', *(n for n in pages if n.startswith('decisions/'))]
    return [{'Overview':'index.md'}, section('Guide', [*(f'guide/{n}' for n in GUIDE), *others]),
            section('How it works', [f'guide/{n}' for n in HOW]), entry('benchmarks'), section('Tutorials', tutorials),
            {'API reference':api},
            # a section within a section is folded
            {'Project':[entry('changelog'), entry('contributing'), section('Decisions', notes)]}]

def collect()->tuple:
    "All pages, and the symbols that they document"
    symbols,pages = {},{}
    for file in sources():
        name = page_name(file)
        if file.suffix=='.ipynb' and name!='index': pages[name] = notebook_page(file, name, symbols)
        elif file.suffix=='.py': pages[name] = module_page(file, name, symbols)
        else: pages[name] = Page(name, file, text=readme.text() if name=='index' else file.read_text(encoding='utf-8'))
    failures = pages['guide/failures']
    failures.text = failures.text.replace('<!-- the table of faults -->', results.fault_tables())
    sources_page = pages['guide/sources']
    sources_page.text = sources_page.text.replace('<!-- the table of sources -->', results.source_table())
    for page in pages.values():
        page.title,page.summary = heading(page.text) or page.name,quoted(page.text)
        page.text = re.sub(r'<!--.*?-->\n?', '', page.text, flags=re.S)   # the empty line after a table stays
        if page.name.split('/')[0] in PACKAGES:   # the path of a module is a better heading than a name such as `base`
            page.text = re.sub(r'^# .*$', f'# {page.name}', page.text, count=1, flags=re.M)
    pages['benchmarks'] = Page('benchmarks', root/'nbs/benchmarks.md', 'Benchmarks', text=results.page())
    pages['reference'] = Page('reference', root/'nbs/reference.md', 'Overview', text=reference(pages, symbols))
    pages['decisions'] = Page('decisions', root/'nbs/decisions.md', 'Overview', text=decisions(pages))
    return pages,symbols

def palette(scheme, mode, icon, other):
    "Colours for systems that are set to `mode`, and a button for the other ones"
    return dict(media=f'(prefers-color-scheme: {mode})', scheme=scheme, primary='deep orange',
                toggle=dict(icon=f'material/{icon}', name=f'Show the {other} colours'))

CONFIG = dict(site_name=package, docs_dir='pages', site_dir=str(site_dir), use_directory_urls=False, plugins=['search'],
    extra_css=['style.css'], extra=dict(polyfills=['iframe-worker.js']),
    theme=dict(name='material', font=False,
               palette=[palette('default', 'light', 'weather-night', 'dark'),
                        palette('slate', 'dark', 'weather-sunny', 'light')],
               features=['navigation.sections','navigation.top','navigation.prune','content.code.copy','toc.follow']),
    markdown_extensions=['tables','attr_list','md_in_html','admonition','pymdownx.details','pymdownx.superfences',
                         {'pymdownx.highlight':dict(use_pygments=True, line_spans='line')},
                         {'toc':dict(permalink=True, toc_depth=3)}],
    validation=dict(nav=dict(omitted_files='warn', not_found='warn'),
                    links=dict(not_found='warn', anchors='warn', unrecognized_links='warn')))
# What is left of a long line of code is indented in the next one. Names in tables are not broken.
# Outputs have a bar at their left. Pictures are drawn for white paper.
CSS = """.output { overflow-x: auto; font-size: .7rem; }
.md-typeset table:not([class]) { font-size: .7rem; }
.md-grid { max-width: 76rem; }
.md-typeset td code, .md-typeset th code { word-break: normal; overflow-wrap: normal; }
.md-typeset pre > code { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .65rem; }
.md-typeset pre > code > span[id^="line-"] { display: block; padding-left: 4ch; text-indent: -4ch; }
.md-typeset .printed pre > code { border-left: .15rem solid var(--md-primary-fg-color); }
[data-md-color-scheme="slate"] .md-content img { background: #fff; }
"""

def with_outputs(pages)->list:
    "Put what the examples of the guide print and draw into its pages; returns one line for each page that failed"
    files,problems = guide.pages(),[]
    results = guide.run_pages(files, pictures=True)
    for file in files:
        page,result = pages[f'guide/{file.stem}'],results.get(file.stem, dict(outputs=[], failed='it was not run'))
        if result['failed']: problems.append(f"{page.name}: examples: {result['failed'].strip().splitlines()[-1]}")
        def add_image(data, page=page):
            name = f"{page.name.replace('/', '-')}-{len(page.images)}.png"
            page.images[name] = data
            return relative(page, f'images/{name}')
        page.text = guide.insert(page.text, result['outputs'], add_image)
    return problems

def embed_index(
    site:Path # Folder of the site
):
    "Write the index of the search as a script too: a page that is opened from a file may load scripts only"
    index = json.loads((site/'search/search_index.json').read_text(encoding='utf-8'))
    (site/'search/search_index.js').write_text(f'var __index = {json.dumps(index)}')

def build()->list:
    "Write the pages and build the site; returns one line for each problem, such as a link to a missing file"
    pages,symbols = collect()
    failed = with_outputs(pages)
    linker = Linker(pages, symbols)
    for folder in (pages_dir, site_dir): shutil.rmtree(folder, ignore_errors=True)
    write_pages(pages, linker)
    config = {**CONFIG, 'nav':navigation(pages)}
    if linker.repository: config['repo_url'] = linker.repository
    (pages_dir/'mkdocs.yml').write_text(json.dumps(config, indent=1))   # JSON is YAML
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '-f', str(pages_dir/'mkdocs.yml')]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, 'NO_MKDOCS_2_WARNING':'1'})
    problems = linker.problems+failed
    if run.returncode==0:
        embed_index(site_dir)
        return problems
    return problems+[f'mkdocs: {line}' for line in (run.stdout+run.stderr).splitlines() if line.strip()]

def write_pages(pages, linker):
    "Write the Markdown of all pages, their images and the style sheet to `_proc/pages`"
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
    shutil.copy(root/'tools/site/iframe-worker.js', pages_dir/'pages')

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
    "Finds internal links, anchors and resources that do not exist, and resources that another server would provide"
    parsed = {}
    for file in sorted(site.rglob('*.html')):
        parsed[file.resolve()] = links = Links()
        links.feed(file.read_text(encoding='utf-8'))
    problems = []
    for file,links in parsed.items():
        where = file.relative_to(site.resolve())
        if where.name=='404.html': continue   # its links are absolute, and the address of the site is not known
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
    except ImportError: sys.exit('docs: mkdocs-material is not installed. Run `make docs`, or pip install ".[docs]"')
    problems = build()
    if options.check: problems += check()
    for problem in dict.fromkeys(problems): print(problem, file=sys.stderr)
    if problems: sys.exit(f'docs: {len(set(problems))} problems')
    n_pages,name = len(list(site_dir.rglob('*.html'))),site_dir.name
    print(f'{n_pages} pages in {name}. Open {name}/index.html')

if __name__=='__main__': main()
