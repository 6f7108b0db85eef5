// The page of a dataset: requests, filters, the grid, a sample, corrections. Whatever comes from the dataset becomes
// text (`textContent`) or a picture, and never HTML.

import {$, button, count, el, options, pause, put, quiet} from './dom.js';
import {Grid} from './grid.js';
import {drawOverview} from './overview.js';

// `query` is what the address says, `answer` the id of the samples that it finds, `position` the place in the grid,
// `number` the sample that is shown, and `field` the one whose labels are corrected
const state = {dataset: null, query: {}, answer: '', position: 0, number: null, field: '',
  marks: {drop: [], set: {}}, isLost: false, finding: null};

// --- Requests

async function send(name, args, body, signal) {
  const uid = state.dataset?.uid, known = uid===undefined ? {} : {uid};
  const headers = {'Content-Type': 'application/json'};
  const options = body ? {method: 'POST', headers, body: JSON.stringify({...body, ...known}), signal} : {signal};
  const response = await fetch(body ? name : `${name}?${new URLSearchParams({...args, ...known})}`, options);
  const found = await response.json();
  if (!response.ok) throw Object.assign(new Error(found.error), found, {status: response.status});
  return found;
}

// As `send`, and shows errors; `get` and `post` reject after that
async function ask(name, args, body, signal) {
  try { return await send(name, args, body, signal); }
  catch (error) {
    if (error.name!=='AbortError') await explain(error);
    throw error;
  }
}
const get = (name, args = {}, signal) => ask(name, args, null, signal);
const post = (name, body = {}) => ask(name, null, body);

async function explain(error) {
  const isReplaced = /replaced since/.test(error.message);
  if (error.is_other) await start();
  else if (error.is_gone) await find();
  else if (error.status===undefined) lost('The process that serves this page does not answer');
  else if (error.status===503) lost(error.message);
  else if (!error.is_newer) message(error.message, isReplaced ? ['Show the version that is there now', reopen] : null);
}

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
  if (state.isLost) return;
  state.isLost = true;
  for (;;) {
    await pause(1500);
    try { await send('tiles', {first: 0, n: 1}); break; }
    catch (error) { if (error.status && error.status!==503) break; }
  }
  state.isLost = false;
  message('');
  if (!state.dataset) return start();
  grid.load();
  if (!$('sample').hidden) showSample(state.number);
}

// How far something is, in the line `id`; `found` is its progress, or null if it has ended
function progress(id, found, text, cancel) {
  const [bar, span, end] = $(id).children;
  $(id).hidden = !found;
  if (!found) return;
  if (found.of && found.done<found.of) bar.value = found.done/found.of; else bar.removeAttribute('value');
  span.textContent = found.note || text;
  end.onclick = cancel;
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

function fillForm() {
  const {fields, labels, splits, has_texts} = state.dataset, names = some => some.map(name => [name, name]);
  const numbers = fields.filter(f => f.is_number).map(f => f.name);
  const optional = fields.filter(f => f.may_lack).map(f => f.name);
  const orders = numbers.flatMap(name => [[name, `${name}, smallest first`], ['-'+name, `${name}, largest first`]]);
  if (numbers.includes('loss.f4')) orders.unshift(['-loss.f4', 'hardest first (loss.f4)']);
  options($('split'), [['', 'all'], ...names(Object.keys(splits))]);
  options($('label_field'), names(Object.keys(labels)));
  options($('range_field'), names(numbers));
  options($('has'), [['', 'anything'], ...names(optional)]);
  options($('sort'), [['', 'number'], ...orders]);
  $('split-part').hidden = !Object.keys(splits).length;
  $('label-part').hidden = !Object.keys(labels).length;
  $('label_field').hidden = Object.keys(labels).length<2;
  $('range-part').hidden = $('sort-part').hidden = !numbers.length;
  $('has-part').hidden = !optional.length;
  $('text-part').hidden = !has_texts;
  for (const name of FILTERS) if (state.query[name]) $(name).value = state.query[name];
  suggest();
}

function suggest() {
  options($('labels'), (state.dataset.labels[$('label_field').value] || []).map(label => [label, label]));
}

function readForm() {
  const values = Object.fromEntries(FILTERS.map(name => [name, $(name).value.trim()]));
  if (!values.label) delete values.label_field;
  if (!values.low && !values.high) delete values.range_field;
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value));
}

