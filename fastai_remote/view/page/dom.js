// Elements, and how numbers are written. A text of the dataset becomes a text node, and never HTML.

export const $ = id => document.getElementById(id);

// An element with properties and children; a child that is no element becomes text, and null is left out
export function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...nodes(children));
  return node;
}
const nodes = children => children.flat().filter(child => child!==null && child!=='');

// Replaces the children of a node
export function put(node, ...children) { node.replaceChildren(...nodes(children)); }

export function button(text, onclick, props = {}) {
  return el('button', {type: 'button', textContent: text, onclick, ...props});
}

export function options(select, pairs) {
  put(select, pairs.map(([value, text]) => el('option', {value, textContent: text})));
}

// A row of a table; a cell that is no element becomes text
export function row(name, ...cells) {
  return el('tr', {}, el('th', {textContent: name}),
    cells.filter(cell => cell!==null).map(cell => cell instanceof Node ? cell : el('td', {textContent: cell})));
}

export const quiet = text => el('p', {className: 'quiet', textContent: text});
export const count = n => Number(n).toLocaleString('en');
export const pause = milliseconds => new Promise(done => setTimeout(done, milliseconds));

export function bytes(n) {
  const [unit, name] = [[1e9, 'GB'], [1e6, 'MB'], [1e3, 'KB']].find(([least]) => n>=least) || [1, 'B'];
  return `${unit===1 ? n : (n/unit).toFixed(1)} ${name}`;
}
