// A grid that scrolls through any number of samples. Browsers limit the height of an element, so for many rows the
// scrollbar stands for more pixels than it has: dragging it jumps, and what moves less than a screen moves by pixels.

const MOST_PIXELS = 4e6, CAPTION = 42;
const BLOCK = 24, MOST_BLOCKS = 15, KEPT = 60;   // samples of a block; blocks of a request; blocks that are kept

export class Grid {
  // `fetchTiles(first, n, signal)` -> tiles; `fill(node, tile, position)` shows one; `moved()` is called after
  // scrolling
  constructor(scroller, fetchTiles, fill, moved) {
    Object.assign(this, {scroller, fetchTiles, fill, moved});
    this.layer = scroller.querySelector('#layer');
    this.space = scroller.querySelector('#space');
    this.n = 0; this.top = 0; this.seen = 0; this.forward = 1;
    this.blocks = new Map(); this.nodes = new Map(); this.request = null; this.at = -1;
    scroller.addEventListener('scroll', () => this.scrolled());
    new ResizeObserver(() => this.resize()).observe(scroller);
  }

  // --- Sizes, in pixels: `top` is how far all rows are scrolled, `span` the most that it can be

  resize() {
    const first = this.columns ? this.first() : 0;
    this.width = this.scroller.clientWidth; this.height = this.scroller.clientHeight;
    if (!this.width || !this.height) return;
    this.columns = Math.max(2, Math.floor(this.width/(this.width<600 ? 118 : 152)));
    this.side = this.width/this.columns;
    this.tall = Math.round(this.side)+CAPTION;
    this.scrollTo(first);
  }
  get rows() { return Math.ceil(this.n/this.columns); }
  get span() { return Math.max(0, this.rows*this.tall-this.height); }
  get pixels() { return Math.min(this.span, MOST_PIXELS); }
  first() { return Math.max(0, Math.min(this.n-1, Math.round(this.top/this.tall)*this.columns)); }

  scrolled() {
    const to = this.scroller.scrollTop, by = to-this.seen;
    if (!by) return;
    this.seen = to;
    this.forward = Math.sign(by);
    const isFine = this.pixels===this.span || Math.abs(by)<this.height;
    if (isFine && to>0 && to<this.pixels-1) this.top += by; else this.top = to/Math.max(this.pixels, 1)*this.span;
    this.draw(60);   // while the scrollbar is dragged, nothing is read
    clearTimeout(this.resting);
    this.resting = setTimeout(() => { this.align(); this.moved(); }, 200);
  }

  // Puts the scrollbar where `top` is
  align() {
    const to = this.span ? this.top/this.span*this.pixels : 0;
    this.scroller.scrollTop = to;
    this.seen = this.scroller.scrollTop;
  }

  scrollTo(position) {
    this.top = Math.max(0, Math.min(this.span, Math.floor(position/this.columns)*this.tall));
    this.space.style.height = `${this.pixels}px`;
    this.align();
    this.draw();
  }

  // Moves as little as makes a position visible
  reveal(position) {
    const top = Math.floor(position/this.columns)*this.tall;
    if (top<this.top) this.scrollTo(position);
    else if (top+this.tall<=this.top+this.height) this.draw();
    else this.scrollTo(position-this.columns*(Math.floor(this.height/this.tall)-1));
  }

  // --- What is shown

  reset(n) { this.n = n; this.blocks.clear(); this.request?.abort(); this.request = null; this.restart(); }
  grow(n) { this.n = n; this.space.style.height = `${this.pixels}px`; this.draw(); }
  restart() {
    for (const [node] of this.nodes.values()) node.remove();
    this.nodes.clear();
    this.scrollTo(this.first());
  }
  redraw() { for (const entry of this.nodes.values()) entry[1] = undefined; this.draw(); }

  tile(position) { return this.blocks.get(Math.floor(position/BLOCK))?.[position%BLOCK]; }
  visible() {
    const row = Math.floor(this.top/this.tall), rows = Math.ceil(this.height/this.tall)+1;
    return [row*this.columns, Math.min(this.n, (row+rows)*this.columns)];
  }

  draw(pause = 0) {
    if (!this.columns) return;
    const [first, stop] = this.visible(), unused = [];
    for (const [position, entry] of this.nodes)
      if (position<first || position>=stop) { unused.push(entry[0]); this.nodes.delete(position); }
    for (let position = first; position<stop; position++) {
      let entry = this.nodes.get(position);
      if (!entry) {
        const node = unused.pop() || this.layer.appendChild(document.createElement('div'));
        this.nodes.set(position, entry = [node, undefined]);
        node.dataset.position = position;
      }
      const [node, shown] = entry, tile = this.tile(position) || null;
      node.style.width = `${this.side}px`; node.style.height = `${this.tall}px`;
      node.style.transform =
        `translate(${position%this.columns*this.side}px, ${Math.floor(position/this.columns)*this.tall-this.top}px)`;
      if (tile!==shown) { entry[1] = tile; this.fill(node, tile, position); }
    }
    for (const node of unused) node.remove();
    this.load(pause);
  }

  // --- What is loaded: the blocks that are visible, then those of the next screen; only one request at a time

  missing(first, stop) {
    const found = [];
    for (let block = Math.floor(Math.max(0, first)/BLOCK); block*BLOCK<Math.min(stop, this.n); block++)
      if ((this.blocks.get(block)?.length || 0)<Math.min(BLOCK, this.n-block*BLOCK)) found.push(block);
    return found;
  }

  load(pause = 0) {
    clearTimeout(this.waiting);
    const [first, stop] = this.visible(), screen = (stop-first)*this.forward;
    let wanted = this.missing(first, stop);
    if (this.request && wanted.some(block => !this.request.blocks.includes(block))) this.request.abort();
    else if (this.request) return;
    if (!wanted.length) {   // the server may first answer what the user does next
      wanted = this.missing(Math.min(first, first+screen), Math.max(stop, stop+screen));
      pause = 120;
    }
    if (wanted.length) this.waiting = setTimeout(() => this.read(wanted), pause);
  }

  async read(wanted) {
    const first = wanted[0], next = wanted.find(block => !wanted.includes(block+1))+1;
    const last = Math.min(next, first+MOST_BLOCKS)-1, request = new AbortController();
    request.blocks = wanted;
    this.request = request;
    const tiles = await this.fetchTiles(first*BLOCK, (last-first+1)*BLOCK, request.signal).catch(() => null);
    if (this.request!==request) return;
    this.request = null;
    if (request.signal.aborted) return this.load();
    if (!tiles) return;   // the page says why, and calls `load` when the server is back
    for (let block = first; block<=last; block++) {
      const some = tiles.slice((block-first)*BLOCK, (block-first+1)*BLOCK);
      while (some.length<Math.min(BLOCK, this.n-block*BLOCK)) some.push(null);
      this.blocks.delete(block);   // the last one that was read is the last one to go
      this.blocks.set(block, some);
    }
    for (const block of this.blocks.keys()) if (this.blocks.size>KEPT) this.blocks.delete(block); else break;
    this.draw();
  }
}
