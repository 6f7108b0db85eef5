"""Write README.md from nbs/index.ipynb: its text, its code, the outputs, and the table of benchmark results

`make readme` also makes its picture anew. Links in the notebook are relative to the root of the repository, as they are in README.md.
"""
import json, subprocess, sys
from pathlib import Path

import results

root = Path(__file__).resolve().parents[1]
MAX_WORDS = 700
PICTURE = root/'nbs/images/digits.png'
TABLE = '<!-- benchmark table -->' # In the text of the notebook; the table replaces it

def output(
    found:dict # An output of a cell
)->str: # Markdown
    "A cell's output as Markdown"
    if found['output_type']=='stream': return f"```\n{''.join(found['text']).rstrip()}\n```"
    data = found.get('data', {})
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    return f"```\n{''.join(data['text/plain']).rstrip()}\n```" if 'text/plain' in data else ''

def cell(
    found:dict # A cell of a notebook
)->str: # Markdown, empty for a hidden cell
    "A cell as Markdown"
    source = ''.join(found['source']).strip()
    if found['cell_type']=='markdown': return source
    if source.startswith('#| hide'): return ''
    parts = [f'```python\n{source}\n```', *map(output, found['outputs'])]
    return '\n\n'.join(part for part in parts if part)

def text()->str:
    "The text of README.md"
    notebook = json.loads((root/'nbs/index.ipynb').read_text(encoding='utf-8'))
    body = '\n\n'.join(part for part in map(cell, notebook['cells']) if part)
    return f'{body.replace(TABLE, results.readme_table())}\n'

def main():
    "Write README.md, and with `--picture` also the picture in it, from a run of the demo (a minute)"
    if '--picture' in sys.argv[1:]:
        subprocess.run([sys.executable, '-W', 'ignore', 'demo.py'], cwd=root, check=True)
        (root/'demo.png').replace(PICTURE)
    readme = text()
    n_words = len(readme.split())
    if n_words>MAX_WORDS:
        sys.exit(f'README.md would have {n_words} words, and {MAX_WORDS} are allowed. Shorten nbs/index.ipynb.')
    (root/'README.md').write_text(f'<!-- made by `make readme` from nbs/index.ipynb -->\n\n{readme}', encoding='utf-8')

if __name__=='__main__': main()
