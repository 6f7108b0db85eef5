// The page of a dataset. Whatever comes from the dataset becomes text (`textContent`) or a picture, and never HTML.

import {Grid} from './grid.js';

const $ = id => document.getElementById(id);
const state = {dataset: null, query: {}, id: '', n: 0, position: 0, number: null, marks: {drop: [], set: {}}, lost: false};

// An element with properties and children; a child that is no element becomes text
function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.filter(child => child!==null && child!==''));
  return node;
}
// Replaces the children of a node, without those that are null
const put = (node, ...children) => node.replaceChildren(...children.filter(child => child!==null));
const button = (text, onclick, props = {}) => el('button', {type: 'button', textContent: text, onclick, ...props});
const count = n => Number(n).toLocaleString('en');
const bytes = n => n<1000 ? `${n} B` : n<1e6 ? `${(n/1e3).toFixed(1)} KB` : n<1e9 ? `${(n/1e6).toFixed(1)} MB` : `${(n/1e9).toFixed(1)} GB`;

// --- Requests

async function send(name, args, body, signal) {
  const uid = state.dataset?.uid, known = uid===undefined ? {} : {uid};
  const options = body ? {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({...body, ...known}), signal} : {signal};
  const response = await fetch(body ? name : `${name}?${new URLSearchParams({...args, ...known})}`, options);
  const found = await response.json();
  if (!response.ok) throw Object.assign(new Error(found.error), found, {status: response.status});
  return found;
}

// As `send`, and shows errors; `get` and `post` reject after that
async function ask(name, args, body, signal) {
  try { return await send(name, args, body, signal); }
  catch (error) {
    if (error.name==='AbortError') throw error;
    if (error.is_other) await start();
    else if (error.is_gone) await find();
    else if (error.status===503 || error.status===undefined) lost(error.status ? error.message : 'The process that serves this page does not answer');
    else if (!error.is_newer) message(error.message, /replaced since/.test(error.message) ? ['Show the version that is there now', () => reopen()] : null);
    throw error;
  }
}
const get = (name, args = {}, signal) => ask(name, args, null, signal);
const post = (name, body = {}) => ask(name, null, body);

function message(text, action = null) {
  const [span, offer] = $('message').children;
  $('message').hidden = !text;
  span.textContent = text;
  offer.hidden = !action;
  if (action) [offer.textContent, offer.onclick] = action;
}

// Shows that the server is away, and goes on when it is back
async function lost(text) {
  message(`${text}. Trying again …`);
  if (state.lost) return;
  state.lost = true;
  for (;;) {
    await new Promise(done => setTimeout(done, 1500));
    try { await send('tiles', {first: 0, n: 1}); break; }
    catch (error) { if (error.status && error.status!==503) break; }
  }
  state.lost = false;
  message('');
  if (!state.dataset) return start();
  grid.load();
  if (!$('sample').hidden) showSample(state.number);
}

// --- The address: the filter, and where the page is

const FILTERS = ['split', 'label_field', 'label', 'range_field', 'low', 'high', 'has', 'text', 'sort'];

function readAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  state.query = Object.fromEntries(FILTERS.filter(name => given[name]).map(name => [name, given[name]]));
  return given;
}

function writeAddress() {
  const shown = ['sample', 'overview', 'changes'].find(id => !$(id).hidden);
  const args = {...state.query};
  if (grid.first()) args.at = grid.first();
  if (shown) args[shown] = shown==='sample' ? state.number : '1';
  const hash = '#'+new URLSearchParams(args);
  if (hash!==location.hash) history.replaceState(null, '', hash);
}

// --- Filters and sorts

function options(select, pairs) { select.replaceChildren(...pairs.map(([value, text]) => el('option', {value, textContent: text}))); }

