"""Run the Python examples of the guide, and insert what they print and draw into the pages of the site

The tests run the same programs. The pages in `nbs/guide` contain no outputs."""
import base64, json, os, re, subprocess, sys, tempfile
from pathlib import Path

root = Path(__file__).resolve().parents[1]
block = re.compile(r'^```python\n(.*?)^```', re.M|re.S)

PRELUDE = '''
import json, os, random, sys, tarfile, warnings
from io import BytesIO
from pathlib import Path
warnings.filterwarnings('ignore')
import numpy as np
from PIL import Image, ImageDraw
from fastai_remote import *
from fastai_remote.store.server import redis_server

server = redis_server()
numbers = np.random.default_rng(0)
def face(is_dog):
    "The face of a cat or a dog on a noisy ground"
    image = Image.fromarray(numbers.integers(190, 256, (80, 96, 3), dtype=np.uint8))
    draw,(x,y) = ImageDraw.Draw(image),(numbers.integers(-8, 9, 2)+[48,42]).tolist()
    fur = tuple(numbers.integers(70, 170, 3).tolist())
    for side in -1,1:
        if not is_dog: draw.polygon([x+side*26, y-34, x+side*24, y, x+side*4, y-18], fill=fur)
    draw.ellipse([x-24, y-22, x+24, y+26], fill=fur)
    for side in -1,1:
        if is_dog: draw.ellipse([x+side*24-8, y-22, x+side*24+8, y+20], fill='saddlebrown')
        draw.ellipse([x+side*10-4, y-8, x+side*10+4, y], fill='white' if is_dog else 'gold')
        draw.ellipse([x+side*10-2, y-6, x+side*10+2, y-2], fill='black')
    draw.ellipse([x-5, y+4, x+5, y+11], fill='black' if is_dog else 'pink')
    return image
for i in range(48):
    file = Path('images')/('cat','dog')[i%2]/f'{i}.jpg'
    file.parent.mkdir(parents=True, exist_ok=True)
    face(i%2).save(file)
Path('quickdraw').mkdir()
for word in 'circle','line':
    around,along,drawings = np.linspace(0, 2*np.pi, 20),np.linspace(20, 230, 12),[]
    for k in range(40):
        x,y = (128+(60+k)*np.cos(around), 128+(60+k)*np.sin(around)) if word=='circle' else (along, 40+3*k+along/4)
        drawings.append([[x.round(1).tolist(), y.round(1).tolist(), [*range(0, 10*len(x), 10)]]])
    about = dict(word=word, countrycode='DE', timestamp='2017-03-01 20:41:36.70725 UTC', recognized=True)
    lines = [dict(about, key_id=str(k), drawing=d) for k,d in enumerate(drawings)]
    (Path('quickdraw')/f'{word}.ndjson').write_text(chr(10).join(map(json.dumps, lines)))
Path('theirs').mkdir()
with tarfile.open('theirs/a.tar', 'w') as tar:
    for k,f in enumerate(sorted(Path('images').rglob('*.jpg'))[:10]):
        for suffix,data in (('jpg', f.read_bytes()), ('cls', str(k%2).encode())):
            info = tarfile.TarInfo(f'{k:04}.{suffix}')
            info.size = len(data)
            tar.addfile(info, BytesIO(data))
to_redis(image_samples('images', label=lambda p: p.parent.name), server.url, 'pets', num_workers=1, progress=False)
if STARTS_WITHOUT: RedisStore.delete(server.url, 'pets')
s3_url = ''
if USES_S3:
    import logging, s3fs
    from moto.server import ThreadedMotoServer
    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    s3 = ThreadedMotoServer(ip_address='127.0.0.1', port=0)
    s3.start()
    s3_url = 'http://{}:{}'.format(*s3.get_host_and_port())
    s3fs.S3FileSystem(endpoint_url=s3_url, key='ACCESS_KEY', secret='SECRET_KEY').mkdir('bucket')
'''

def examples(
    file:Path # A page of the guide
)->list: # Source code of each block
    "The Python examples of a page"
    return block.findall(file.read_text(encoding='utf-8'))

def pages()->list:
    "The pages of the guide that have examples"
    return [f for f in sorted((root/'nbs/guide').glob('*.md')) if examples(f)]

def indent(code): return '\n'.join(f'    {line}' if line.strip() else '' for line in code.splitlines())

def program(
    file:Path # A page of the guide
)->str: # Python
    "The examples of a page as one program, with private servers in place of `redis://localhost` and of S3"
    code = ''.join(f'{example}end_of_example()\n' for example in examples(file))
    prelude = PRELUDE.replace('USES_S3', str('s3://' in code)).replace('STARTS_WITHOUT', str(file.stem=='quick_start'))
    body = code.replace("'redis://localhost'", 'server.url').replace("'http://localhost:9000'", 's3_url')
    start = "start_of_examples({server.url:'redis://localhost', s3_url:'http://localhost:9000'})"
    return f'{prelude}\n{start}\ntry:\n{indent(body)}\nfinally: server.close()\n'