// `state.query` as the server takes it
function wanted() {
  const {sort = '', low, high, ...query} = state.query;
  if (sort) Object.assign(query, {sort: sort.replace(/^-/, ''), descending: sort[0]==='-'});
  if (low) query.low = Number(low);
  if (high) query.high = Number(high);
  return query;
}

// Finds the samples of `state.query`, and shows them as they are found; those of a sort are shown at its end
async function find(position = 0) {
  const query = state.finding = {}, isOld = () => state.finding!==query, isSort = Boolean(state.query.sort);
  let found = await post('query', {query: wanted()});
  if (isOld()) return;
  state.answer = found.id;
  grid.reset(isSort && found.state==='running' ? 0 : found.n);
  for (let wait = 100; found.state==='running'; wait = Math.min(500, wait*1.3)) {
    progress('progress', found, `${count(found.n)} found`, () => post('cancel', {id: state.answer}));
    if (!isSort && found.n!==grid.n) grid.grow(found.n);
    if (!isSort) showCount(found);
    await pause(wait);
    if (isOld()) return;
    found = await get('progress', {id: state.answer});
    if (isOld()) return;
  }
  progress('progress', null);
  message(found.error || found.note, found.error ? ['Try again', () => find(position)] : null);
  if (isSort) grid.reset(found.state==='done' ? found.n : 0); else grid.grow(found.n);
  showCount(found);
  if (position) grid.scrollTo(position);
  writeAddress();
}

function showCount(found) {
  const end = {running: ' so far', cancelled: ' (cancelled)'}[found.state] || '';
  const some = `${count(found.n)} of ${count(state.dataset.n)} samples${end}`;
  $('count').textContent = Object.keys(state.query).length ? some : `${count(found.n)} samples`;
}

// --- The grid

function fill(node, tile, position) {
  node.className = 'tile';
  if (!tile) return put(node, el('div', {className: 'shown'}));
  const isBad = state.marks.drop.includes(tile.number), label = newLabels(tile.number), isWrong = tile.errors.length>0;
  const text = isWrong ? tile.errors.join('\n') : tile.text || tile.title || '–';
  const shown = tile.picture ? el('img', {src: tile.picture, alt: '', draggable: false})
    : el('div', {className: isWrong ? 'text error' : 'text', textContent: text});
  const caption = el('div', {className: label ? 'caption set' : 'caption', textContent: label || tile.title});
  if (isWrong && tile.picture) Object.assign(caption, {className: 'caption error', textContent: tile.errors[0]});
  const name = `${isBad ? 'bad · ' : ''}${tile.key || count(tile.number)}${tile.sorted ? ` · ${tile.sorted}` : ''}`;
  node.classList.toggle('bad', isBad);
  node.classList.toggle('at', position===state.position && document.activeElement===$('grid'));
  put(node, el('div', {className: 'shown'}, shown), caption, el('div', {className: 'number', textContent: name}));
}

const tiles = (first, n, signal) => get('tiles', {first, n, id: state.answer}, signal);
const grid = new Grid($('grid'), tiles, fill, writeAddress);

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

