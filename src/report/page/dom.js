// Elements, text that is safe to show, and numbers in words.

const $ = (id) => document.getElementById(id);

/** An element with properties (class, text, and attributes by their names) and children. Text is never markup. */
function el(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

/** The same in SVG. */
function svg(name, properties = {}, ...children) {
  return filled(document.createElementNS('http://www.w3.org/2000/svg', name), properties, children);
}

function filled(node, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === 'text') node.textContent = value;
    else if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? '' : String(value));
  }
  node.append(...children);
  return node;
}

/** Characters that show nothing, or that turn the text around them, made visible. */
function visible(text) {
  const shown = { ' ': '\u2423', '\n': '\u23ce', '\t': '\u21e5', '\r': '\u240d', '\u007f': '\u2421' };
  let result = '';
  for (const letter of String(text)) {
    const code = letter.codePointAt(0);
    if (shown[letter]) result += shown[letter];
    else if (code < 0x20) result += String.fromCodePoint(0x2400 + code);
    else if (/[\p{C}\p{Zl}\p{Zp}]/u.test(letter)) result += `U+${code.toString(16).toUpperCase().padStart(4, '0')}`;
    else result += letter;
  }
  return result;
}

/** The same for running text, where spaces are spaces. */
const readable = (text) => visible(String(text).replaceAll(' ', '\u0001')).replaceAll('\u2401', ' ');

/** A number to about four digits, never a rounded 0. */
function digits(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '\u2013';
  if (value === 0) return '0';
  const size = Math.floor(Math.log10(Math.abs(value)));
  const text = size < -5 || size > 6 ? value.toExponential(3) : trimmed(value, Math.max(0, 3 - size));
  return text.replaceAll('-', '\u2212');
}

function trimmed(value, places) {
  const text = value.toFixed(places);
  return text.includes('.') ? text.replace(/\.?0+$/, '') : text;
}

const whole = (value) => value.toLocaleString('en-US');
const percent = (share) => (share === 0 ? '0\u00a0%' : share < 0.001 ? '<\u00a00.1\u00a0%' : `${trimmed(share * 100, share < 0.0995 ? 1 : 0)}\u00a0%`);
/** How much memory a row takes. */
const ofF16 = (row, places) => `${trimmed(row.percent_of_f16, places)}\u00a0% of FP16`;

/** Options of a select, keeping what was chosen where it is still there. */
function options(select, entries) {
  const chosen = select.value;
  select.replaceChildren(...entries.map(([value, text]) => el('option', { value, text })));
  if (entries.some(([value]) => String(value) === chosen)) select.value = chosen;
  select.disabled = entries.length < 2;
}

/** A colour of the theme as [red, green, blue]. */
function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

const css = (rgb) => `rgb(${rgb.map(Math.round).join(' ')})`;
const mixed = (from, to, share) => from.map((value, i) => value + (to[i] - value) * share);

/** Whoever draws with the theme's colours or to a width draws again when these change. */
const drawers = [];
function redraw() {
  for (const draw of drawers) draw();
}