function fillForm() {
  const {fields, labels, splits, has_texts} = state.dataset, names = some => some.map(name => [name, name]);
  const numbers = fields.filter(f => f.is_number).map(f => f.name), some = fields.filter(f => f.may_lack).map(f => f.name);
  options($('split'), [['', 'all'], ...names(Object.keys(splits))]);
  options($('label_field'), names(Object.keys(labels)));
  options($('range_field'), names(numbers));
  options($('has'), [['', 'anything'], ...names(some)]);
  const orders = numbers.flatMap(name => [[name, `${name}, smallest first`], ['-'+name, `${name}, largest first`]]);
  if (numbers.includes('loss.f4')) orders.unshift(['-loss.f4', 'hardest first (loss.f4)']);
  options($('sort'), [['', 'number'], ...orders]);
  $('split-part').hidden = !Object.keys(splits).length;
  $('label-part').hidden = !Object.keys(labels).length;
  $('label_field').hidden = Object.keys(labels).length<2;
  $('range-part').hidden = $('sort-part').hidden = !numbers.length;
  $('has-part').hidden = !some.length;
  $('text-part').hidden = !has_texts;
  for (const name of FILTERS) if (state.query[name]) $(name).value = state.query[name];
  suggest();
}

function suggest() { options($('labels'), (state.dataset.labels[$('label_field').value] || []).map(label => [label, label])); }

function readForm() {
  const values = Object.fromEntries(FILTERS.map(name => [name, $(name).value.trim()]));
  if (!values.label) delete values.label_field;
  if (!values.low && !values.high) delete values.range_field;
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value));
}

// Finds the samples of `state.query`, and shows them as they are found
async function find(position = 0) {
  const {sort = '', low, high, ...rest} = state.query, wanted = {...rest};
  if (sort) Object.assign(wanted, {sort: sort.replace(/^-/, ''), descending: sort[0]==='-'});
  if (low) wanted.low = Number(low);
  if (high) wanted.high = Number(high);
  const query = state.finding = {}, isOld = () => state.finding!==query;
  let found = await post('query', {query: wanted});
  if (isOld()) return;
  state.id = found.id;
  grid.reset(sort && found.state==='running' ? 0 : found.n);
  for (let pause = 100; found.state==='running'; pause = Math.min(500, pause*1.3)) {
    progress(found, `${count(found.n)} found`, () => post('cancel', {id: state.id}));
    if (!sort) { if (found.n!==grid.n) grid.grow(found.n); counted(found, true); }
    await new Promise(done => setTimeout(done, pause));
    if (isOld()) return;
    found = await get('progress', {id: state.id});
    if (isOld()) return;
  }
  progress(null);
  const isSorted = !sort || found.state==='done';
  message(found.error || (isSorted ? found.note : ''));
  if (sort) grid.reset(isSorted ? found.n : 0); else grid.grow(found.n);
  counted(found, false);
  if (position) grid.scrollTo(position);
  writeAddress();
}

function counted(found, isRunning) {
  const isAll = !Object.keys(state.query).length, end = found.state==='cancelled' ? ' (cancelled)' : '';
  state.n = found.n;
  $('count').textContent = isAll ? `${count(found.n)} samples` : `${count(found.n)} of ${count(state.dataset.n)} samples${isRunning ? ' so far' : end}`;
}

function progress(found, text, cancel) {
  const [bar, span, end] = $('progress').children;
  $('progress').hidden = !found;
  if (!found) return;
  if (found.of && found.done<found.of) bar.value = found.done/found.of; else bar.removeAttribute('value');
  span.textContent = found.note || text;
  end.onclick = cancel;
}

// --- The grid

