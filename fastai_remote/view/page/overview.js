// What is known of a dataset: samples, fields, splits, labels, sizes of images, failures and versions.

import {$, button, bytes, count, el, pause, put, quiet, row} from './dom.js';

const title = text => el('h2', {textContent: text});
const number = n => el('td', {className: 'n', textContent: n===null || n===undefined ? '' : count(n)});

// `pairs` are names and numbers; `more` are columns of further numbers, {heading: list}
function bars(pairs, more = {}) {
  const most = Math.max(1, ...pairs.map(([, n]) => n || 0)), columns = Object.entries(more);
  const heading = text => el('th', {className: 'n', textContent: text});
  const head = el('tr', {}, ['', 'all', '', ...Object.keys(more)].map(heading));
  const rows = pairs.map(([name, n], k) => {
    const meter = el('span', {className: 'meter'});
    meter.style.width = `${(n || 0)/most*Math.min(240, innerWidth/4)}px`;
    return row(name, number(n), el('td', {}, meter), ...columns.map(([, numbers]) => number(numbers[k])));
  });
  return el('div', {className: 'wide'}, el('table', {}, columns.length ? head : null, rows));
}

function versionTable(o, dataset) {
  const {version} = o;
  return el('table', {}, row('samples', count(o.samples)), row('bytes', bytes(o.nbytes)),
    dataset.origin ? row('at', dataset.origin) : null,
    row('version', [version.generation, `created ${version.created}`, version.uid].filter(Boolean).join(', ')),
    row('made from', `${count(version.earlier)} earlier versions`));
}

function fieldRow(name, field, n) {
  const codec = field.dtype ? `${field.codec} (${field.dtype})` : field.codec;
  const size = field.nbytes===null ? '' : `${field.is_exact ? '' : 'about '}${bytes(field.nbytes)}`;
  return row(name, field.kind===field.codec ? '' : field.kind, codec, size,
    field.samples<n ? `in ${count(field.samples)} samples` : '');
}

function labelParts(name, labels) {
  const rest = labels.n_labels-labels.most.length;
  const others = labels.counted ? `, which occur ${count(labels.others)} times` : '';
  return [title(`Labels of ${name}`), bars(labels.most, labels.in_splits),
    rest>0 ? quiet(`and ${count(rest)} more labels${others}`) : null,
    labels.counted ? null : quiet('How often each occurs is not known.')];
}

function sizeParts(name, sizes, ratios) {
  const side = ([low, mean, high]) => low===high ? `${low}` : `${low} to ${high}, mean ${Math.round(mean)}`;
  const found = sizes.ratios.map((n, k) => [ratios[k], n]).filter(([, n]) => n);
  return [title(`Sizes of ${name}`),
    el('table', {}, row('width', side(sizes.width)), row('height', side(sizes.height))),
    found.length ? bars(found) : null, quiet(`Measured on ${count(sizes.n)} images.`)];
}

function failureParts(o) {
  if (!o.failed) return [];
  return [title('Left out when the dataset was written'), el('p', {textContent: `${count(o.failed)} samples`}),
    el('table', {}, o.reasons.map(([reason, n]) => row(count(n), reason)))];
}

function parts(o, ratios, dataset) {
  const splits = Object.entries(o.splits);
  return [versionTable(o, dataset), title('Fields'),
    el('div', {className: 'wide'},
      el('table', {}, Object.entries(o.fields).map(([name, field]) => fieldRow(name, field, o.samples)))),
    ...(splits.length ? [title('Splits'), bars(splits)] : []),
    ...Object.entries(o.labels).flatMap(([name, labels]) => labelParts(name, labels)),
    ...Object.entries(o.sizes).flatMap(([name, sizes]) => sizeParts(name, sizes, ratios)),
    ...failureParts(o), o.sampled ? quiet(`Sizes and bytes are estimated from ${count(o.sampled)} samples.`) : null];
}

// Draws the overview until all of it is known; `progress` shows how far that is, and `get` asks the server
export async function drawOverview(get, progress, cancel, dataset, close) {
  const bar = el('div', {className: 'bar'}, el('span', {className: 'title', textContent: dataset.name}),
    button('Close', close));
  for (let shown; ; await pause(200)) {
    const found = await get('overview'), {state, error, result, ratios} = found, isRunning = state==='running';
    if ($('overview').hidden) break;
    const now = JSON.stringify([result, error]);
    if (now!==shown) {
      put($('overview'), bar, error ? el('p', {className: 'error', textContent: error}) : null,
        result ? parts(result, ratios, dataset) : isRunning ? quiet('reading some samples …') : null);
    }
    shown = now;
    progress('progress', isRunning && result ? found : null, found.note, cancel);
    if (!isRunning) return;
  }
  progress('progress', null);
}
