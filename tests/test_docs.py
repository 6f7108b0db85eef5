"The README, the guide and the documentation site: short, true, and without links that lead nowhere"
import ast, importlib.util, json, math, re, subprocess, sys
from pathlib import Path

import pytest

root = Path(__file__).parents[1]
sys.path[:0] = [str(root), str(root/'tools')]
import demo, docs, guide, readme

GUIDE = sorted((root/'nbs/guide').glob('*.md'))
# The examples run in a fork of the process that the notebooks are run in
def of_the_guide(test): return pytest.mark.slow(pytest.mark.timeout(900)(pytest.mark.xdist_group('notebooks')(test)))
PLACEHOLDER = re.compile(r'example\.(?:org|com|net)|fastai-remote\.github|github\.com/fastai-remote', re.I)

def tracked():
    listed = subprocess.run(['git', 'ls-files'], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root/f for f in listed.splitlines()]

README = (root/'README.md').read_text(encoding='utf-8')

def test_the_readme_is_short():
    "It has one picture, and one table of six rows"
    assert len(README.split())<=700 and len(re.findall(r'!\[', README))==1
    assert len(re.findall(r'(?m)^\|', README))==2+6

def test_the_readme_is_what_the_notebook_says():
    assert README.partition('-->\n\n')[2]==readme.text(), 'run `make readme`'

def test_the_picture_of_the_readme_is_one_of_this_demo():
    from PIL import Image
    said = Image.open(readme.PICTURE).text
    assert said['Description']=='; '.join(demo.titles(9, True)), 'run `make readme`'
    assert re.fullmatch(r'Handwritten digits, trained from Redis: 9[89]\.\d% accuracy', said['Title'])
    shapes = [demo.grid_shape(n) for n in range(1, 20)]
    assert all(math.prod(shape)<=n for n,shape in enumerate(shapes, 1)) and shapes[8:]==[(3,3)]*11

def test_labels_of_the_demo_are_those_of_the_command_line(tmp_path):
    from fastai_remote.cli.command import read_label
    file = tmp_path/'pets'/'great_pyrenees_12.jpg'
    for pattern,label in ((r'^(.+)_[0-9]+', 'great_pyrenees'), (r'([^/]+)_\d+.jpg$', 'great_pyrenees'),
                          (r'(\w+)/[^/]*$', 'pets'), (r'(\d+)', '12')):
        assert demo.label_of(tmp_path, pattern)(file)==read_label(pattern)(file)==label
    for find in demo.label_of(tmp_path, r'^(\d+)'),read_label(r'^(\d+)'):
        with pytest.raises(ValueError, match=r'\^\(\\+d\+\)'): find(file)

def test_numbers_of_the_readme_table_are_those_of_the_result_files():
    peers = json.loads((root/'tests/bench/results/peers.json').read_text())
    row = re.search(r'(?m)^\| photographs in Redis.*$', README)[0]
    photographs = peers['results']['photographs']
    speeds = [photographs[k]['samples_cpu_s']['median'] for k in ('ours, from_redis', 'stock fastai, files')]
    assert [float(c) for c in row.split('|')[2:4]]==[round(s) for s in speeds]

def test_no_address_is_a_placeholder():
    found = []
    for file in tracked():
        if file==Path(__file__) or file.suffix in ('.png','.so','.tar','.idx') or not file.exists(): continue
        text = file.read_text(encoding='utf-8', errors='ignore')
        found += [f'{file.relative_to(root)}: {m[0]}' for m in PLACEHOLDER.finditer(text)]
    assert not found

@pytest.mark.slow
def test_module_headers_name_their_page():
    "At the end of a module's docstring; in the first cell of its notebook, after the description, if it has one"
    for file in [*docs.plain_modules(), *(root/'nbs').rglob('[0-9]*.ipynb')]:
        page = docs.page_name(file)
        module = (root/'fastai_remote'/f'{page}.py').read_text(encoding='utf-8')
        header = ast.get_docstring(ast.parse(module))
        assert header.endswith(f'\n\nDocs: page `{page}`'), page

def test_a_module_without_a_notebook_has_a_page(tmp_path):
    "Its reasons, its comments as text, and its definitions"
    symbols,file = {},tmp_path/'sums.py'
    file.write_text('"""Sums\n\nThey add up.\n\nDocs: page `store/sums`"""\nimport math\n\n# --- Two\n\n# Only two.\n\n'
                    'def add(\n    a, # First\n):\n    "Adds `a`"\n    # not text\n\n    return a\n\n# of `x`\nx = 1\n')
    text = docs.module_page(file, 'store/sums', symbols).text
    assert text.startswith('# store/sums\n\n> Sums\n\nThey add up.\n\n## Two\n\nOnly two.\n\n### add')
    assert '| `a` |  |  | First |' in text and '    # of `x`\n    x = 1' in text
    assert symbols['add'].summary=='Adds `a`' and 'import math' not in text