RUNNER = '''
import base64, contextlib, io, json, os, shutil, subprocess, sys, traceback, warnings
warnings.simplefilter("ignore")

def figures():
    "The open figures as PNG files; they are closed"
    pyplot,found = sys.modules.get("matplotlib.pyplot"),[]
    for number in pyplot.get_fignums() if pyplot else []:
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=72, bbox_inches="tight")
        found.append(base64.b64encode(file.getvalue()).decode())
    if pyplot: pyplot.close("all")
    return found

def page_of(view):
    "The page of a dataset as a PNG file, in a list; an empty one without Chromium, and where none is wanted"
    chromium,file = shutil.which("chromium") if os.environ["PICTURES"] else None,os.path.abspath("page.png")
    if chromium is None: return []
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
               "--window-size=1000,560", "--virtual-time-budget=5000", f"--screenshot={file}", view.url]
    try: subprocess.run(command, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired: return []
    if not os.path.exists(file): return []
    with open(file, "rb") as f: return [base64.b64encode(f.read()).decode()]

def run(page):
    "Run the program of a page; returns the outputs of its examples, and what went wrong"
    outputs,printed,names = [],io.StringIO(),{os.getcwd()+os.sep:""}
    def taken():
        text = printed.getvalue()
        printed.seek(0)
        printed.truncate()
        return text
    def start_of_examples(private_names):
        taken()
        names.update(private_names)
    def end_of_example():
        text,pictures = taken(),figures()
        browser = sys.modules.get("fastai_remote.view.browser")
        for view in [o for o in space.values() if browser and isinstance(o, browser.View) and o.url not in names]:
            names[view.url] = "http://localhost:8800/…/"
            pictures += page_of(view)
        for private,public in names.items(): text = text.replace(private, public) if private else text
        outputs.append({"text":text, "figures":pictures})
    space = {"__name__":"__main__", "start_of_examples":start_of_examples, "end_of_example":end_of_example}
    try:
        with contextlib.redirect_stdout(printed), open("program.py", encoding="utf-8") as f:
            exec(compile(f.read(), f"{page}.md", "exec"), space)
    except BaseException: return outputs,traceback.format_exc()
    return outputs,None

if __name__=="__main__":
    results,start = {},os.getcwd()
    for page in sys.argv[1:]:
        os.chdir(os.path.join(start, page))
        outputs,failed = run(page)
        results[page] = {"outputs":outputs, "failed":failed}
    with open(os.path.join(start, "results.json"), "w", encoding="utf-8") as f: json.dump(results, f)
'''

def write_programs(
    folder:Path, # Gets `run.py`, and a folder for each page
    files:list # Pages of the guide
)->dict: # Environment of `run.py`
    "Write the programs of the pages. `run.py PAGE...` runs them in `folder` and writes `results.json`."
    for file in files:
        (folder/file.stem).mkdir()
        (folder/file.stem/'program.py').write_text(program(file), encoding='utf-8')
    (folder/'run.py').write_text(RUNNER)
    # where an example does not ask for workers, there are none: they start slowly
    return {**os.environ, 'PYTHONPATH':str(root), 'MPLBACKEND':'agg', 'XDG_CACHE_HOME':str(folder), 'HOME':str(folder),
            'LOKY_MAX_CPU_COUNT':'1'}

def read_results(folder): return json.loads((folder/'results.json').read_text(encoding='utf-8'))

def run_pages(
    files:list, # Pages of the guide
    pictures:bool=False # Take pictures of the pages of datasets, too? It starts a browser for each
)->dict: # `{page: {'outputs': ..., 'failed': ...}}`; empty if the programs could not be run
    "Run the examples of the pages in one new process"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        env = {**write_programs(folder, files), 'PICTURES':'1' if pictures else ''}
        command = [sys.executable, '-W', 'ignore', 'run.py', *(f.stem for f in files)]
        try: subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=800)
        except subprocess.TimeoutExpired: return {}
        return read_results(folder) if (folder/'results.json').exists() else {}

def shown(
    text:str # What an example printed
)->str: # As a terminal shows it
    "The lines of `text`, each with what remains of it after progress bars and colours"
    lines = [re.sub(r'\x1b\[[0-9;]*[A-Za-z]', '', line).rpartition('\r')[2].rstrip() for line in text.split('\n')]
    return '\n'.join(line for line in lines if line)

def printed(text:str)->str:
    "What code printed, as Markdown"
    return f'```{{ .text .printed }}\n{text.rstrip()}\n```'

def insert(
    text:str, # Markdown of a page
    outputs:list, # `{'text', 'figures'}` of its examples, in their order
    add_image # Called with the bytes of a PNG file; returns its address
)->str: # Markdown
    "Put what each example prints and draws below it"
    rest = iter(outputs)
    def with_output(match):
        output = next(rest, None)
        if output is None: return match[0]
        parts,lines = [match[0]],shown(output['text'])
        if lines: parts.append(printed(lines))
        parts += [f'![output]({add_image(base64.b64decode(figure))})' for figure in output['figures']]
        return '\n\n'.join(parts)
    return block.sub(with_output, text)
