// How it was measured, the scatter and the table.

const rows = () => DATA.table.filter((row) => row.pair !== 'f32' || !DATA.measured.trained);
const damageOf = (row) => (DATA.measured.trained ? row.logit_drift_centred : row.logit_drift);
const damageName = () => (DATA.measured.trained ? 'centred logit drift' : 'logit drift');

function rowInWords(row) {
  const kept = `${whole(row.top1)} of ${whole(row.predictions)} predictions unchanged`;
  return `${row.pair}: ${trimmed(row.bits_per_number, 4)} bits a number (${ofF16(row, 1)}), ${damageName()} `
    + `${digits(damageOf(row))}, ${kept}, mean KL ${digits(row.mean_kl)}.`;
}

function measuredFacts() {
  const m = DATA.measured;
  const g = DATA.generator;
  const device = m.device === 'cpu' ? `${m.adapter}: no GPU ran` : m.software ? `${m.adapter}: a software driver, on the CPU` : m.adapter;
  const facts = [
    ['Model', m.trained ? readable(m.model) : 'tiny model: 2 layers, 2 heads of 8 channels, random weights'],
    ['Text', m.trained ? `${whole(m.tokens)} tokens` : `${m.prompts} prompts of ${m.tokens / m.prompts} characters`],
    ['Ran on', readable(device)],
    ['Convention', m.convention === 'packed' ? 'packed: f16 scales, groups as a cache stores them' : m.convention],
    ['Mode', m.mode === 'prefill' ? 'prefill: each prompt at once' : 'decode: token by token'],
    ['Window', m.window === 0 ? 'none: every token is packed' : `${m.window} recent tokens stay in f16`],
  ];
  if (m.outlier !== 1) facts.push(['Outlier factor', digits(m.outlier)]);
  if (m.keys) facts.push(['Keys', m.keys === 'post' ? 'stored after RoPE' : 'stored before RoPE']);
  if (rows().some((row) => row.pair.includes('fp8'))) {
    facts.push(['Scales of fp8', m.tensor_scales === 'checkpoint' ? 'from the checkpoint' : 'calibrated on the f32 run']);
  }
  facts.push(['Program', `${g.name} ${g.version}, ${g.commit ? `commit ${readable(g.commit)}` : 'commit not recorded in this build'}`]);
  $('short').textContent = inShort();
  $('measured').replaceChildren(...facts.map(([name, text]) => el('div', {}, el('dt', { text: name }), el('dd', { text }))));
}

/** What the run comes to, in two sentences. */
function inShort() {
  const list = rows().filter((row) => row.predictions > 0);
  if (list.length === 0) return '';
  const share = (row) => row.top1 / row.predictions;
  const cost = (row) => `${trimmed(row.bits_per_number, 4)} bits a number, ${ofF16(row, 0)}`;
  const cheapest = (some) => some.reduce((a, b) => (b.bits_per_number < a.bits_per_number ? b : a));
  const [bar, name] = DATA.measured.trained ? [0.9, 'nine in ten'] : [0.98, '98 in 100'];
  const good = list.filter((row) => share(row) >= bar);
  const least = cheapest(list);
  const parts = [];
  if (good.length > 0) {
    const best = cheapest(good);
    parts.push(`In this run ${best.pair} is the cheapest format that leaves at least ${name} predictions as they were (${whole(best.top1)} of ${whole(best.predictions)}): ${cost(best)}.`);
  }
  if (share(least) < bar) parts.push(`The cheapest of all, ${least.pair} with ${trimmed(least.bits_per_number, 4)} bits, keeps ${whole(least.top1)} of ${whole(least.predictions)}.`);
  return parts.join(' ');
}

/** The numbers of a row beside the scatter. */
function tellRow(row) {
  const figures = [
    ['memory', `${trimmed(row.bits_per_number, 4)} bits, ${ofF16(row, 1)}`],
    [damageName(), digits(damageOf(row))],
    ['predictions unchanged', `${whole(row.top1)} of ${whole(row.predictions)}`],
    ['mean KL', digits(row.mean_kl)],
  ];
  $('scatter-readout').replaceChildren(el('h3', { text: row.pair }), el('dl', {}, ...figures.map(([name, text]) => el('div', {}, el('dt', { text: name }), el('dd', { text })))));
}

// ---- scatter --------------------------------------------------------------------------------------------------------

const overlap = (a, b) => a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;