// A number, or a key; a key of digits is written in quotes
async function jump(text) {
  text = text.trim();
  let number = /^[\d, ]+$/.test(text) ? Number(text.replace(/[, ]/g, '')) : null;
  if (number===null) number = await numberOf(text.replace(/^"(.*)"$/, '$1'));
  if (number===null) return message(`There is no sample ${text}`);
  message('');
  const {position} = await get('position', {number, id: state.answer}), {n} = state.dataset;
  if (position<0) return message(number<n ? `Sample ${count(number)} is not among those that are shown`
    : `There are ${count(n)} samples, numbered from 0`);
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
  while (found.state==='running' && !found.n) {
    progress('progress', found, `looking for ${key}`, () => post('cancel', {id}));
    await pause(200);
    found = await get('progress', {id});
  }
  if (found.n) await post('cancel', {id});   // the first sample is enough
  progress('progress', null);
  return found.n ? (await get('tiles', {first: 0, n: 1, id}))[0].number : null;
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

const source = (name, args) => `${name}?${new URLSearchParams({uid: state.dataset.uid, ...args})}`;

function drawSample(sample) {
  const {number, fields} = sample, picture = source('picture', {number, size: 1200});
  const copy = button('Copy Python', () => copyText(sample.python, copy));
  const title = [`Sample ${count(number)}`, sample.key, sample.split].filter(Boolean).join(' · ');
  const hasSeveral = fields.filter(field => field.has_picture).length>1;
  put($('sample'), el('div', {className: 'bar'},
    button('‹', () => step(-1), {title: 'previous: left arrow'}),
    button('›', () => step(1), {title: 'next: right arrow'}),
    el('span', {className: 'title', textContent: title}), copy,
    button('Close', () => show('grid'), {title: 'Escape'})),
  state.dataset.edit ? marking(sample) : null,
  el('div', {className: 'columns'},
    sample.has_picture ? el('div', {className: 'large'}, el('img', {src: picture, alt: `sample ${number}`})) : null,
    el('div', {className: 'fields'}, fields.map(field => fieldPart(number, field, hasSeveral)),
      el('code', {textContent: sample.python}))));
}

function fieldPart(number, field, hasSeveral) {
  const {name, kind, codec, dtype, nbytes} = field, text = kind==='missing' ? '(this sample has none)' : field.text;
  const about = [dtype ? `${codec} (${dtype})` : codec, nbytes===null ? '' : `${count(nbytes)} bytes`, field.where,
    field.checksum];
  return el('div', {className: 'field'}, el('div', {className: 'name', textContent: name}),
    el('div', {className: kind==='error' ? 'value error' : 'value'},
      field.legend ? field.legend.flatMap(([label, colour]) => [square(colour), `${label} `]) : text),
    field.has_picture && hasSeveral ? el('img', {src: source('picture', {number, field: name, size: 320}), alt: name})
      : null,
    field.is_sound ? el('audio', {src: source('sound', {number, field: name}), controls: true, preload: 'none'}) : null,
    el('div', {className: 'about', textContent: about.filter(Boolean).join(' · ')}));
}

function square(colour) {
  const node = el('span', {className: 'colour'});
  node.style.background = colour;
  return node;
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
  const tile = grid.tile(position) || (await tiles(position, 1))[0];
  if (tile && state.position===position) await showSample(tile.number);
}

// --- Corrections: of one field at a time, whose first nine labels have the keys 1 to 9

const correctable = () => state.dataset.fields.filter(field => field.can_correct).map(field => field.name);
const hasSeveral = name => state.dataset.fields.find(field => field.name===name)?.codec==='labels';
const labelText = label => Array.isArray(label) ? label.join(', ') || '(no label)' : String(label);

function newLabels(number) {
  const changed = Object.entries(state.marks.set).filter(([, some]) => number in some);
  return changed.map(([name, some]) => `${changed.length>1 ? `${name}: ` : ''}${labelText(some[number])}`).join('; ');
}

function marking(sample) {
  const {number} = sample, isBad = state.marks.drop.includes(number), label = newLabels(number), names = correctable();
  return el('div', {className: 'labels'}, button(isBad ? 'Not bad (x)' : 'Bad (x)', () => markBad(number)),
    names.length>1 ? fieldChoice(names, sample) : null, names.length ? labelButtons(sample) : null,
    button('Undo (u)', undo),
    el('span', {className: isBad ? 'error' : 'set',
      textContent: isBad ? 'to be dropped' : label ? `becomes ${label}` : ''}));
}

function fieldChoice(names, sample) {
  const select = el('select', {ariaLabel: 'The field whose labels are corrected'});
  options(select, names.map(name => [name, name]));
  select.value = state.field;
  select.onchange = () => { state.field = select.value; drawSample(sample); };
  return select;
}

function labelButtons(sample) {
  const {number} = sample, labels = state.dataset.labels[state.field];
  const stored = sample.fields.find(field => field.name===state.field);
  const now = state.marks.set[state.field]?.[number] ?? stored.labels ?? stored.text;
  const isNow = label => Array.isArray(now) ? now.map(String).includes(label) : String(now)===label;
  const list = el('datalist', {id: 'new-labels'}), other = el('input', {placeholder: 'another label', size: 12});
  options(list, labels.map(label => [label, label]));
  other.setAttribute('list', 'new-labels');
  other.onchange = () => setLabel(number, other.value.trim());
  return [...labels.slice(0, 9).map((label, k) =>
    button(`${k+1} ${label}`, () => setLabel(number, label), {className: isNow(label) ? 'main' : ''})), other, list];
}

// Gives a sample this label; of a field with several labels, adds it or takes it away
async function setLabel(number, label) {
  if (!label) return;
  if (!hasSeveral(state.field)) return mark(number, state.field, label);
  const stored = (await get('sample', {number})).fields.find(field => field.name===state.field).labels || [];
  const now = (state.marks.set[state.field]?.[number] ?? stored).map(String);
  await mark(number, state.field, now.includes(label) ? now.filter(other => other!==label) : [...now, label]);
}

async function mark(number, field, value) {
  setMarks(await post('mark', {number, field, value}));
  if (!$('sample').hidden) showSample(number);
}
const markBad = number => mark(number, '', state.marks.drop.includes(number) ? null : true);

async function undo() {
  setMarks(await post('undo'));
  if (!$('sample').hidden) showSample(state.number);
}

function setMarks(found) {
  state.marks = found;
  const n = Object.values(found.set).reduce((sum, some) => sum+Object.keys(some).length, found.drop.length);
  $('show-changes').hidden = !state.dataset.edit;
  $('show-changes').textContent = n ? `Changes (${count(n)})` : 'Changes';
  grid.redraw();
  if (!$('changes').hidden) drawChanges();
}

function drawChanges(isNewer = false) {
  const {drop, set, call, change} = state.marks, isRunning = change?.state==='running';
  const rows = [...drop.map(number => [number, 'is dropped']), ...Object.entries(set).flatMap(([field, some]) =>
    Object.entries(some).map(([number, label]) => [Number(number), `${field} becomes ${labelText(label)}`]))];
  const link = number => el('td', {}, button(count(number), () => showSample(number)));
  const apply = button('Apply', () => follow(post('apply')), {className: 'main', disabled: !rows.length || isRunning});
  put($('changes'), el('div', {className: 'bar'},
    el('span', {className: 'title', textContent: 'Changes that are not applied yet'}),
    button('Undo (u)', undo, {disabled: isRunning}), apply, button('Close', () => show('grid'))),
  isNewer ? el('p', {className: 'error'}, 'The dataset has a newer version, whose samples may have other numbers. ',
    button('Carry the marks over to the newer version', reopen)) : null,
  el('p', {textContent: rows.length ? 'Apply makes this call, which writes a new version:' : 'Nothing is marked.'}),
  rows.length ? el('code', {textContent: call}) : null,
  el('table', {}, rows.slice(0, 500).map(([number, what]) =>
    el('tr', {}, link(number), el('td', {textContent: what})))),
  rows.length>500 ? quiet(`and ${count(rows.length-500)} more`) : null);
}

// Shows how far a change is, while the page is used as before; at its end, shows the version that is there then
async function follow(begun) {
  try {
    setMarks(await begun);
    let {change} = state.marks;
    for (; change?.state==='running'; change = await stateOfChange()) {
      progress('applying', change, 'the new version is written', () => post('cancel', {id: 'change'}));
      await pause(150);
    }
    progress('applying', null);
    if (change.state!=='done') return ended(change);
    if (!$('changes').hidden) show('grid');
    await start();
    message(state.marks.change?.note || '');
  } catch (error) {
    progress('applying', null);
    if (error.is_newer) drawChanges(true);
  }
}
const reopen = () => follow(post('reopen'));

function ended(change) {
  state.marks.change = change;
  if (!$('changes').hidden) drawChanges();
  message(change.error || 'Cancelled: nothing was changed');
}

// The page shows the version before until its requests are refused, which is the end of a change
async function stateOfChange() {
  try { return (await send('changes', {})).change; }
  catch (error) {
    if (error.is_other) return {state: 'done'};
    await explain(error);
    throw error;
  }
}

// --- The overview

function showOverview() {
  show('overview');
  const cancel = () => post('cancel', {id: 'overview'});
  return drawOverview(get, progress, cancel, state.dataset, () => show('grid'));
}

// --- Keys and buttons

function search(query) {
  state.query = query;
  message('');
  show('grid');
  find();
}

function openForm(isOpen) {
  $('query').hidden = !isOpen;
  $('filters').setAttribute('aria-expanded', isOpen);
}

$('jump').onchange = () => jump($('jump').value);
$('filters').onclick = () => openForm($('query').hidden);
$('label_field').onchange = suggest;
$('query').onsubmit = event => { event.preventDefault(); search(readForm()); };
$('clear').onclick = () => { $('query').reset(); search({}); };
$('show-overview').onclick = showOverview;
$('show-changes').onclick = () => { drawChanges(); show('changes'); };

// Whether the key means something in the grid or in a sample
function moved(key) {
  const isInSample = !$('sample').hidden, isInGrid = !$('grid').hidden, {columns} = grid;
  const screen = columns*Math.max(1, Math.floor(grid.height/grid.tall));
  const moves = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -screen,
    PageDown: screen, Home: -Infinity, End: Infinity};
  if (key==='Escape') show('grid');
  else if (isInSample && (key==='ArrowLeft' || key==='ArrowRight')) step(moves[key]);
  else if (isInGrid && key in moves) moveTo(state.position+moves[key]);
  else return false;
  return true;
}