function fill(node, tile, position) {
  node.className = 'tile';
  if (!tile) return node.replaceChildren(el('div', {className: 'shown'}));
  const isBad = state.marks.drop.includes(tile.number), label = newLabel(tile.number);
  const isWrong = tile.errors.length>0;
  const shown = tile.picture ? el('img', {src: tile.picture, alt: '', draggable: false})
    : el('div', {className: isWrong ? 'text error' : 'text', textContent: isWrong ? tile.errors.join('\n') : tile.text || tile.title || '–'});
  const caption = el('div', {className: label===null ? 'caption' : 'caption set', textContent: label ?? tile.title});
  if (isWrong && tile.picture) Object.assign(caption, {className: 'caption error', textContent: tile.errors[0]});
  const value = tile.sorted ? ` · ${tile.sorted}` : '';
  node.classList.toggle('bad', isBad);
  node.classList.toggle('at', position===state.position && document.activeElement===$('grid'));
  node.replaceChildren(el('div', {className: 'shown'}, shown), caption,
    el('div', {className: 'number', textContent: (isBad ? 'bad · ' : '')+(tile.key || count(tile.number))+value}));
}

const grid = new Grid($('grid'), (first, n, signal) => get('tiles', {first, n, id: state.id}, signal), fill, writeAddress);

$('grid').onclick = event => {
  const node = event.target.closest('.tile');
  if (!node) return;
  moveTo(Number(node.dataset.position));
  const tile = grid.tile(state.position);
  if (tile) showSample(tile.number);
};
$('grid').onfocus = $('grid').onblur = () => grid.redraw();

function moveTo(position) {
  state.position = Math.max(0, Math.min(grid.n-1, position));
  grid.redraw();
  grid.reveal(state.position);
}

// --- A sample

function show(id) {
  for (const other of ['grid', 'sample', 'overview', 'changes']) $(other).hidden = other!==id;
  if (id==='grid') { grid.resize(); $('grid').focus(); }
  writeAddress();
}

async function showSample(number) {
  state.number = number;
  const sample = await get('sample', {number});
  if (state.number!==number) return;
  drawSample(sample);
  show('sample');
}

function drawSample(sample) {
  const {number, fields} = sample, uid = state.dataset.uid, sources = args => new URLSearchParams({number, uid, ...args});
  const copy = button('Copy Python', () => copyText(sample.python, copy));
  const split = sample.split ? ` · ${sample.split}` : '', key = sample.key ? ` · ${sample.key}` : '';
  const pictures = fields.filter(f => f.has_picture).length;
  const parts = fields.map(f => el('div', {className: 'field'},
    el('div', {className: 'name', textContent: f.name}),
    el('div', {className: f.kind==='error' ? 'value error' : 'value', textContent: f.kind==='missing' ? '(this sample has none)' : f.text}),
    f.has_picture && pictures>1 ? el('img', {src: `picture?${sources({field: f.name, size: 320})}`, alt: f.name}) : null,
    f.is_sound ? el('audio', {src: `sound?${sources({field: f.name})}`, controls: true, preload: 'none'}) : null,
    el('div', {className: 'about', textContent: [f.dtype ? `${f.codec} (${f.dtype})` : f.codec, f.nbytes===null ? '' : `${count(f.nbytes)} bytes`, f.where, f.checksum].filter(Boolean).join(' · ')})));
  const large = sample.has_picture ? el('div', {className: 'large'}, el('img', {src: `picture?${sources({size: 1200})}`, alt: `sample ${number}`})) : null;
  put($('sample'), el('div', {className: 'bar'},
    button('‹', () => step(-1), {title: 'previous: left arrow'}), button('›', () => step(1), {title: 'next: right arrow'}),
    el('span', {className: 'title', textContent: `Sample ${count(number)}${key}${split}`}),
    copy, button('Close', () => show('grid'), {title: 'Escape'})),
    state.dataset.edit ? marking(number) : null,
    el('div', {className: 'columns'}, large, el('div', {className: 'fields'}, ...parts, el('code', {textContent: sample.python}))));
}

async function copyText(text, where) {
  try { await navigator.clipboard.writeText(text); where.textContent = 'Copied'; }
  catch { getSelection().selectAllChildren($('sample').querySelector('code')); where.textContent = 'Press Ctrl+C'; }
}

// The next sample of those that the grid shows
async function step(by) {
  const position = state.position+by;
  if (position<0 || position>=grid.n) return;
  state.position = position;
  const tile = grid.tile(position) || (await get('tiles', {first: position, n: 1, id: state.id}))[0];
  if (tile && state.position===position) await showSample(tile.number);
}

