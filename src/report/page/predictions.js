// What the model predicts after a token, with the f32 cache and with the formats; and the drift so far.

function topOf(prompt, token) {
  const n = prompt.top;
  const [ids, logits, sums] = [array(prompt.top_ids), array(prompt.top_logits), array(prompt.log_sum_exp)];
  return Array.from({ length: n }, (_, i) => {
    const at = token * n + i;
    return { id: ids[at], logit: logits[at], probability: Math.exp(logits[at] - sums[token]) };
  });
}

const tokenText = (recording, id) => recording.texts[id] ?? `#${id}`;

function tokenChip(recording, id, more = '') {
  return el('bdi', { class: `token ${more}`.trim(), text: visible(tokenText(recording, id)) });
}

/** Whether the first prediction after a shown token is another than with the f32 cache. */
function isFlipped(reference, run, token) {
  return array(run.top_ids)[token * run.top] !== array(reference.top_ids)[token * reference.top];
}

/** The margin in logits by which a run prefers its prediction to that of the f32 cache. */
const margin = (run, token) => array(run.top_logits)[token * run.top] - array(run.kept_logit)[token];

function predictionList(recording, title, prompt, token, reference, kind) {
  const list = topOf(prompt, token);
  const flipped = reference && isFlipped(reference, prompt, token);
  const block = el('div', { class: `prediction ${kind}` }, el('h4', { text: title }));
  block.append(el('ol', {}, ...list.map(({ id, probability }) => {
    const bar = el('span', { class: 'bar' });
    bar.style.width = `${Math.max(0, Math.min(100, probability * 100))}%`;
    return el('li', {}, tokenChip(recording, id), bar, el('span', { class: 'share', text: percent(probability) }));
  })));
  if (reference) {
    const [from] = topOf(reference, token);
    block.append(el('p', { class: flipped ? 'fine changed' : 'fine', text: flipped
      ? `changed: not \u201c${visible(tokenText(recording, from.id))}\u201d any more, by ${digits(margin(prompt, token))} in the logits`
      : 'the same prediction' }));
  }
  return block;
}

/** Drift of the tokens up to each one: sqrt(sum of errors / sum of the reference). */
function runningDrift(prompt) {
  const [error, power] = [array(prompt.error), array(prompt.power)];
  let [e, p] = [0, 0];
  return Array.from(error, (value, i) => {
    e += value;
    p += power[i];
    return p > 0 ? Math.sqrt(e / p) : 0;
  });
}

function drawDrift(lines, length) {
  const figure = $('drift');
  const width = Math.max(220, figure.clientWidth);
  const height = 150;
  const pad = { left: 62, right: 8, top: 10, bottom: 24 };
  const count = Math.max(1, ...lines.map((line) => line.values.length));
  const most = Math.max(...lines.flatMap((line) => line.values), 1e-12);
  const x = (i) => pad.left + (count > 1 ? i / (count - 1) : 0.5) * (width - pad.left - pad.right);
  const y = (value) => height - pad.bottom - value / most * (height - pad.top - pad.bottom);
  const name = lines.map((line) => `${line.pair}: ${length > 0 ? digits(line.values[length - 1]) : 'no token yet'}`).join('; ');
  const chart = svg('svg', { viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': `Drift up to each token. ${name}` });
  for (const value of [0, most]) {
    chart.append(svg('line', { class: 'rule', x1: pad.left, x2: width - pad.right, y1: y(value), y2: y(value) }),
      svg('text', { class: 'tick', x: pad.left - 6, y: y(value) + 4, 'text-anchor': 'end', text: digits(value) }));
  }
  chart.append(svg('text', { class: 'axis', x: pad.left, y: height - 6, text: 'token 1' }),
    svg('text', { class: 'axis', x: width - pad.right, y: height - 6, 'text-anchor': 'end', text: whole(count) }));
  for (const { values, second } of lines) {
    const stroke = `var(--${second ? 'b' : 'a'})`;
    const path = (list) => list.map((value, i) => `${i ? 'L' : 'M'}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join('');
    const all = svg('path', { class: 'line', d: path(values), 'stroke-opacity': 0.25 });
    const past = svg('path', { class: 'line', d: path(values.slice(0, length)) });
    for (const line of [all, past]) line.style.stroke = stroke;
    chart.append(all, past);
    if (length > 0) {
      const dot = svg('circle', { cx: x(length - 1), cy: y(values[length - 1]), r: 4 });
      dot.style.fill = stroke;
      chart.append(dot);
    }
  }
  figure.replaceChildren(chart);
  $('drift-readout').textContent = length > 0 ? `Over the first ${length === 1 ? 'token' : `${whole(length)} tokens`} of this prompt: ${name}.` : 'Nothing so far.';
}
