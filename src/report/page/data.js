// The data of the page: arrays unpacked when they are first needed, codes and scales read as the schema says.

const DATA = JSON.parse($('data').textContent);

const arrays = new Map();
const TYPES = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, f32: Float32Array, f64: Float64Array };

/** The typed array at a place of the list. */
function array(place) {
  if (!arrays.has(place)) {
    const { type, data } = DATA.arrays[place];
    const text = atob(data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    arrays.set(place, new TYPES[type](bytes.buffer));
  }
  return arrays.get(place);
}

/** A small binary float: sign, exponent bits with a bias, mantissa bits. All exponents are of finite numbers. */
function smallFloat(code, exponentBits, mantissaBits, bias) {
  const sign = code >> (exponentBits + mantissaBits) & 1 ? -1 : 1;
  const exponent = code >> mantissaBits & ((1 << exponentBits) - 1);
  const mantissa = (code & ((1 << mantissaBits) - 1)) / (1 << mantissaBits);
  return sign * (exponent === 0 ? mantissa * 2 ** (1 - bias) : (1 + mantissa) * 2 ** (exponent - bias));
}

const half = (code) => smallFloat(code, 5, 10, 15);
const e4m3 = (code) => ((code & 127) === 127 ? NaN : smallFloat(code, 4, 3, 7));
const single = (code) => new Float32Array(new Uint32Array([code]).buffer)[0];
const signed = (code, bits) => (code << (32 - bits)) >> (32 - bits);

/** The value of a code, in units of its scale. */
function codeValue(element, code) {
  switch (element) {
    case 'f32': return single(code);
    case 'f16': return half(code);
    case 'fp8_e4m3': return e4m3(code);
    case 'fp4_e2m1': return smallFloat(code, 2, 1, 1);
    case 'int8': return signed(code, 8);
    case 'int4': return signed(code, 4);
    case 'int2': return signed(code, 2);
    default: return NaN;
  }
}

const scaleValue = { f16: half, e4m3, f32: single };

/** One side (k or v) of one layer and head of a prompt in a run. Tokens are places among the shown ones. */
class Stored {
  constructor(recording, run, prompt, layer, head, side) {
    this.recording = recording;
    this.kind = run[side];
    this.head = head;
    this.heads = recording.shown_heads.length;
    this.channels = recording.head_dim;
    this.positions = recording.prompts[prompt].shown;
    const data = run.prompts[prompt].layers[layer][side];
    this.rows = array(data.rows);
    this.words = array(data.words);
    this.scales = array(data.scales);
    this.groups = data.groups;
    this.waitingWords = array(data.waiting);
    this.packedAt = array(data.packed_at);
    const scales = run.tensor_scales[recording.shown_layers[layer]];
    // JSON has the shortest text of an f32; its value is that of the nearest f32.
    this.tensorScale = scales ? Math.fround(scales[side === 'k' ? 0 : 1]) : 1;
  }

  get realHead() {
    return this.recording.shown_heads[this.head];
  }

  computed(token, channel) {
    return this.rows[(token * this.heads + this.head) * this.channels + channel];
  }

  word(token, w) {
    return this.words[(token * this.heads + this.head) * this.kind.head_words + w];
  }

  code(token, channel) {
    const { bits } = this.kind;
    const n = 32 / bits;
    const shift = channel % n * bits;
    const mask = bits === 32 ? 0xffffffff : 2 ** bits - 1;
    return ((this.word(token, Math.floor(channel / n)) >>> shift) & mask) >>> 0;
  }

  /** Which scale a number has: its place in the array, or -1. */
  scalePlace(token, channel) {
    const row = this.recording.kv_heads * this.channels;
    switch (this.kind.layout) {
      case 'per_token': return token * this.heads + this.head;
      case 'per_block': return token * (row / 16) + Math.floor((this.realHead * this.channels + channel) / 16);
      case 'per_channel': {
        const group = this.groups.indexOf(Math.floor(this.positions[token] / this.kind.group));
        return (group * this.heads + this.head) * this.channels + channel;
      }
      default: return -1;
    }
  }

  scaleBits(token, channel) {
    const place = this.scalePlace(token, channel);
    return place < 0 ? null : this.scales[place];
  }

  scale(token, channel) {
    const bits = this.scaleBits(token, channel);
    if (bits !== null) return scaleValue[this.kind.scale_type](bits);
    return this.kind.layout === 'per_tensor' ? this.tensorScale : 1;
  }

  get scaleWidth() {
    return { f16: 16, e4m3: 8, f32: 32 }[this.kind.scale_type];
  }

  /**
   * The words of the page that hold the scales of a packed row when the cache holds `length` tokens: index, page, the word (null where not all of it
   * is known), and its parts from bit 0 on. A part is another token's, unless scales run over tokens; its value is null where that token is not packed
   * or not shown.
   */
  scaleWords(token, length) {
    const { kind } = this;
    const position = this.positions[token];
    const page = Math.floor(position / kind.page_tokens);
    const slot = position % kind.page_tokens;
    const n = 32 / this.scaleWidth;
    const byChannel = kind.layout === 'per_channel';
    const row = this.recording.kv_heads * this.channels;
    const words = new Map();
    for (let channel = 0; channel < this.channels; channel++) {
      const rowChannel = this.realHead * this.channels + channel;
      const element = byChannel ? Math.floor(slot / kind.group) * row + rowChannel
        : (kind.layout === 'per_block' ? Math.floor(rowChannel / 16) : this.realHead) * kind.page_tokens + slot;
      const index = kind.scale_offset + Math.floor(element / n);
      if (words.has(index)) continue;
      // Pages have whole words of tokens, and heads whole words of channels.
      const first = (byChannel ? channel : slot) - element % n;
      const parts = Array.from({ length: n }, (_, i) => {
        if (byChannel) return { label: `c${first + i}`, own: true, value: this.scaleBits(token, first + i) };
        const other = page * kind.page_tokens + first + i;
        const at = this.positions.indexOf(other);
        return { label: `t${other + 1}`, own: other === position, value: at >= 0 && this.isPacked(at, length) ? this.scaleBits(at, channel) : null };
      });
      const known = parts.every(({ value }) => value !== null);
      const word = known ? parts.reduce((sum, { value }, i) => sum + value * 2 ** (i * this.scaleWidth), 0) : null;
      words.set(index, { index, page, word, parts });
    }
    return [...words.values()];
  }

  /** What is read back of a packed number: one multiplication, rounded to f32. */
  unpacked(token, channel) {
    return Math.fround(codeValue(this.kind.element, this.code(token, channel)) * this.scale(token, channel));
  }

  waitingWord(token, w) {
    return this.waitingWords[(token * this.heads + this.head) * (this.channels / 2) + w];
  }

  /** What is read of a number while its row waits in f16. */
  waiting(token, channel) {
    return half(this.waitingWord(token, channel >> 1) >>> (channel % 2 * 16) & 0xffff);
  }

  /** Whether a row is packed when the cache holds `length` tokens. */
  isPacked(token, length) {
    const at = this.packedAt[token];
    return at > 0 && length >= at;
  }

  /** What the cache gives for a number when it holds `length` tokens. */
  read(token, channel, length) {
    return this.isPacked(token, length) ? this.unpacked(token, channel) : this.waiting(token, channel);
  }

  error(token, channel, length) {
    return this.read(token, channel, length) - this.computed(token, channel);
  }
}

const take = (recording, outlier) => recording.takes.find((t) => t.outlier === outlier);
const runOf = (recording, outlier, pair) => take(recording, outlier).runs.find((run) => run.pair === pair);
