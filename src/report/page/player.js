// The animation: a prompt, token by token, through the cache of one format, or of two side by side.

const MAIN = DATA.recordings[0];
const NONE = '';
const STEP_SECONDS = 0.6;

const state = { format: NONE, other: NONE, prompt: 0, layer: 0, head: 0, outlier: MAIN.takes[0]?.outlier ?? 1, step: 0, timer: 0 };
let lanes = [];

const shownTokens = () => MAIN.prompts[state.prompt]?.shown ?? [];
/** Tokens in the cache after so many steps. */
const lengthAt = (step) => (step > 0 ? shownTokens()[step - 1] + 1 : 0);
const promptOf = (pair) => runOf(MAIN, state.outlier, pair)?.prompts[state.prompt];

/** Names of a side's place in words. */
function sideSummary(stored, letter) {
  const { kind } = stored;
  const length = lengthAt(state.step);
  const there = stored.positions.filter((p) => p < length).length;
  const waiting = stored.positions.filter((p, i) => p < length && !stored.isPacked(i, length)).length;
  const closed = closedNow(stored);
  if (!kind.waits) return `${letter}: ${there === 0 ? 'empty' : kind.layout === 'none' ? `stored as ${kind.name}` : 'each row is packed as it comes'}.`;
  if (closed) return `${letter}: a group is full and closes: ${closed[1] - closed[0]} rows are packed at once.`;
  if (waiting > 0) return `${letter}: ${waiting} ${waiting === 1 ? 'row waits' : 'rows wait'} in f16${kind.group > 1 ? ` for a group of ${kind.group}` : ''}.`;
  return `${letter}: ${there === 0 ? 'empty' : 'all rows are packed'}.`;
}

/** The shown tokens that were packed with the newest one, where they are a group: [first, end). */
function closedNow(stored) {
  if (!stored.kind.waits) return null;
  const length = lengthAt(state.step);
  const closed = stored.positions.map((_, i) => i).filter((i) => stored.packedAt[i] > 0 && stored.packedAt[i] === length);
  return closed.length > 1 ? [closed[0], closed[closed.length - 1] + 1] : null;
}

function largestOf(value, stored) {
  let most = 0;
  for (let token = 0; token < stored.positions.length; token++) {
    for (let channel = 0; channel < stored.channels; channel++) most = Math.max(most, Math.abs(value(stored, token, channel)) || 0);
  }
  return most;
}

function makeLane(pair, second) {
  const run = runOf(MAIN, state.outlier, pair);
  const lane = { pair, second, run, sides: [] };
  lane.status = el('p', { class: 'state' });
  lane.node = el('div', { class: second ? 'lane second' : 'lane' }, el('h3', { text: pair }), lane.status);
  for (const side of ['k', 'v']) {
    const stored = new Stored(MAIN, run, state.prompt, state.layer, state.head, side);
    const pick = (token) => inspectToken(token);
    const point = (token, channel) => readHeat(lane, stored, side, token, channel);
    const letter = side === 'k' ? 'K' : 'V';
    const titles = [`${letter} as computed`, `Scales: ${scaleSharing(stored.kind, letter)}`, `${letter} as read back from the cache`, `${letter} error`];
    const maps = titles.map((title) => heatMap(title, pick, point));
    // Numbers without a scale have no map of them.
    if (stored.kind.layout === 'none') maps[1].figure.hidden = true;
    lane.node.append(el('h4', { text: side === 'k' ? 'Keys (K)' : 'Values (V)' }), ...maps.map((map) => map.figure));
    lane.sides.push({ side, stored, maps });
  }
  return lane;
}

function readHeat(lane, stored, side, token, channel) {
  const length = lengthAt(state.step);
  if (token === null || stored.positions[token] >= length) {
    $('heat-readout').textContent = '';
    return;
  }
  const read = stored.read(token, channel, length);
  const computed = stored.computed(token, channel);
  $('heat-readout').textContent = `${lane.pair}, ${side.toUpperCase()} of token ${stored.positions[token] + 1}, channel ${channel}: computed ${digits(computed)}, `
    + `${stored.isPacked(token, length) ? 'read back' : 'waiting in f16,'} ${digits(read)}, error ${digits(read - computed)}.`;
}

// ---- what follows from a choice --------------------------------------------------------------------------------------