def test_the_glossary_explains_names_that_are_there():
    import fastai_remote
    text = (root/'nbs/guide/glossary.md').read_text(encoding='utf-8')
    names = [name for row in re.findall(r'(?m)^\| (`.*?) \|', text) for name in re.findall(r'`(\w+)`', row)]
    assert not set(names)-set(dir(fastai_remote)) and len(set(names))==len(names)
    assert {'mix','simplify','Fetch','MeanImage','RemoteItems','RedisBlock'}<=set(names)

def test_each_name_of_the_star_import_has_an_example():
    "In a notebook, or on a page of the guide"
    import fastai_remote
    cells = [cell for file in (root/'nbs').rglob('*.ipynb') for cell in json.loads(file.read_text())['cells']]
    code = [''.join(cell['source']) for cell in cells if cell['cell_type']=='code']
    examples = [text for text in code if not re.match(r'#\| *(export|hide|default_exp)', text)]
    words = set(re.findall(r'\w+', '\n'.join(examples+[text for file in GUIDE for text in guide.examples(file)])))
    assert not set(fastai_remote.__all__)-words

@pytest.fixture(scope='module')
def results_of_the_guide(interpreters, tmp_path_factory):
    "`{page: its outputs, and what went wrong}`; one process runs all pages, against a private Redis and an S3 server"
    folder,pages = tmp_path_factory.mktemp('guide'),guide.pages()
    env = {**guide.write_programs(folder, pages), 'PICTURES':''}
    interpreters.run(folder/'run.py', *[f.stem for f in pages], env=env, cwd=folder, ours=True, check=True)
    return guide.read_results(folder)

@of_the_guide
def test_examples_of_the_guide_run_and_their_outputs_are_recorded(results_of_the_guide):
    "What is printed and drawn, example by example, with the public addresses"
    for file in guide.pages():
        result,codes = results_of_the_guide[file.stem],guide.examples(file)
        assert not result['failed'], f"{file.stem}: {result['failed']}"
        assert len(result['outputs'])==len(codes)
        for code,output in zip(codes, result['outputs']):
            if re.search(r'^print\(', code, re.M): assert guide.shown(output['text']), code
            assert '127.0.0.1' not in output['text'], code
            if '.view(' in code:   # `make docs` takes a picture of the page
                assert 'http://localhost:8800/…/' in output['text'] and not output['figures'], code
                continue
            assert bool(output['figures'])==any(name in code for name in ('show_','.show(')), code

@pytest.mark.slow
@pytest.mark.parametrize('package', ['litdata','streaming','ffcv'])
def test_examples_of_others_run_where_they_are_installed(package, tmp_path):
    pytest.importorskip(package, reason=f'{package} is not installed')
    file = root/'nbs/guide/coming_from.md'
    theirs = re.findall(r'(?ms)^```py\n(.*?)^```', file.read_text(encoding='utf-8'))
    code, = [code for code in theirs if re.search(rf'^(import|from) {package}\b', code, re.M)]
    (tmp_path/'script.py').write_text(f'{guide.examples(file)[0]}\n{code}')
    subprocess.run([sys.executable, '-W', 'ignore', 'script.py'], cwd=tmp_path, check=True)
    assert len(list(tmp_path.glob('from_*/*.tar')))>=1

def test_outputs_are_below_their_examples():
    text = '```python\nprint(1)\n```\n\nText.\n\n```python\nx.show()\n```\n\n```bash\nls\n```\n'
    outputs = [dict(text='10%\r100%\r\x1b[1m1\x1b[0m\n', figures=[]), dict(text='', figures=['UE5H'])]
    images = []
    def add_image(data): return images.append(data) or 'a.png'
    assert guide.insert(text, outputs, add_image)==text.replace(
        'print(1)\n```', 'print(1)\n```\n\n```{ .text .printed }\n1\n```').replace(
        'x.show()\n```', 'x.show()\n```\n\n![output](a.png)')
    assert images==[b'PNG']

@pytest.fixture(scope='module')
def site_pages(): return docs.collect()[0]

def titles(entries): return [next(iter(e)) for e in entries]