// A number, or a key; a key of digits is written in quotes
async function jump(text) {
  text = text.trim();
  let number = /^[\d, ]+$/.test(text) ? Number(text.replace(/[, ]/g, '')) : null;
  if (number===null) number = await numberOf(text.replace(/^"(.*)"$/, '$1'));
  if (number===null) return message(`There is no sample ${text}`);
  message('');
  const {position} = await get('position', {number, id: state.id});
  if (position<0) return message(number<state.dataset.n ? `Sample ${count(number)} is not among those that are shown` : `There are ${count(state.dataset.n)} samples, numbered from 0`);
  if ($('grid').hidden) show('grid');
  state.position = position;
  $('grid').focus();
  grid.scrollTo(position);
  grid.redraw();
  writeAddress();
}

async function numberOf(key) {
  let found = await post('query', {query: {key}});
  const {id} = found;
  while (found.state==='running') {
    progress(found, `looking for ${key}`, () => post('cancel', {id}));
    await new Promise(done => setTimeout(done, 200));
    found = await get('progress', {id});
  }
  progress(null);
  return found.n ? (await get('tiles', {first: 0, n: 1, id}))[0].number : null;
}

// --- Corrections

const labelField = () => Object.keys(state.dataset.labels)[0];
const newLabel = number => Object.values(state.marks.set).map(some => some[number]).find(label => label!==undefined) ?? null;

function marking(number) {
  const isBad = state.marks.drop.includes(number), field = labelField(), label = newLabel(number);
  const other = el('input', {placeholder: 'another label', size: 12});
  other.setAttribute('list', 'labels');
  other.onchange = () => mark(number, field, other.value.trim());
  const known = field ? state.dataset.labels[field].slice(0, 9) : [];
  return el('div', {className: 'labels'}, button(isBad ? 'Not bad (x)' : 'Bad (x)', () => markBad(number)),
    ...known.map((name, k) => button(`${k+1} ${name}`, () => mark(number, field, name), {className: name===label ? 'main' : ''})),
    field ? other : null, button('Undo (u)', undo), el('span', {className: isBad ? 'error' : 'set',
      textContent: isBad ? 'to be dropped' : label===null ? '' : `becomes ${label}`}));
}

function setMarks(found) {
  state.marks = found;
  const n = found.drop.length+Object.values(found.set).reduce((sum, some) => sum+Object.keys(some).length, 0);
  $('show-changes').hidden = !state.dataset.edit;
  $('show-changes').textContent = n ? `Changes (${count(n)})` : 'Changes';
  grid.redraw();
  if (!$('changes').hidden) drawChanges();
}

async function mark(number, field, value) {
  if (value==='' || !state.dataset.edit) return;
  setMarks(await post('mark', {number, field, value}));
  if (!$('sample').hidden) showSample(number);
}
const markBad = number => mark(number, '', state.marks.drop.includes(number) ? null : true);
async function undo() {
  setMarks(await post('undo'));
  if (!$('sample').hidden) showSample(state.number);
}

function drawChanges(isNewer = false) {
  const {drop, set, call, change} = state.marks, isRunning = change?.state==='running';
  const rows = [...drop.map(number => [number, 'is dropped']), ...Object.entries(set).flatMap(([field, some]) =>
    Object.entries(some).map(([number, label]) => [Number(number), `${field} becomes ${label}`]))];
  const link = number => button(count(number), () => showSample(number));
  const apply = button('Apply', () => change_(post('apply')), {className: 'main', disabled: !rows.length || isRunning});
  put($('changes'), el('div', {className: 'bar'}, el('span', {className: 'title', textContent: 'Changes that are not applied yet'}),
    button('Undo (u)', undo, {disabled: isRunning}), apply, button('Close', () => show('grid'))),
    isNewer ? el('p', {className: 'error'}, 'The dataset has a newer version, whose samples may have other numbers. ',
      button('Carry the marks over to the newer version', reopen)) : null,
    isRunning ? el('p', {}, el('progress'), ` ${change.note || 'looking for the samples'}`) : null,
    change?.error ? el('p', {className: 'error', textContent: change.error}) : null,
    el('p', {textContent: rows.length ? 'Apply makes this call, which writes a new version:' : 'Nothing is marked.'}),
    rows.length ? el('code', {textContent: call}) : null,
    el('table', {}, ...rows.slice(0, 500).map(([number, what]) => el('tr', {}, el('td', {}, link(number)), el('td', {textContent: what})))),
    rows.length>500 ? el('p', {className: 'quiet', textContent: `and ${count(rows.length-500)} more`}) : null);
}

