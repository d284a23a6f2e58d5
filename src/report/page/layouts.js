// Two ways to share a scale: what one large channel does to keys whose scale is shared by a token's channels, and to keys
// whose scale is shared by a channel's tokens.

const STORY = DATA.recordings[1];

function startLayouts() {
  const at = $('layouts');
  const factors = [...new Set(DATA.outliers.map((row) => row.outlier))];
  const named = (pair) => DATA.outliers.some((row) => row.pair === pair);
  const kinds = [['4 bits', 'int4', 'int4c/int4'], ['8 bits', 'int8', 'int8c/int8']].filter(([, a, b]) => named(a) && named(b));
  if (factors.length === 0 || kinds.length === 0) {
    at.append(el('p', { class: 'note', text: 'This run has no numbers for it.' }));
    return;
  }
  const slider = el('input', { type: 'range', id: 'factor', min: 0, max: factors.length - 1, step: 1, value: Math.ceil(factors.length / 2) });
  const kind = el('select', { id: 'layout-bits' }, ...kinds.map(([text], i) => el('option', { value: i, text })));
  const said = el('output', { for: 'factor', class: 'big', id: 'factor-value' });
  at.append(
    el('p', { class: 'prose', text: 'In trained models a few channels of the keys are many times larger than the others. Here that is done by hand to the tiny model: '
      + 'channel 3 of each head of the keys is multiplied by a factor, and of the queries divided by it. Without quantisation nothing changes. Move the slider: '
      + 'where a token\u2019s channels share one scale, the large channel sets it, and the others round to 0. Where each channel has its own, nothing moves.' }),
    el('div', { class: 'slide' }, el('label', {}, 'Codes of', kind), el('label', {}, 'Outlier factor', slider), said));
  const cards = ['One scale for a token\u2019s channels', 'One scale for a channel\u2019s tokens'].map((title, i) => {
    const map = heatMap('', () => {}, () => {});
    const figures = el('dl', { class: 'figures' });
    const name = el('p', { class: 'state' });
    const node = el('div', { class: i ? 'lane second' : 'lane' }, el('h3', { text: title }), name, map.figure, figures);
    return { map, figures, node, name };
  });
  const figure = el('figure', { class: 'chart', id: 'layout-chart' });
  at.append(el('div', { class: 'two' }, ...cards.map((card) => card.node)),
    el('p', { class: 'fine', text: 'The maps show codes of the keys of layer 0, head 0 of the first prompt, as shares of the largest code; white is a code of 0.' }),
    el('h3', { text: 'Drift as the factor grows' }), figure);

  function draw() {
    const factor = factors[Number(slider.value)];
    const [, ...pairs] = kinds[Number(kind.value)];
    said.textContent = factor === 1 ? '1: no outlier' : `\u00d7 ${factor}`;
    slider.setAttribute('aria-valuetext', `factor ${factor}`);
    pairs.forEach((pair, i) => {
      const { map, figures, name } = cards[i];
      const row = DATA.outliers.find((r) => r.pair === pair && r.outlier === factor);
      name.textContent = `${pair}, keys as ${pair.split('/')[0]}`;
      const stored = new Stored(STORY, runOf(STORY, factor, pair), 0, 0, 0, 'k');
      const largest = 2 ** (stored.kind.bits - 1) - 1;
      map.name(`codes from \u2212${largest} to ${largest}`);
      map.draw({
        tokens: stored.positions.length, channels: stored.channels, colours: palette(), kind: 'values', largest,
        value: (t, c) => codeValue(stored.kind.element, stored.code(t, c)), summary: `${percent(row.k_zeroed)} of the keys are 0`,
      });
      figures.replaceChildren(...[['logit drift', digits(row.logit_drift)], ['predictions unchanged', `${row.top1}/${row.predictions}`],
        ['keys that became 0', percent(row.k_zeroed)]].map(([dt, dd]) => el('div', {}, el('dt', { text: dt }), el('dd', { text: dd }))));
    });
    drawFactors(figure, factors, factor, pairs);
  }
  slider.addEventListener('input', draw);
  kind.addEventListener('change', draw);
  drawers.push(draw);
}

function drawFactors(figure, factors, now, pairs) {
  const width = Math.max(280, figure.clientWidth);
  const height = 240;
  const pad = { left: 58, right: 16, top: 26, bottom: 44 };
  const series = pairs.map((pair) => factors.map((factor) => DATA.outliers.find((r) => r.pair === pair && r.outlier === factor).logit_drift));
  const [low, high] = decades(series.flat());
  const x = (factor) => pad.left + Math.log2(factor / factors[0]) / Math.max(1e-9, Math.log2(factors[factors.length - 1] / factors[0])) * (width - pad.left - pad.right);
  const y = (value) => height - pad.bottom - (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low) * (height - pad.top - pad.bottom);
  const chart = svg('svg', { viewBox: `0 0 ${width} ${height}`, height, role: 'img',
    'aria-label': `Logit drift by outlier factor. ${pairs.map((pair, i) => `${pair}: from ${digits(series[i][0])} to ${digits(series[i][factors.length - 1])}`).join('; ')}` });
  for (let power = low; power <= high; power++) {
    chart.append(svg('line', { class: 'rule', x1: pad.left, x2: width - pad.right, y1: y(10 ** power), y2: y(10 ** power) }),
      svg('text', { class: 'tick', x: pad.left - 8, y: y(10 ** power) + 4, 'text-anchor': 'end', text: powerName(power) }));
  }
  for (const factor of factors) {
    chart.append(svg('text', { class: 'tick', x: x(factor), y: height - pad.bottom + 18, 'text-anchor': 'middle', text: String(factor) }));
  }
  chart.append(svg('text', { class: 'axis', x: 0, y: 12, text: 'logit drift' }),
    svg('text', { class: 'axis', x: (pad.left + width - pad.right) / 2, y: height - 6, 'text-anchor': 'middle', text: 'outlier factor' }),
    svg('line', { class: 'leader', x1: x(now), x2: x(now), y1: pad.top - 8, y2: height - pad.bottom, 'stroke-dasharray': '3 3' }));
  const ends = series.map((values) => y(values[values.length - 1]));
  // Names stand above the upper line's end and below the lower one's.
  const upper = ends[0] <= ends[1] ? 0 : 1;
  series.forEach((values, i) => {
    const line = svg('path', { class: 'line', d: values.map((value, f) => `${f ? 'L' : 'M'}${x(factors[f]).toFixed(1)} ${y(value).toFixed(1)}`).join('') });
    line.style.stroke = `var(--${i ? 'b' : 'a'})`;
    const dot = svg('circle', { cx: x(now), cy: y(values[factors.indexOf(now)]), r: 5 });
    dot.style.fill = `var(--${i ? 'b' : 'a'})`;
    const name = svg('text', { x: width - pad.right, y: ends[i] + (i === upper ? -9 : 20), 'text-anchor': 'end', 'font-weight': 600, text: pairs[i] });
    name.style.fill = `var(--${i ? 'b' : 'a'})`;
    chart.append(line, dot, name);
  });
  figure.replaceChildren(chart);
}
