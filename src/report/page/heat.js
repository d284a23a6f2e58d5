// Heat maps: tokens to the right, channels downwards, drawn on a canvas to its width.

/** The colour of a number: the square root of its share of the largest, so that small ones show too. */
function shade(value, largest, colours) {
  if (value === null || !Number.isFinite(value)) return css(colours.zero);
  const share = largest > 0 ? Math.sqrt(Math.min(1, Math.abs(value) / largest)) : 0;
  return css(mixed(colours.zero, value < 0 ? colours.negative : colours.positive, share));
}

/** Colours of numbers, and of errors, which show by their size alone. */
function palette() {
  const zero = colour('zero');
  return {
    values: { zero, negative: colour('negative'), positive: colour('positive') },
    errors: { zero, negative: colour('error'), positive: colour('error') },
    scales: { zero, negative: colour('ink'), positive: colour('ink') },
    wait: css(colour('wait')),
    ink: css(colour('ink')),
    line: css(colour('line')),
  };
}

/** Places where shown tokens do not follow each other. */
const gaps = (positions) => positions.map((p, i) => i > 0 && p !== positions[i - 1] + 1);

/**
 * A heat map with a title and channel numbers. `draw({ tokens, channels, value, kind, largest, waits, frame, mark })` fills it:
 * value(token, channel) is a number or null, waits(token) says whether the row is in f16, where the map has a band for it; frame is a range of tokens to
 * frame, mark a token to mark, flat asks for lower rows. `pick(token)` hears clicks, `point(token, channel)` where the pointer is, or null.
 */
function heatMap(title, pick, point) {
  const canvas = el('canvas', { role: 'img', 'aria-label': title });
  const channels = el('div', { class: 'channels', 'aria-hidden': 'true' });
  const caption = el('figcaption', { text: title });
  const figure = el('figure', { class: 'map' }, caption, channels, canvas);
  let shown = { tokens: 0, channels: 1 };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const token = Math.floor((event.clientX - box.left) / box.width * shown.tokens);
    const channel = Math.floor((event.clientY - box.top - shown.above) / (box.height - shown.above) * shown.channels);
    return token >= 0 && token < shown.tokens && channel >= 0 && channel < shown.channels ? [token, channel] : null;
  };
  canvas.addEventListener('click', (event) => { const at = place(event); if (at) pick(at[0]); });
  canvas.addEventListener('pointermove', (event) => { const at = place(event); if (at) point(...at); });
  canvas.addEventListener('pointerleave', () => point(null));

  function draw(what) {
    shown = what;
    const cell = Math.max(2, Math.ceil((what.channels <= 8 ? 13 : what.channels <= 32 ? 6 : what.channels <= 64 ? 4 : 3) * (what.flat ? 0.45 : 1)));
    // Above the channels a band says which rows wait.
    const above = what.waits ? 7 : 0;
    const height = what.channels * cell + above;
    canvas.style.height = `${height}px`;
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, canvas.clientWidth);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext('2d');
    const { colours } = what;
    const x = (token) => Math.round(token * canvas.width / Math.max(1, what.tokens));
    const band = Math.round(above * ratio * 0.7);
    const y = (channel) => Math.round((above + channel * cell) * ratio);
    shown.above = above;
    context.fillStyle = css(colours.values.zero);
    context.fillRect(0, 0, canvas.width, canvas.height);
    for (let token = 0; token < what.tokens; token++) {
      for (let channel = 0; channel < what.channels; channel++) {
        const value = what.value(token, channel);
        if (value === null) continue;
        context.fillStyle = shade(value, what.largest, colours[what.kind]);
        context.fillRect(x(token), y(channel), x(token + 1) - x(token), y(channel + 1) - y(channel));
      }
      if (what.waits?.(token)) {
        context.fillStyle = colours.wait;
        context.fillRect(x(token), 0, x(token + 1) - x(token), band);
      }
    }
    context.strokeStyle = colours.ink;
    for (const [token, gap] of (what.gaps ?? []).entries()) {
      if (!gap) continue;
      context.lineWidth = ratio;
      context.setLineDash([3 * ratio, 3 * ratio]);
      context.beginPath();
      context.moveTo(x(token), 0);
      context.lineTo(x(token), canvas.height);
      context.stroke();
      context.setLineDash([]);
    }
    const frame = (first, end, thick) => {
      context.lineWidth = thick * ratio;
      const inset = thick * ratio / 2;
      context.strokeRect(x(first) + inset, inset, x(end) - x(first) - 2 * inset, canvas.height - 2 * inset);
    };
    if (what.frame) frame(what.frame[0], what.frame[1], 2.5);
    if (what.mark !== undefined && what.mark >= 0) frame(what.mark, what.mark + 1, 1.5);
    // The middles of the numbers, 12 pixels high, stand beside those of their rows.
    channels.style.marginTop = `${above + (cell - 12) / 2}px`;
    channels.style.marginBottom = `${(cell - 12) / 2}px`;
    channels.replaceChildren(el('span', { text: '0' }), el('span', { text: String(what.channels - 1) }));
    canvas.setAttribute('aria-label', `${title}: ${what.summary ?? ''}`);
  }

  return { figure, draw, name: (text) => { caption.textContent = text; } };
}

/** A legend's ramp from -largest to largest, or from 0. */
function ramp(colours, label, largest, both) {
  const canvas = el('canvas', { role: 'img', 'aria-label': label });
  canvas.width = 180;
  canvas.height = 12;
  const context = canvas.getContext('2d');
  for (let i = 0; i < canvas.width; i++) {
    const share = both ? i / (canvas.width - 1) * 2 - 1 : i / (canvas.width - 1);
    context.fillStyle = shade(Math.sign(share) * share * share, 1, colours);
    context.fillRect(i, 0, 1, canvas.height);
  }
  return el('span', { class: 'ramp' }, el('span', { text: both ? `${label} \u2212${digits(largest)}` : `${label} 0` }), canvas,
    el('span', { text: digits(largest) }));
}