// Waits for the end of a change, and shows the version that is there then
async function change_(begun) {
  try {
    setMarks(await begun);
    while (state.marks.change?.state==='running') {
      await new Promise(done => setTimeout(done, 150));
      setMarks(await send('changes', {}).catch(error => { if (error.is_other) return {...state.marks, change: {state: 'done', note: ''}}; throw error; }));
    }
    if (state.marks.change.state!=='done') return;
    const {note} = (await send('changes', {}).catch(() => ({}))).change || {};
    await start();
    show('grid');
    if (note && !note.startsWith('store.')) message(note);
  } catch (error) { if (error.is_newer) drawChanges(true); }
}
const reopen = () => change_(post('reopen'));

// --- The overview

const row = (name, ...cells) => el('tr', {}, el('th', {textContent: name}), ...cells.map(cell => cell instanceof Node ? cell : el('td', {textContent: cell})));

function bars(pairs) {
  const most = Math.max(1, ...pairs.map(([, n]) => n || 0));
  return el('table', {}, ...pairs.map(([name, n]) => {
    const meter = el('span', {className: 'meter'});
    meter.style.width = `${(n || 0)/most*min_(240)}px`;
    return row(name, el('td', {className: 'n', textContent: n===null ? '' : count(n)}), el('td', {}, meter));
  }));
}
const min_ = n => Math.min(n, innerWidth/3);

async function showOverview() {
  let found = await get('overview');
  show('overview');
  while (found.state==='running') {
    $('overview').replaceChildren(el('p', {className: 'quiet', textContent: 'reading some samples …'}));
    await new Promise(done => setTimeout(done, 200));
    found = await get('overview');
  }
  const o = found.result, side = ([low, mean, high]) => low===high ? `${low}` : `${low} to ${high}, mean ${Math.round(mean)}`;
  const bar = el('div', {className: 'bar'}, el('span', {className: 'title', textContent: state.dataset.name}), button('Close', () => show('grid')));
  if (!o) return $('overview').replaceChildren(bar, el('p', {className: 'error', textContent: found.error}));
  const title = text => el('h2', {textContent: text}), {version} = o;
  const table = el('table', {}, row('samples', count(o.samples)), row('bytes', bytes(o.nbytes)), state.dataset.origin ? row('at', state.dataset.origin) : null,
    row('version', `${version.generation}, created ${version.created}, ${version.uid}`), row('made from', `${count(version.earlier)} earlier versions`));
  const fields = el('table', {}, ...Object.entries(o.fields).map(([name, f]) => row(name, f.kind, f.dtype ? `${f.codec} (${f.dtype})` : f.codec,
    f.samples<o.samples ? `in ${count(f.samples)} samples` : '', f.nbytes===null ? '' : `${f.is_exact ? '' : 'about '}${bytes(f.nbytes)}`)));
  const parts = [bar, table, title('Fields'), fields];
  if (Object.keys(o.splits).length) parts.push(title('Splits'), bars(Object.entries(o.splits)));
  for (const [name, l] of Object.entries(o.labels)) {
    parts.push(title(`Labels of ${name}`), bars(l.most));
    const rest = l.n_labels-l.most.length;
    if (rest>0) parts.push(el('p', {className: 'quiet', textContent: `and ${count(rest)} more labels${l.counted ? `, of ${count(l.others)} samples` : ''}`}));
    if (!l.counted) parts.push(el('p', {className: 'quiet', textContent: 'How often each occurs is not known.'}));
  }
  for (const [name, s] of Object.entries(o.sizes)) {
    parts.push(title(`Sizes of ${name}`), el('table', {}, row('width', side(s.width)), row('height', side(s.height))));
    if (s.ratios.length) parts.push(bars(s.ratios.map((n, k) => [found.ratios[k], n]).filter(([, n]) => n)));
    parts.push(el('p', {className: 'quiet', textContent: `Measured on ${count(s.n)} images.`}));
  }
  if (o.failed) parts.push(title('Left out when the dataset was written'), el('p', {textContent: `${count(o.failed)} samples`}),
    el('table', {}, ...o.reasons.map(([reason, n]) => row(count(n), reason))));
  if (o.sampled) parts.push(el('p', {className: 'quiet', textContent: `Sizes and bytes are estimated from ${count(o.sampled)} samples.`}));
  $('overview').replaceChildren(...parts);
}

