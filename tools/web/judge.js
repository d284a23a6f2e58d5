// Judging what a kernel wrote, and saying where the first difference lies.
'use strict';
globalThis.kvpack ??= {};

(() => {
  const { FolderError, readNpy, geometryOf } = kvpack;

  const hex = (bits) => `0x${bits.toString(16).padStart(8, '0')}`;
  const floats = new DataView(new ArrayBuffer(4));
  const floatOf = (bits) => { floats.setUint32(0, bits); return floats.getFloat32(0); };

  /** Names of a buffer's axes: "[token, head, channel]" gives three. */
  const axesOf = (buffer) => buffer.axes.replace(/[[\]]/g, '').split(',').map((name) => name.trim()).filter(Boolean);

  /** The place of an element in its buffer as [[axis, index]...]. */
  function indices(buffer, index) {
    const names = axesOf(buffer);
    const place = [];
    for (let axis = buffer.shape.length - 1; axis >= 0; axis--) {
      place.unshift([names[axis] ?? `axis ${axis}`, index % buffer.shape[axis]]);
      index = Math.floor(index / buffer.shape[axis]);
    }
    return place;
  }

  /** What the bits `differ` of word `word` of a page are: slot, head and channel of a code, or the place of a scale. */
  function placeInPage(page, word, differ) {
    const low = 31 - Math.clz32(differ & -differ);
    if (word < page.heads * page.head_words * page.page_tokens) {
      const column = Math.floor(word / page.page_tokens);
      const channel = (column % page.head_words) * (32 / page.bits) + Math.floor(low / page.bits);
      return [['slot', word % page.page_tokens], ['head', Math.floor(column / page.head_words)], ['channel', channel], ['plane', 'codes']];
    }
    if (page.scale_bits === 0 || word < page.scale_offset) return [['plane', 'padding']];
    const element = (word - page.scale_offset) * (32 / page.scale_bits) + Math.floor(low / page.scale_bits);
    const row = page.heads * page.head_dim;
    const slots = [['slot', element % page.page_tokens]];
    const column = Math.floor(element / page.page_tokens);
    switch (page.scale_layout) {
      case 'per_token': return column < page.heads ? [...slots, ['head', column], ['plane', 'scales']] : [['plane', 'padding']];
      case 'per_block': return column < row / 16 ? [...slots, ['block', column], ['plane', 'scales']] : [['plane', 'padding']];
      case 'per_channel': {
        const group = Math.floor(element / row);
        if (group >= page.page_tokens / page.token_group) return [['plane', 'padding']];
        const channel = element % row;
        return [['token group', group], ['head', Math.floor(channel / page.head_dim)], ['channel', channel % page.head_dim], ['plane', 'scales']];
      }
      default: return [['plane', 'padding']];
    }
  }

  /** The geometry of the pages that a buffer of the case holds, from the first step that binds it as pages. */
  function pagesOf(modules, kase, name) {
    for (const step of kase.steps) {
      for (const [binding, buffer] of Object.entries(step.bindings)) {
        const geometry = buffer === name && geometryOf(modules.get(step.module), binding);
        if (geometry) return geometry;
      }
    }
    return undefined;
  }

  /** Judges one `expect` of a case by the buffer's words. Reads the expected numbers from the folder. */
  async function judge(reader, folder, modules, kase, expect, words) {
    const buffer = kase.buffers.find((b) => b.name === expect.buffer);
    const load = async (file, types) => {
      const array = await readNpy(reader, `${folder}/${file}`);
      if (!types.includes(array.type)) throw new FolderError(`${folder}/${file}: ${types.join(' or ')} is needed, not ${array.type}`);
      if (array.shape.join() !== buffer.shape.join()) {
        throw new FolderError(`${folder}/${file}: shape (${array.shape.join(', ')}), that of buffer ${buffer.name} is (${buffer.shape.join(', ')})`);
      }
      return array.values;
    };
    let compared = 0;
    let failures = 0;
    let worst = 0; // the largest share of a bound
    let first = -1;
    let expected;
    let mask;
    if (expect.rule === 'bits') {
      expected = await load(expect.file, ['<u4']);
      mask = expect.mask && await load(expect.mask, ['<u4']);
      for (let i = 0; i < words.length; i++) {
        const which = mask ? mask[i] : 0xffffffff;
        if (which === 0) continue;
        compared++;
        if (((words[i] ^ expected[i]) & which) === 0) continue;
        failures++;
        if (first < 0) first = i;
      }
    } else {
      expected = await load(expect.file, ['<f8']);
      const bound = await load(expect.bound, ['<f8']);
      const found = new Float32Array(words.buffer, words.byteOffset, words.length);
      for (let i = 0; i < found.length; i++) {
        compared++;
        const finite = Math.abs(expected[i]) !== Infinity;
        const error = Math.abs(found[i] - expected[i]);
        // Written so that a NaN fails.
        if (finite ? error <= bound[i] : found[i] === expected[i]) {
          if (finite && error > 0) worst = Math.max(worst, error / bound[i]);
          continue;
        }
        failures++;
        if (first < 0) first = i;
      }
      if (first >= 0) mask = bound;
    }
    const result = { name: expect.name, rule: expect.rule, kernels: expect.kernels, ok: failures === 0 && compared > 0, compared, failures };
    if (expect.rule === 'bound') result.worst = worst;
    if (compared === 0) result.message = 'nothing was compared';
    if (first >= 0) result.first = difference(modules, kase, buffer, expect.rule, first, words, expected, mask);
    return result;
  }

  function difference(modules, kase, buffer, rule, index, words, expected, other) {
    const place = indices(buffer, index);
    if (rule === 'bound') {
      return {
        index, place, expected: String(expected[index]), found: `${floatOf(words[index])} (${hex(words[index])})`, bound: String(other[index]),
      };
    }
    const differ = (words[index] ^ expected[index]) & (other ? other[index] : 0xffffffff);
    const page = pagesOf(modules, kase, buffer.name);
    if (page && place.length > 0) place.push(...placeInPage(page, place.at(-1)[1], differ));
    const show = (bits) => (buffer.type === 'f32' ? `${hex(bits)} (${floatOf(bits)})` : hex(bits));
    return { index, place, expected: show(expected[index]), found: show(words[index]), differing: hex(differ >>> 0) };
  }

  /** A place as words: "page 3, word 120, slot 5, head 0, channel 12, codes". */
  const placeText = (place) => place.map(([name, at]) => (name === 'plane' ? at : `${name} ${at}`)).join(', ');

  Object.assign(kvpack, { judge, placeText });
})();
