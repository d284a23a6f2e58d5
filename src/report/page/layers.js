// Errors of each layer by itself: tables whose cells are coloured.

/** How bright a colour is, for contrast. */
function luminance(rgb) {
  const [r, g, b] = rgb.map((v) => { const s = v / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function drawLayers() {
  const list = DATA.layers;
  if (list.length === 0) return;
  $('layers').hidden = false;
  const pairs = [...new Set(list.map((row) => row.pair))];
  const layers = [...new Set(list.map((row) => row.layer))];
  const [zero, full] = [colour('zero'), colour('error')];
  const outliers = layers.map((layer) => list.find((row) => row.layer === layer).k_outlier_after_rope);
  const panels = [['Keys', 'k_error'], ['Values', 'v_error'], ['Attention', 'attention_error']].map(([title, field]) => {
    const most = Math.max(...list.map((row) => row[field]));
    const cell = (layer, pair) => {
      const value = list.find((row) => row.layer === layer && row.pair === pair)?.[field];
      if (value === undefined) return el('td', { text: '\u2013' });
      const ground = mixed(zero, full, most > 0 ? Math.sqrt(value / most) * 0.85 : 0);
      const bright = luminance(ground);
      const td = el('td', { text: value === 0 ? '0' : value.toPrecision(2) });
      td.style.backgroundColor = css(ground);
      td.style.color = (bright + 0.05) / 0.05 > 1.05 / (bright + 0.05) ? '#000' : '#fff';
      return td;
    };
    const first = field === 'k_error';
    return el('div', {}, el('h3', { text: title }), el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': `${title}: errors by layer` },
      el('table', { class: 'heat' },
        el('thead', {}, el('tr', {}, el('th', { scope: 'col', text: 'layer' }), ...pairs.map((pair) => el('th', { scope: 'col', text: pair })),
          ...(first ? [el('th', { scope: 'col', text: 'outlier of K' })] : []))),
        el('tbody', {}, ...layers.map((layer, i) => el('tr', {}, el('th', { scope: 'row', text: String(layer) }), ...pairs.map((pair) => cell(layer, pair)),
          ...(first ? [el('td', { text: digits(outliers[i]) })] : [])))))));
  });
  $('layer-maps').replaceChildren(el('div', { class: 'two' }, ...panels),
    el('p', { class: 'fine', text: 'Darker or stronger is worse; colours go by the square root of the error\u2019s share of the largest in the panel. Outlier of K: the largest channel\u2019s '
      + 'largest magnitude over the median channel\u2019s.' }));
}