@of_the_guide
def test_tutorials_are_in_the_order_in_which_one_reads_them_and_decision_notes_are_folded_away(site_pages):
    "Each tutorial has a place; those on engines are last. A section within a section is closed until one opens it"
    assert sorted(docs.TUTORIALS)==sorted(f.stem for f in (root/'nbs/tutorials').glob('*.ipynb'))
    entries = docs.navigation(site_pages)
    section = next(e['Tutorials'] for e in entries if 'Tutorials' in e)
    names = [Path(next(iter(e.values()))).stem for e in section]
    assert names[:3]==['images', 'shards', 'drawings'] and names[-3:]==['spark', 'dask', 'ray']
    assert 'Decisions' not in titles(entries)
    inside = [s for e in entries for s in e.values() if isinstance(s, list) and 'Decisions' in titles(s)]
    assert len(inside)==1

def test_the_search_works_from_files(tmp_path):
    "The index is a script, because a page that is opened from a file may not fetch one; so is the worker"
    (tmp_path/'search').mkdir()
    (tmp_path/'search/search_index.json').write_text('{"docs": [{"text": "a\u2028b"}]}')
    docs.embed_index(tmp_path)
    assert (tmp_path/'search/search_index.js').read_text()=='var __index = {"docs": [{"text": "a\\u2028b"}]}'
    assert docs.CONFIG['extra']['polyfills']==['iframe-worker.js'] and (root/'tools/site/iframe-worker.js').exists()

def test_the_site_is_dark_where_the_system_is():
    media = {p['scheme']:p['media'] for p in docs.CONFIG['theme']['palette']}
    assert media=={s:f'(prefers-color-scheme: {m})' for s,m in (('default','light'), ('slate','dark'))}

def test_links_of_the_guide_and_the_readme_lead_to_files():
    bad = []
    for file in [*GUIDE, root/'README.md', root/'CONTRIBUTING.md', root/'CHANGELOG.md']:
        for to in re.findall(r'\]\(([^)\s#]+)[^)]*\)', file.read_text(encoding='utf-8')):
            if '://' not in to and not (file.parent/to).exists(): bad.append(f'{file.name}: {to}')
    assert not bad

@of_the_guide
def test_the_site_builds_and_its_links_are_right(results_of_the_guide, monkeypatch):
    "As `make docs` builds it, which runs the examples of the guide itself"
    if not all(map(importlib.util.find_spec, ('mkdocs', 'material'))): pytest.skip('the extra [docs] is not installed')
    monkeypatch.setattr(guide, 'run_pages', lambda files, pictures: results_of_the_guide)
    monkeypatch.setattr(sys, 'argv', ['docs.py', '--check'])
    docs.main()   # exits if there is a problem
    page = (root/'_docs/guide/drawings.html').read_text(encoding='utf-8')
    assert re.search(r'class="[^"]*printed', page)
    assert 'images/guide-drawings-0.png' in page and 'iframe-worker.js' in page
    assert (root/'_docs/search/search_index.js').exists()

def test_the_site_shows_signatures_as_python_does_and_describes_arguments_by_the_comments_at_them():
    source = 'def f(\n    # First line,\n    # second line\n    a,\n    b=1, # Beside it\n    c=2,\n): return a'
    table = docs.parameters(docs.ast.parse(source).body[0], docs.comments(source))
    descriptions = [row.split(' | ')[-1].rstrip(' |') for row in table.splitlines()[2:]]
    assert descriptions==['First line, second line', 'Beside it', '']
    for text in ('f(a, /, b=1, *c, d, **e)', 'f(a, *, b=1)', 'f(a, b=1, /)'):
        assert docs.signature('f', docs.ast.parse(f'def {text}: pass').body[0])==text

@of_the_guide
def test_tables_show_pipes_and_end_before_the_text_that_follows_them(site_pages):
    "mkdocs shows a backslash in inline code, and reads a line directly below a table as its last row"
    assert docs.unparsed(docs.ast.parse('str|None').body[0].value)=='`str | None`'
    assert docs.cell_text('a|b, or `c|d`')=='a\\|b, or `c|d`'
    text = site_pages['guide/kinds'].text
    assert '| a codec of numbers |' in text and not re.search(r'(?m)^\|.*\n(?=[^|\n])', text)

def test_code_of_the_guide_fits_the_column():
    long = [line for file in GUIDE for code in guide.examples(file) for line in code.splitlines() if len(line)>100]
    assert not long

def test_a_broken_link_is_found(tmp_path):
    (tmp_path/'a.html').write_text('<h1 id="here">A</h1> <a href="#here">here</a> <a href="b.html">b</a> '
                                   '<a href="#there">there</a> <img src="https://elsewhere/x.png">')
    assert docs.check(tmp_path)==['a.html: b.html does not exist', 'a.html: #there: no such anchor',
                                  'a.html: loads https://elsewhere/x.png']