// --- Keys and buttons

$('jump').onchange = () => jump($('jump').value);
$('filters').onclick = () => { $('query').hidden = !$('query').hidden; $('filters').setAttribute('aria-expanded', !$('query').hidden); };
$('label_field').onchange = suggest;
$('query').onsubmit = event => { event.preventDefault(); state.query = readForm(); message(''); show('grid'); find(); };
$('clear').onclick = () => { state.query = {}; $('query').reset(); message(''); show('grid'); find(); };
$('show-overview').onclick = showOverview;
$('show-changes').onclick = () => { drawChanges(); show('changes'); };

document.onkeydown = event => {
  if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const {key} = event, inSample = !$('sample').hidden, inGrid = !$('grid').hidden, {columns} = grid;
  const rows = Math.max(1, Math.floor(grid.height/grid.tall));
  const moves = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -columns*rows, PageDown: columns*rows, Home: -Infinity, End: Infinity};
  const number = inSample ? state.number : inGrid ? grid.tile(state.position)?.number : undefined;
  if (inSample && (key==='ArrowLeft' || key==='ArrowRight')) step(moves[key]);
  else if (inGrid && key in moves) moveTo(state.position+moves[key]);
  else if (inGrid && key==='Enter' && number!==undefined && event.target.tagName!=='BUTTON') showSample(number);
  else if (key==='Escape') show('grid');
  else if (state.dataset?.edit && key==='u') undo();
  else if (state.dataset?.edit && number!==undefined && (key==='x' || key==='Delete')) markBad(number);
  else if (state.dataset?.edit && number!==undefined && /^[1-9]$/.test(key) && state.dataset.labels[labelField()]?.[key-1]!==undefined)
    mark(number, labelField(), state.dataset.labels[labelField()][key-1]);
  else return;
  event.preventDefault();
};

window.onhashchange = () => go(readAddress());

// Shows what the address names
async function go(given) {
  fillForm();
  if (Object.keys(state.query).length) { $('query').hidden = false; $('filters').setAttribute('aria-expanded', true); }
  show('grid');
  await find(Number(given.at || 0));
  if (given.sample) {
    const {position} = await get('position', {number: given.sample, id: state.id});
    if (position>=0) { state.position = position; grid.reveal(position); }
    await showSample(Number(given.sample));
  } else if (given.overview) await showOverview();
  else if (given.changes && state.dataset.edit) { drawChanges(); show('changes'); }
}

async function start() {
  const given = readAddress();
  state.dataset = null;
  state.dataset = await get('dataset');
  document.title = $('name').textContent = state.dataset.name;
  $('jump').placeholder = state.dataset.has_keys ? 'number or key' : 'number';
  if (state.dataset.edit) setMarks(await get('changes'));
  await go(given);
}

start().catch(error => { if (error.status) message(error.message); });