/** Lanes, scales of the colours, the token strip: for another format, prompt, layer, head or outlier factor. */
function choose() {
  state.step = Math.min(state.step, shownTokens().length);
  const pairs = [state.format, state.other].filter((pair, i, all) => pair !== NONE && all.indexOf(pair) === i && promptOf(pair));
  lanes = shownTokens().length > 0 ? pairs.map((pair, i) => makeLane(pair, i === 1)) : [];
  $('lanes').replaceChildren(...lanes.map((lane) => lane.node));
  if (lanes.length === 0) $('lanes').append(el('p', { class: 'note', text: 'There is no token to show.' }));
  const end = Infinity;
  for (const i of [0, 1]) {
    const sides = lanes.map((lane) => lane.sides[i]);
    const value = Math.max(0, ...sides.map(({ stored }) => largestOf((s, t, c) => s.computed(t, c), stored)));
    const error = Math.max(0, ...sides.map(({ stored }) => largestOf((s, t, c) => s.error(t, c, end), stored)));
    const scale = Math.max(0, ...sides.map(({ stored }) => (stored.kind.layout === 'none' ? 0 : largestOf((s, t, c) => s.scale(t, c), stored))));
    for (const side of sides) Object.assign(side, { largest: value, largestScale: scale, largestError: $('stretch').value === 'own' ? error : value });
  }
  drawTokens();
  $('scrub').max = shownTokens().length;
  options($('inspect'), [['newest', 'the newest'], ...shownTokens().map((position, i) => [String(i), `${position + 1}: ${visible(tokenText(MAIN, MAIN.prompts[state.prompt].ids[position]))}`])]);
  drawScatter();
  drawStep();
}

function drawTokens() {
  const prompt = MAIN.prompts[state.prompt];
  const strip = $('tokens');
  const chips = [];
  shownTokens().forEach((position, i) => {
    const before = i > 0 ? shownTokens()[i - 1] + 1 : 0;
    if (position > before) chips.push(el('span', { class: 'gap', text: `\u2026 ${whole(position - before)} tokens not shown \u2026` }));
    const chip = tokenChip(MAIN, prompt.ids[position]);
    chip.addEventListener('click', () => go(i + 1));
    chips.push(chip);
  });
  strip.replaceChildren(...chips);
  const text = prompt ? shownTokens().map((position) => readable(tokenText(MAIN, prompt.ids[position]))).join('') : '';
  strip.setAttribute('aria-label', text ? `The prompt: ${text}` : 'The prompt is empty.');
  const parts = [];
  if (prompt && prompt.shown.length < prompt.ids.length) {
    parts.push(`Of ${whole(prompt.ids.length)} tokens the first ${prompt.shown.filter((p, i) => p === i).length} and the last `
      + `${prompt.shown.filter((p, i) => p !== i).length} are shown; the figures and the running drift are of all of them.`);
  }
  for (const [shown, all, name] of [[MAIN.shown_layers, MAIN.layers, 'layers'], [MAIN.shown_heads, MAIN.kv_heads, 'KV heads']]) {
    if (shown.length < all) parts.push(`${shown.length} of ${all} ${name} are shown: ${shown.join(', ')}.`);
  }
  const whose = lanes.map(({ pair, second }) => el('span', { class: 'whose' }, el('span', { class: second ? 'stroke second' : 'stroke' }),
    lanes.length > 1 ? `${pair} (the ${second ? 'lower' : 'upper'} line)` : pair));
  $('marks').replaceChildren(...(whose.length > 0 ? ['A line under a token: the prediction after it is not that of the f32 cache any more, with ', whose[0],
    ...(whose[1] ? [' or ', whose[1]] : []), '.'] : []));
  $('sampled').textContent = parts.join(' ');
  $('sampled').hidden = parts.length === 0;
}