/** Where names of points can stand without covering another name or point: their boxes, or null. */
function placeNames(points, names, area, widthOf) {
  const taken = points.map((p) => ({ x: p.x - 8, y: p.y - 8, w: 16, h: 16 }));
  return points.map((p, i) => {
    const [w, h] = [widthOf(names[i]), 16];
    const found = [];
    for (const distance of [12, 22, 36, 54, 76]) {
      for (let turn = 0; turn < 16; turn++) {
        // To the right first, then above and below, then all around.
        const angle = [0, 1, 15, 2, 14, 8, 7, 9, 4, 12, 3, 13, 5, 11, 6, 10][turn] * Math.PI / 8;
        const [cx, cy] = [p.x + Math.cos(angle) * distance, p.y - Math.sin(angle) * distance];
        const lean = Math.cos(angle);
        found.push({ x: cx - w * (1 - lean) / 2, y: cy - h / 2, w, h, distance });
      }
    }
    const inside = (b) => b.x >= area.x && b.x + b.w <= area.x + area.w && b.y >= area.y && b.y + b.h <= area.y + area.h;
    const box = found.find((b) => inside(b) && !taken.some((t) => overlap(b, t))) ?? null;
    if (box) taken.push(box);
    return box;
  });
}

/** Powers of ten that span some positive numbers. */
function decades(values) {
  const positive = values.filter((v) => v > 0);
  if (positive.length === 0) return [-1, 0];
  const low = Math.floor(Math.log10(Math.min(...positive)));
  const high = Math.ceil(Math.log10(Math.max(...positive)) - 1e-9);
  return [low, Math.max(high, low + 1)];
}

const powerName = (power) => (power >= -4 && power <= 3 ? trimmed(10 ** power, 4) : `1e${power}`.replace('-', '\u2212'));

let textMeter;
function textWidth(text, font) {
  textMeter ??= document.createElement('canvas').getContext('2d');
  textMeter.font = font;
  return textMeter.measureText(text).width;
}

function drawScatter() {
  const figure = $('scatter');
  const width = Math.max(280, figure.clientWidth);
  const height = Math.round(Math.min(440, Math.max(320, width * 0.42)));
  const pad = { left: 58, right: 14, top: 26, bottom: 46 };
  const list = rows();
  const [low, high] = decades(list.map(damageOf));
  const most = Math.max(16, ...list.map((row) => row.bits_per_number));
  const step = most > 20 ? 8 : 4;
  const x = (bits) => pad.left + bits / (most * 1.06) * (width - pad.left - pad.right);
  const y = (power) => height - pad.bottom - (power - low) / (high - low) * (height - pad.top - pad.bottom);
  // A damage of exactly 0 has no logarithm: it lies on the axis.
  const yOf = (damage) => (damage > 0 ? y(Math.log10(damage)) : height - pad.bottom);
  const chart = svg('svg', { viewBox: `0 0 ${width} ${height}`, height, role: 'group', 'aria-label': `Memory against damage, ${list.length} formats` });
  for (let power = low; power <= high; power++) {
    chart.append(svg('line', { class: 'rule', x1: pad.left, x2: width - pad.right, y1: y(power), y2: y(power) }),
      svg('text', { class: 'tick', x: pad.left - 8, y: y(power) + 4, 'text-anchor': 'end', text: powerName(power) }));
  }
  for (let bits = 0; bits <= most; bits += step) {
    chart.append(svg('line', { class: 'rule', x1: x(bits), x2: x(bits), y1: height - pad.bottom, y2: height - pad.bottom + 5 }),
      svg('text', { class: 'tick', x: x(bits), y: height - pad.bottom + 19, 'text-anchor': 'middle', text: String(bits) }));
  }
  chart.append(svg('text', { class: 'axis', x: (pad.left + width - pad.right) / 2, y: height - 6, 'text-anchor': 'middle', text: 'bits a number, scales included' }),
    svg('text', { class: 'axis', x: 0, y: 12, text: `damage: ${damageName()}` }));
  const points = list.map((row) => ({ x: x(row.bits_per_number), y: yOf(damageOf(row)) }));
  const font = `600 13px ${getComputedStyle(document.body).fontFamily}`;
  const area = { x: pad.left + 2, y: pad.top - 8, w: width - pad.left - pad.right, h: height - pad.top - pad.bottom + 8 };
  const boxes = placeNames(points, list.map((row) => row.pair), area, (name) => textWidth(name, font) + 4);
  for (const [i, row] of list.entries()) {
    const { x: px, y: py } = points[i];
    const tell = () => tellRow(row);
    const choose = () => { setFormat(row.pair); tell(); };
    const side = row.pair === state.format ? ' chosen' : row.pair === state.other ? ' other' : '';
    const point = svg('g', {
      class: `point${side}`, tabindex: 0, role: 'button', 'aria-label': `${rowInWords(row)} Watch it below.`, 'data-pair': row.pair,
      onfocus: tell, onpointerenter: tell, onclick: choose,
      onkeydown: (event) => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); choose(); } },
    });
    const box = boxes[i];
    if (box && box.distance > 22) {
      const near = [Math.max(box.x, Math.min(px, box.x + box.w)), Math.max(box.y + 2, Math.min(py, box.y + box.h - 2))];
      point.append(svg('line', { class: 'leader', x1: px, y1: py, x2: near[0], y2: near[1] }));
    }
    point.append(svg('circle', { cx: px, cy: py, r: 6 }));
    if (box) point.append(svg('text', { class: 'name', x: box.x + 2, y: box.y + 12.5, text: row.pair }));
    chart.append(point);
  }
  const focused = document.activeElement?.closest?.('#scatter .point')?.dataset.pair;
  figure.replaceChildren(chart);
  const chosen = list.find((row) => row.pair === (focused ?? state.format));
  if (chosen) tellRow(chosen);
  if (focused) figure.querySelector(`[data-pair="${CSS.escape(focused)}"]`)?.focus();
}

