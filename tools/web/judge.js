// Judging what a kernel wrote, and saying where the first difference lies.
'use strict';
globalThis.kvpack ??= {};

(() => {
  const { FolderError, readNpy } = kvpack;

  const hex = (bits) => `0x${bits.toString(16).padStart(8, '0')}`;
  const floats = new DataView(new ArrayBuffer(4));
  const floatOf = (bits) => { floats.setUint32(0, bits); return floats.getFloat32(0); };

  /** The value of a binary16. */
  function halfOf(bits) {
    const [power, fraction] = [bits >> 10 & 31, bits & 1023];
    const size = power === 31 ? (fraction ? NaN : Infinity) : power === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (power - 25);
    return bits & 0x8000 ? -size : size;
  }

  /** The place of an element in an array of such a shape as [[axis, index]...]; `axes` is like "[token, head, channel]". */
  function indices(axes, shape, index) {
    const names = axes.replace(/^\[|\]$/g, '').split(',').map((name) => name.trim());
    const place = [];
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      place.unshift([names[axis] ?? `axis ${axis}`, index % shape[axis]]);
      index = Math.floor(index / shape[axis]);
    }
    return place;
  }

  /** What the lowest of the bits `differ` in word `word` of a page holds, as the page layout of shaders/README.md has it. */
  function placeInPage(page, word, differ) {
    const bit = 31 - Math.clz32(differ & -differ);
    const padding = [['padding', '']];
    if (word < page.heads * page.head_words * page.page_tokens) {
      const column = Math.floor(word / page.page_tokens);
      const channel = (column % page.head_words) * (32 / page.bits) + Math.floor(bit / page.bits);
      const place = [['slot', word % page.page_tokens], ['head', Math.floor(column / page.head_words)]];
      return channel < page.head_dim ? [...place, ['channel', channel], ['code', '']] : [...place, ...padding];
    }
    if (word < page.scale_offset || page.scale_bits === 0) return padding;
    const element = Math.floor(((word - page.scale_offset) * 32 + bit) / page.scale_bits);
    const row = page.heads * page.head_dim;
    const [slot, column] = [element % page.page_tokens, Math.floor(element / page.page_tokens)];
    switch (page.scale_layout) {
      case 'per_token': return column < page.heads ? [['slot', slot], ['head', column], ['scale', '']] : padding;
      case 'per_block': return column < row / 16 ? [['slot', slot], ['block', column], ['scale', '']] : padding;
      case 'per_channel': {
        const [group, channel] = [Math.floor(element / row), element % row];
        if (group >= page.page_tokens / page.token_group) return padding;
        return [['token group', group], ['head', Math.floor(channel / page.head_dim)], ['channel', channel % page.head_dim], ['scale', '']];
      }
      default: return padding;
    }
  }

  /** Judges one `expect` of a case by the buffer's words. Reads the expected numbers from the folder. */
  async function judge(reader, folder, kase, expect, words) {
    const buffer = kase.buffers.find((b) => b.name === expect.buffer);
    const load = async (file, type, count) => {
      const array = await readNpy(reader, `${folder}/${file}`);
      if (array.type !== type) throw new FolderError(`${folder}/${file}: ${type} is needed, not ${array.type}`);
      if (array.values.length !== count) {
        throw new FolderError(`${folder}/${file}: ${array.values.length} numbers, buffer ${buffer.name} has ${count}`);
      }
      return array.values;
    };
    const result = { name: expect.name, rule: expect.rule, kernels: expect.kernels, ok: false, compared: 0, failures: 0 };
    let first = -1;
    const fail = (i) => {
      if (result.failures++ === 0) first = i;
    };
    if (expect.rule === 'bits') {
      const expected = await load(expect.file, '<u4', words.length);
      const mask = expect.mask && await load(expect.mask, '<u4', words.length);
      for (let i = 0; i < words.length; i++) {
        const which = mask ? mask[i] : 0xffffffff;
        if (which === 0) continue;
        result.compared++;
        if (((words[i] ^ expected[i]) & which) !== 0) fail(i);
      }
      if (first >= 0) result.first = differentBits(buffer, first, words[first], expected[first], mask ? mask[first] : 0xffffffff);
    } else {
      const found = numbers(buffer, words);
      const expected = await load(expect.file, '<f8', found.length);
      const bound = await load(expect.bound, '<f8', found.length);
      result.worst = 0; // the largest share of a bound
      for (let i = 0; i < found.length; i++) {
        result.compared++;
        const error = Math.abs(found[i] - expected[i]);
        // Written so that a NaN fails. Infinities have no distance.
        if (Math.abs(expected[i]) === Infinity ? found[i] === expected[i] : error <= bound[i]) {
          if (error > 0) result.worst = Math.max(result.worst, error / bound[i]);
        } else {
          fail(i);
        }
      }
      if (first >= 0) {
        const place = indices(buffer.axes, buffer.shape, first);
        result.first = { index: first, place, expected: String(expected[first]), found: String(found[first]), bound: String(bound[first]) };
      }
    }
    if (result.compared === 0) result.message = 'nothing was compared';
    result.ok = result.failures === 0 && result.compared > 0;
    return result;
  }

  /** The numbers of a buffer of floats. */
  function numbers(buffer, words) {
    const count = buffer.shape.reduce((a, b) => a * b, 1);
    if (buffer.type === 'f16') return Float64Array.from(new Uint16Array(words.buffer, words.byteOffset, count), halfOf);
    return new Float32Array(words.buffer, words.byteOffset, count);
  }

  function differentBits(buffer, index, found, expected, mask) {
    const differing = ((found ^ expected) & mask) >>> 0;
    // Two numbers of binary16 lie in a word.
    const number = buffer.type === 'f16' ? index * 2 + ((differing & 0xffff) === 0 ? 1 : 0) : index;
    const place = indices(buffer.axes, buffer.shape, number);
    if (buffer.geometry) place.push(...placeInPage(buffer.geometry, place.at(-1)[1], differing));
    const show = (bits) => (buffer.type === 'f32' ? `${hex(bits)} (${floatOf(bits)})` : hex(bits));
    return { index, place, expected: show(expected), found: show(found), differing: hex(differing) };
  }

  /** A place as words: "page 3, word 120, slot 5, head 0, channel 12, code". */
  const placeText = (place) => place.map(([name, at]) => `${name} ${at}`.trim()).join(', ');

  Object.assign(kvpack, { judge, placeText });
})();