// Whether the key corrects the sample that is shown, or that the grid is at
function corrected(key) {
  if (!state.dataset?.edit) return false;
  const isInSample = !$('sample').hidden, tile = $('grid').hidden ? null : grid.tile(state.position);
  const number = isInSample ? state.number : tile?.number;
  const label = /^[1-9]$/.test(key) ? state.dataset.labels[state.field]?.[key-1] : undefined;
  if (key==='u') undo();
  else if (number===undefined) return false;
  else if (key==='x' || key==='Delete') markBad(number);
  else if (label!==undefined) setLabel(number, label);
  else return false;
  return true;
}

document.onkeydown = event => {
  const {key, target} = event;
  if (/INPUT|SELECT|TEXTAREA/.test(target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const tile = $('grid').hidden ? null : grid.tile(state.position);
  if (tile && key==='Enter' && target.tagName!=='BUTTON') showSample(tile.number);
  else if (!moved(key) && !corrected(key)) return;
  event.preventDefault();
};

window.onhashchange = () => go(readAddress());

// Shows what the address names
async function go(given) {
  fillForm();
  if (Object.keys(state.query).length) openForm(true);
  show('grid');
  await find(Number(given.at || 0));
  if (given.sample) {
    const {position} = await get('position', {number: given.sample, id: state.answer});
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
  const names = correctable();
  if (!names.includes(state.field)) state.field = names.includes('cls') ? 'cls' : names[0] || '';
  if (state.dataset.edit) setMarks(await get('changes'));
  await go(given);
}

start().then(() => { if (state.marks.change?.state==='running') follow(get('changes')); })
  .catch(error => { if (error.status) message(error.message); });
