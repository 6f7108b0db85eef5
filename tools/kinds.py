"Writes the table of the kinds of samples into the guide: `make kinds`"
import re
from pathlib import Path

PAGE = Path(__file__).parents[1]/'nbs/guide/kinds.md'
PLACE = re.compile(r'(<!-- kinds: begin -->\n).*?(<!-- kinds: end -->)', re.S)

def text(
    page:str # Content of the page
)->str:
    "The page with the table that the code has now; raises `ValueError` if it has no place for one"
    from fastai_remote.load.kinds import kinds_table
    if not PLACE.search(page): raise ValueError('the page has no place for the table: <!-- kinds: begin --> and end')
    return PLACE.sub(lambda found: f'{found[1]}{kinds_table()}\n{found[2]}', page)

if __name__=='__main__': PAGE.write_text(text(PAGE.read_text(encoding='utf-8')), encoding='utf-8')
