"README.md from nbs/index.ipynb: its text, its code, and what the code printed"
import json
from pathlib import Path

root = Path(__file__).parents[1]

def output(o):
    "A cell's output as markdown"
    if o['output_type']=='stream': return '\n'.join(['```', ''.join(o['text']).rstrip(), '```'])
    d = o.get('data', {})
    if 'text/markdown' in d: return ''.join(d['text/markdown'])
    return '\n'.join(['```', ''.join(d['text/plain']).rstrip(), '```']) if 'text/plain' in d else ''

def cell(c):
    "A cell as markdown; hidden ones are left out"
    s = ''.join(c['source']).strip()
    if c['cell_type']=='markdown': return s
    if s.startswith('#| hide'): return ''
    return '\n\n'.join([f'```python\n{s}\n```', *map(output, c['outputs'])])

if __name__=='__main__':
    nb = json.loads((root/'nbs/index.ipynb').read_text())
    text = '\n\n'.join(t for t in map(cell, nb['cells']) if t)
    (root/'README.md').write_text(f'<!-- made by `make readme` from nbs/index.ipynb -->\n\n{text}\n')
