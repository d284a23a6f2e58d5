// One row, bit by bit: computed, code, scale, read back, error; and the words of the page that hold its codes and scales.

function binary(code, bits) {
  return code.toString(2).padStart(bits, '0');
}

/** A lane of the inspector for a run: the row of a token when the cache holds `length` tokens. */
function inspected(stored, name, second, token, length, side) {
  const { kind } = stored;
  const lane = el('div', { class: second ? 'lane second' : 'lane' });
  const position = stored.positions[token];
  const packed = stored.isPacked(token, length);
  const bits = packed ? kind.bits : 16;
  const letter = side === 'k' ? 'K' : 'V';
  lane.append(el('h3', { text: `${name}: ${letter} of token ${position + 1}, layer ${stored.recording.shown_layers[state.layer]}, head ${stored.realHead}` }));
  const plain = kind.layout === 'none' || !packed;
  lane.append(el('p', { class: 'state', text: packed
    ? `${kind.name}: ${plain ? `${bits} bits, no scale` : `a code of ${bits} bits times ${scaleOf(kind, letter)}`}.`
    : `The row waits in f16 until its group of ${kind.group} tokens is full${DATA.measured.window > 0 ? ' and out of the recent window' : ''}; what is read is what waits.` }));

  const head = ['channel', 'computed', 'code', ...(plain ? [] : ['its value', 'scale']), 'read back', 'error'];
  const body = [];
  for (let channel = 0; channel < stored.channels; channel++) {
    const computed = stored.computed(token, channel);
    const read = stored.read(token, channel, length);
    const code = packed ? stored.code(token, channel) : (stored.waitingWord(token, channel >> 1) >>> (channel % 2 * 16)) & 0xffff;
    const lost = read === 0 && computed !== 0;
    const cells = [digits(computed), binary(code, bits),
      ...(plain ? [] : [digits(codeValue(kind.element, code)), digits(stored.scale(token, channel))]), digits(read), digits(read - computed)];
    body.push(el('tr', {}, el('th', { scope: 'row', text: String(channel) }),
      ...cells.map((text, i) => el('td', { text: lost && i === cells.length - 2 ? `${text} lost` : text, class: [i === 1 ? 'mono' : '', lost && i === cells.length - 2 ? 'lost' : ''].join(' ').trim() || undefined }))));
  }
  lane.append(el('div', { class: 'rowtable', tabindex: 0, role: 'region', 'aria-label': `${name}: the row in numbers` },
    el('table', {}, el('thead', {}, el('tr', {}, ...head.map((text) => el('th', { scope: 'col', text })))), el('tbody', {}, ...body))));

  lane.append(el('h4', { text: packed ? 'The codes in the words of the page' : 'The words of the f16 page' }));
  const words = el('div', { class: 'words', tabindex: 0, role: 'region', 'aria-label': `${name}: the words that hold the row` });
  const count = packed ? kind.head_words : stored.channels / 2;
  const page = Math.floor(position / kind.page_tokens);
  const slot = position % kind.page_tokens;
  for (let w = 0; w < count; w++) {
    const word = packed ? stored.word(token, w) : stored.waitingWord(token, w);
    const n = 32 / bits;
    const index = (stored.realHead * count + w) * kind.page_tokens + slot;
    const codes = [];
    // Bit 31 stands on the left, so the highest channel does.
    for (let i = n - 1; i >= 0; i--) {
      const channel = w * n + i;
      const code = bits === 32 ? word : (word >>> (i * bits)) & (2 ** bits - 1);
      codes.push(el('span', { class: i % 2 === 0 ? 'code even' : 'code' }, el('span', { text: binary(code, bits) }),
        el('small', { text: channel < stored.channels ? `c${channel}` : 'unused' })));
    }
    words.append(wordOf(index, page, word, codes));
  }
  lane.append(words);
  if (!plain) lane.append(...scalesInPage(stored, name, token, length, letter));
  return lane;
}

/** A word of a page with its parts, that of the highest bits on the left. A word that is not known whole is null. */
function wordOf(index, page, word, parts) {
  return el('div', { class: 'word' },
    el('p', {}, 'word ', el('span', { text: whole(index) }), ` of page ${page}`, ...(word === null ? [] : [': ', el('code', { text: hex(word) })])),
    el('div', { class: 'bits' }, ...parts));
}

const hex = (word) => `0x${(word >>> 0).toString(16).padStart(8, '0')}`;

/** The words that hold the scales of a packed row, its own marked; a scale of a tensor stands beside the pages. */
function scalesInPage(stored, name, token, length, letter) {
  const titles = { per_channel: 'The scales in the words of the page', per_tensor: 'The scale' };
  const title = el('h4', { text: titles[stored.kind.layout] ?? 'The scale in the words of the page' });
  if (stored.kind.layout === 'per_tensor') {
    const [word] = new Uint32Array(new Float32Array([stored.tensorScale]).buffer);
    return [title, el('p', { class: 'fine tensor' }, `Not in the page: all ${letter} of the layer share one f32, ${digits(stored.tensorScale)}, `, el('code', { text: hex(word) }), '.')];
  }
  const bits = stored.scaleWidth;
  const parts = (of) => of.map(({ value, label, own }, i) => el('span', { class: ['code', i % 2 === 0 ? 'even' : '', own ? 'own' : ''].join(' ').trim() },
    el('span', { text: value === null ? '\u00b7'.repeat(bits) : binary(value, bits) }), el('small', { text: label }))).reverse();
  const list = stored.scaleWords(token, length);
  const others = list.some(({ parts: of }) => of.some(({ own }) => !own));
  const unknown = list.some(({ parts: of }) => of.some(({ value }) => value === null));
  return [title,
    ...(others ? [el('p', { class: 'fine', text: `Those of this row are framed; the others are of the tokens beside it.${unknown ? ' Dots: not written yet, or not shown here.' : ''}` })] : []),
    el('div', { class: 'words scales', tabindex: 0, role: 'region', 'aria-label': `${name}: the words that hold the scales of the row` },
      ...list.map(({ index, page, word, parts: of }) => wordOf(index, page, word, parts(of))))];
}

/** Which numbers of K or V share a scale, in words. */
function scaleSharing(kind, letter) {
  switch (kind.layout) {
    case 'per_token': return 'one for each token and head';
    case 'per_block': return 'one for every 16 channels of a token';
    case 'per_channel': return `one for each channel over ${kind.group} tokens`;
    case 'per_tensor': return `one for all ${letter} of the layer`;
    default: return 'none';
  }
}

function scaleOf(kind, letter) {
  switch (kind.layout) {
    case 'per_token': return 'a scale of this token and head';
    case 'per_block': return 'a scale of 16 channels of this token';
    case 'per_channel': return `a scale of each channel over ${kind.group} tokens`;
    case 'per_tensor': return `the one scale of all ${letter} of the layer`;
    default: return 'no scale';
  }
}