// ---- table ----------------------------------------------------------------------------------------------------------

const COLUMNS = [
  ['format', (row) => row.pair, (row) => row.pair],
  ['bits', (row) => row.bits_per_number, (row) => trimmed(row.bits_per_number, 4)],
  ['% of FP16', (row) => row.percent_of_f16, (row) => trimmed(row.percent_of_f16, 1)],
  ['logit drift', (row) => row.logit_drift, (row) => digits(row.logit_drift)],
  ['centred', (row) => row.logit_drift_centred, (row) => digits(row.logit_drift_centred)],
  ['unchanged', (row) => row.top1, (row) => `${row.top1}/${row.predictions}`],
  ['mean KL', (row) => row.mean_kl, (row) => digits(row.mean_kl)],
  ['largest difference', (row) => row.max_abs_diff, (row) => digits(row.max_abs_diff)],
  ['perplexity', (row) => row.perplexity, (row) => digits(row.perplexity)],
  ['cache bytes', (row) => row.cache_bytes, (row) => whole(row.cache_bytes)],
];
const sorted = { column: -1, down: false };

function drawTable() {
  const columns = COLUMNS.filter(([name]) => name !== 'perplexity' || DATA.measured.trained);
  const list = [...DATA.table];
  if (sorted.column >= 0) {
    const key = columns[sorted.column][1];
    list.sort((a, b) => {
      const [p, q] = [key(a), key(b)];
      if (p === null || q === null) return (p === null) - (q === null);
      const order = typeof p === 'string' ? p.localeCompare(q) : p - q;
      return sorted.down ? -order : order;
    });
  }
  const head = columns.map(([name], i) => {
    const mine = sorted.column === i;
    const arrow = mine ? (sorted.down ? ' \u2193' : ' \u2191') : '';
    const sort = () => {
      sorted.down = mine && !sorted.down;
      sorted.column = i;
      drawTable();
      $('table').querySelectorAll('thead button')[i].focus();
    };
    return el('th', { scope: 'col', 'aria-sort': mine ? (sorted.down ? 'descending' : 'ascending') : undefined },
      el('button', { type: 'button', text: name + arrow, onclick: sort }));
  });
  const body = list.map((row) => el('tr', {}, ...columns.map(([, , text], i) => el(i === 0 ? 'th' : 'td', { scope: i === 0 ? 'row' : undefined, text: text(row) }))));
  $('table').replaceChildren(el('caption', { class: 'hidden', text: 'What each format costs and saves' }),
    el('thead', {}, el('tr', {}, ...head)), el('tbody', {}, ...body));
  const notes = ['Choose a column\u2019s name to sort by it. Unchanged: predictions that are those of the full-precision cache.'];
  if (list.some((row) => row.pair.includes('int2'))) notes.push('int2 is ternary: its codes are \u22121, 0 and 1.');
  const full = list.filter((row) => row.saturated > 0).map((row) => `${row.pair} (${whole(row.saturated)})`);
  if (full.length > 0) notes.push(`Inputs that did not fit the largest code or scale: ${full.join(', ')}.`);
  $('table-notes').textContent = notes.join(' ');
}