/** Everything that depends on how far the prompt has come. */
function drawStep() {
  const count = shownTokens().length;
  const length = lengthAt(state.step);
  $('scrub').value = state.step;
  const text = count === 0 ? 'no tokens' : `token ${whole(length)} of ${whole(MAIN.prompts[state.prompt].ids.length)}`;
  $('position').textContent = text;
  $('scrub').setAttribute('aria-valuetext', text);
  $('first').disabled = $('back').disabled = state.step === 0;
  $('next').disabled = $('last').disabled = state.step === count;
  $('play').disabled = count === 0;
  const reference = promptOf(null);
  $('tokens').querySelectorAll('.token').forEach((chip, i) => {
    const when = i + 1 === state.step ? 'now' : i < state.step ? 'past' : 'future';
    const changed = lanes.map(({ pair, second }) => (i < state.step && isFlipped(reference, promptOf(pair), i) ? ` changed-${second ? 'b' : 'a'}` : ''));
    chip.className = `token ${when}${changed.join('')}`;
  });

  const colours = palette();
  for (const lane of lanes) {
    lane.status.textContent = lane.sides.map(({ stored, side }) => sideSummary(stored, side.toUpperCase())).join(' ');
    for (const { stored, maps, largest, largestError, largestScale } of lane.sides) {
      const there = (token) => stored.positions[token] < length;
      const common = {
        tokens: count, channels: stored.channels, colours, gaps: gaps(stored.positions), mark: state.step - 1, kind: 'values', largest,
        summary: `${state.step} of ${count} shown tokens, largest ${digits(largest)}`,
      };
      // A band for rows that wait, only where some can.
      const waits = stored.kind.waits ? (token) => there(token) && !stored.isPacked(token, length) : undefined;
      const frame = closedNow(stored);
      maps[0].draw({ ...common, value: (t, c) => (there(t) ? stored.computed(t, c) : null) });
      const scaled = (t) => there(t) && stored.isPacked(t, length) && stored.kind.layout !== 'none';
      maps[1].draw({ ...common, flat: true, kind: 'scales', largest: largestScale, value: (t, c) => (scaled(t) ? stored.scale(t, c) : null) });
      maps[2].draw({ ...common, waits, frame, value: (t, c) => (there(t) ? stored.read(t, c, length) : null) });
      maps[3].draw({ ...common, kind: 'errors', largest: largestError, value: (t, c) => (there(t) ? stored.error(t, c, length) : null) });
    }
  }
  drawLegend(colours);
  drawPredictions(reference);
  drawInspector();
}

function drawLegend(colours) {
  const parts = [];
  for (const i of [0, 1]) {
    const side = lanes[0]?.sides[i];
    if (!side) continue;
    const letter = side.side.toUpperCase();
    parts.push(ramp(colours.values, letter, side.largest, true), ramp(colours.errors, `error of ${letter}`, side.largestError, false));
    if (side.largestScale > 0) parts.push(ramp(colours.scales, `scales of ${letter}`, side.largestScale, false));
  }
  if (lanes.some((lane) => lane.sides.some(({ stored }) => stored.kind.waits))) {
    parts.push(el('span', { class: 'ramp' }, el('span', { class: 'swatch wait' }), el('span', { text: 'the row waits in f16' })),
      el('span', { text: 'A thick frame is a group that closes now.' }));
  }
  if (parts.length > 0) parts.push(el('span', { text: 'Colours go by the square root, so that small numbers show. A thin frame is the newest token.' }));
  $('legend').replaceChildren(...parts);
}

function drawPredictions(reference) {
  const token = state.step - 1;
  const prompt = MAIN.prompts[state.prompt];
  if (token < 0 || !reference || lanes.length === 0) {
    $('after').textContent = 'Nothing has been read yet.';
    $('predictions').replaceChildren();
    drawDrift(lanes.map((lane) => ({ pair: lane.pair, second: lane.second, values: runningDrift(promptOf(lane.pair)) })), 0);
    return;
  }
  const position = shownTokens()[token];
  const next = prompt.ids[position + 1];
  $('after').replaceChildren('After ', tokenChip(MAIN, prompt.ids[position]), ' the model expects',
    ...(DATA.measured.trained && next !== undefined ? [' (the text goes on with ', tokenChip(MAIN, next), ')'] : []), ':');
  $('predictions').replaceChildren(
    predictionList(MAIN, 'full-precision cache (f32)', reference, token, null, 'reference'),
    ...lanes.map((lane) => predictionList(MAIN, lane.pair, promptOf(lane.pair), token, reference, lane.second ? 'second' : 'first')));
  drawDrift(lanes.map((lane) => ({ pair: lane.pair, second: lane.second, values: runningDrift(promptOf(lane.pair)) })), position + 1);
}

// ---- inspector -------------------------------------------------------------------------------------------------------

function inspectToken(token) {
  if (token < state.step) $('inspect').value = String(token);
  drawInspector();
}

function drawInspector() {
  const chosen = $('inspect').value;
  const token = chosen === 'newest' || chosen === '' ? state.step - 1 : Math.min(Number(chosen), state.step - 1);
  const at = $('inspector');
  if (token < 0 || lanes.length === 0) {
    at.replaceChildren(el('p', { class: 'note', text: 'No row has come yet.' }));
    return;
  }
  const scrolled = [...at.querySelectorAll('[tabindex]')].map((node) => node.scrollTop);
  const i = $('side').value === 'k' ? 0 : 1;
  at.replaceChildren(...lanes.map((lane) => inspected(lane.sides[i].stored, lane.pair, lane.second, token, lengthAt(state.step), $('side').value)));
  [...at.querySelectorAll('[tabindex]')].forEach((node, n) => { node.scrollTop = scrolled[n] ?? 0; });
}

// ---- transport -------------------------------------------------------------------------------------------------------

function go(step) {
  state.step = Math.max(0, Math.min(shownTokens().length, step));
  drawStep();
}

function pause() {
  clearTimeout(state.timer);
  state.timer = 0;
  $('play').textContent = 'Play';
  $('position').setAttribute('aria-live', 'polite');
}

function play() {
  if (state.timer) return pause();
  if (state.step === shownTokens().length) state.step = 0;
  $('play').textContent = 'Pause';
  // Whoever listens would hear every token.
  $('position').setAttribute('aria-live', 'off');
  const tick = () => {
    go(state.step + 1);
    if (state.step >= shownTokens().length) pause();
    else state.timer = setTimeout(tick, STEP_SECONDS * 1000 / Number($('speed').value));
  };
  state.timer = setTimeout(tick, 0);
}

/** Chooses the format to watch. */
function setFormat(pair) {
  $('format').value = pair;
  $('format').dispatchEvent(new Event('change'));
}

function startPlayer() {
  const pairs = DATA.formats.map((format) => format.pair);
  options($('format'), pairs.map((pair) => [pair, pair]));
  options($('other'), [[NONE, 'nothing'], ...pairs.map((pair) => [pair, pair])]);
  options($('prompt'), MAIN.prompts.map(({ ids }, i) => {
    const text = ids.slice(0, 40).map((id) => readable(tokenText(MAIN, id))).join('');
    return [String(i), text.length > 34 || ids.length > 40 ? `${text.slice(0, 33)}\u2026` : text || '(empty)'];
  }));
  options($('layer'), MAIN.shown_layers.map((layer, i) => [String(i), String(layer)]));
  options($('head'), MAIN.shown_heads.map((head, i) => [String(i), String(head)]));
  options($('outlier'), MAIN.takes.map(({ outlier }) => outlier).sort((a, b) => a - b).map((outlier) => [String(outlier), outlier === 1 ? '1: none' : String(outlier)]));
  $('outlier').value = String(state.outlier);
  const prefer = (wanted, others) => wanted.find((pair) => pairs.includes(pair)) ?? others;
  state.format = prefer(['int4'], pairs[pairs.length - 1] ?? NONE);
  state.other = window.innerWidth >= 1100 ? prefer(['int4c/int4', 'int4c(8)/int4'], NONE) : NONE;
  $('format').value = state.format;
  $('other').value = state.other;
  state.step = Math.ceil(shownTokens().length * 0.6);

  for (const [id, set] of Object.entries({
    format: (value) => { state.format = value; },
    other: (value) => { state.other = value; },
    prompt: (value) => { state.prompt = Number(value); state.step = Math.min(state.step, shownTokens().length); $('inspect').value = 'newest'; },
    layer: (value) => { state.layer = Number(value); },
    head: (value) => { state.head = Number(value); },
    outlier: (value) => { state.outlier = Number(value); },
    stretch: () => {},
  })) $(id).addEventListener('change', () => { set($(id).value); choose(); });
  for (const id of ['inspect', 'side']) $(id).addEventListener('change', drawInspector);
  $('scrub').addEventListener('input', () => { pause(); go(Number($('scrub').value)); });
  const moves = { first: () => go(0), back: () => go(state.step - 1), next: () => go(state.step + 1), last: () => go(shownTokens().length) };
  for (const [id, move] of Object.entries(moves)) {
    // A button that is off loses the focus: it goes to the one that plays.
    $(id).addEventListener('click', () => { pause(); move(); if ($(id).disabled) $('play').focus(); });
  }
  $('play').addEventListener('click', play);
  $('watch').addEventListener('keydown', (event) => {
    const own = event.target.closest('select, input, a, [role=button], .scroll, .rowtable, .words');
    if (own || event.ctrlKey || event.altKey || event.metaKey) return;
    const keys = { ArrowRight: moves.next, ArrowLeft: moves.back, Home: moves.first, End: moves.last };
    if (keys[event.key]) {
      event.preventDefault();
      pause();
      keys[event.key]();
    }
    if (event.key === ' ' && event.target.tagName !== 'BUTTON') {
      event.preventDefault();
      play();
    }
  });
  $('meaning').hidden = DATA.measured.trained;
  const first = 'Each column is a token, each row a channel of the chosen head: on top what the model computed, below it the scales in grey, what the cache gives back, and how far '
    + 'that is off. Formats whose scales run over tokens keep rows in f16 until a group is full; then the group is packed at once. ';
  $('watch-intro').textContent = first + (DATA.measured.mode === 'prefill'
    ? 'In this run each prompt went into the cache at once, so every prediction read packed rows already; the rows are shown in the order in which they would come one by one, which ends in the same bytes.'
    : 'In this run the tokens came one by one, as shown: a prediction reads what the cache holds at that moment.');
}
