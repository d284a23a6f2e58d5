// Decode bandwidth of each pair beside the read roof of the same run, as `kvpack bench` measures it: one query token a
// sequence, attention over packed pages and the merge of its partials, timed by themselves.
'use strict';
globalThis.kvpack ??= {};

(() => {
  const { FolderError, NoGpu, USAGE, readCase, packParams, workgroups, needs, scoped, makeBuffer, prepare, readBack,
    runSteps, pipelineStore, destroyAll } = kvpack;

  const CACHE_FACTOR = 4; // a pass reads so many times the last cache, where it is to come from memory
  const SPLIT_TOKENS = 512; // of one work item
  const LEAST_SUBMISSION = 0.02; // seconds: beside it neither submitting nor timestamps in steps of 100 us count
  const MOST_REPEATS = 256;
  const LEAST_SAMPLES = 5;
  const MOST_SAMPLES = 1000;
  const WARM_UPS = 2;
  const VECTORS = 64; // of 16 bytes that an invocation of a read kernel takes, about
  const BUFFER_BYTES = 2 ** 30; // the largest buffer that is made

  /** The size that is assumed of an adapter's last cache, in bytes: no browser tells it. */
  const assumedCache = (info) => (info.software ? 32 : 64) * 2 ** 20;

  // ---- time -------------------------------------------------------------------------------------------------------

  /** The lower quartile, the median and the upper quartile. */
  function quartiles(values) {
    const sorted = [...values].sort((a, b) => a - b);
    return [0.25, 0.5, 0.75].map((share) => {
      const at = share * (sorted.length - 1);
      const [below, above] = [sorted[Math.floor(at)], sorted[Math.ceil(at)]];
      return below + (above - below) * (at % 1);
    });
  }

  /** Seconds of all readings and their clock: timestamps if all of them go forward and fit into the wall clock's time. */
  function settle(readings) {
    const wall = (note) => ({ seconds: readings.map((r) => Math.max(r.wall, 1e-9)), clock: 'wall clock', note });
    if (readings.some((r) => r.ticks === undefined)) return wall('');
    const seconds = readings.map(({ ticks: [before, after] }) => Number(after - before) * 1e-9);
    if (!seconds.every((s, i) => s > 0 && readings[i].ticks[0] > 0)) return wall('the timestamps do not go forward');
    // 100 us: the step to which browsers round.
    if (!seconds.every((s, i) => s <= readings[i].wall * 1.05 + 1e-4)) return wall('the timestamps do not fit into the time around them');
    return { seconds, clock: 'timestamps', note: '' };
  }

  /** Times dispatches on one device. */
  class Timer {
    constructor(device) {
      this.device = device;
      if (!device.features.has('timestamp-query')) return;
      this.set = device.createQuerySet({ type: 'timestamp', count: 2 });
      this.resolved = makeBuffer(device, 'timestamps', 16, USAGE.QUERY_RESOLVE | USAGE.COPY_SRC);
    }

    /** One submission of `repeats` passes over the dispatches: its wall time, and timestamps where there are any. */
    async read(dispatches, repeats) {
      const { device, set } = this;
      const encoder = device.createCommandEncoder();
      const pass = encoder.beginComputePass(set && { timestampWrites: { querySet: set, beginningOfPassWriteIndex: 0, endOfPassWriteIndex: 1 } });
      for (let i = 0; i < repeats; i++) for (const dispatch of dispatches) dispatch.record(pass);
      pass.end();
      if (set) encoder.resolveQuerySet(set, 0, 2, this.resolved, 0);
      const commands = encoder.finish();
      await device.queue.onSubmittedWorkDone();
      const started = performance.now();
      device.queue.submit([commands]);
      await device.queue.onSubmittedWorkDone();
      const wall = (performance.now() - started) / 1000;
      return { wall, ticks: set && [...new BigUint64Array(await readBack(device, this.resolved, 16))] };
    }

    /** Warms up, then takes samples for about so many seconds. */
    async sample(dispatches, seconds) {
      let last;
      const warm = performance.now();
      for (let i = 0; i < WARM_UPS; i++) last = await this.read(dispatches, 1);
      const repeats = Math.min(MOST_REPEATS, Math.max(1, Math.ceil(LEAST_SUBMISSION / Math.max(last.wall, 1e-6))));
      if (repeats > 1) await this.read(dispatches, repeats);
      const readings = [];
      const started = performance.now();
      while (readings.length < LEAST_SAMPLES || (performance.now() - started < seconds * 1000 && readings.length < MOST_SAMPLES)) {
        readings.push(await this.read(dispatches, repeats));
      }
      const settled = settle(readings);
      const each = settled.seconds.map((s) => s / repeats);
      return { seconds: quartiles(each), samples: each, repeats, clock: settled.clock, note: settled.note, warmUp: (started - warm) / 1000 };
    }
  }

  // ---- buffers ----------------------------------------------------------------------------------------------------

  /** A buffer of `size` bytes that repeats the bytes of `pattern`, a typed array. */
  function repeated(device, label, size, pattern) {
    const buffer = makeBuffer(device, label, size, USAGE.STORAGE | USAGE.COPY_DST);
    // The pattern often enough for few copies.
    const times = Math.max(1, Math.min(Math.floor(2 ** 22 / pattern.byteLength), Math.ceil(size / pattern.byteLength)));
    const chunk = makeBuffer(device, label, pattern.byteLength * times, USAGE.COPY_SRC | USAGE.COPY_DST);
    for (let i = 0; i < times; i++) device.queue.writeBuffer(chunk, i * pattern.byteLength, pattern);
    const encoder = device.createCommandEncoder();
    const step = pattern.byteLength * times;
    for (let at = 0; at < size; at += step) encoder.copyBufferToBuffer(chunk, 0, buffer, at, Math.min(step, size - at));
    device.queue.submit([encoder.finish()]);
    chunk.destroy();
    return buffer;
  }

  function uploaded(device, label, words) {
    const buffer = makeBuffer(device, label, words.byteLength, USAGE.STORAGE | USAGE.COPY_DST);
    device.queue.writeBuffer(buffer, 0, words);
    return buffer;
  }

  const scratch = (device, label, size) => makeBuffer(device, label, size, USAGE.STORAGE | USAGE.COPY_SRC | USAGE.COPY_DST);

  // ---- the read roof ----------------------------------------------------------------------------------------------

  async function measureRoof({ device, timer, manifest, pipelines, bytes, cacheBytes, seconds, tell }) {
    const size = Math.floor(Math.min(bytes, device.limits.maxStorageBufferBindingSize, BUFFER_BYTES) / 256) * 256;
    const random = new Uint32Array(1 << 16);
    crypto.getRandomValues(random.subarray(0, 1 << 14));
    for (let i = 1 << 14; i < random.length; i++) random[i] = Math.imul(random[i - (1 << 14)], 2654435761) + i;
    const rows = [];
    const source = await scoped(device, () => repeated(device, 'words to read', size, random));
    for (const module of manifest.modules.filter((m) => /^read_/.test(m.kernel))) {
      const vectors = size / 16;
      const [invocations] = module.workgroup_size;
      const groups = Math.min(65535, Math.max(1, Math.ceil(vectors / (VECTORS * invocations))));
      const sums = scratch(device, 'sums', groups * invocations * 4);
      const buffers = { source, sums };
      const dispatch = prepare(device, await pipelines(device, module), packParams(module, { vectors }), (name) => buffers[name], [groups, 1, 1]);
      const times = await scoped(device, () => timer.sample([dispatch], seconds));
      rows.push({ kernel: module.name, bytes: size, ...times, gbPerS: size / times.seconds[1] / 1e9, resident: size < CACHE_FACTOR * cacheBytes });
      sums.destroy();
      dispatch.destroy();
      await tell({ roof: rows.at(-1) });
    }
    source.destroy();
    return rows;
  }

  // ---- decode -----------------------------------------------------------------------------------------------------

  /** Useful bytes of a full page: codes and scales of all slots. */
  function liveBytes(page) {
    const row = page.heads * page.head_dim;
    const scales = {
      per_token: page.page_tokens * page.heads, per_block: page.page_tokens * row / 16, per_channel: page.page_tokens / page.token_group * row,
    }[page.scale_layout] ?? 0;
    return page.page_tokens * page.heads * page.head_words * 4 + scales * page.scale_bits / 8;
  }

  /** The step of attention over packed pages, and that of the merge; undefined where the case has none. */
  function decodeSteps(modules, kase) {
    const of = (kernel) => kase.steps.filter((step) => modules.get(step.module).kernel === kernel);
    const words = ({ module }) => modules.get(module).pages.k.page_words + modules.get(module).pages.v.page_words;
    const [split] = of('attention_split').sort((a, b) => words(a) - words(b));
    const [merge] = of('attention_merge');
    return split && merge ? { split, merge } : undefined;
  }

  /** Full pages of a case as [K page, V page] pairs, from the work items of a step. */
  function fullPages(items, table, pageTokens) {
    const found = [];
    for (let i = 0; i + 7 <= items.length; i += 7) {
      for (let entry = items[i]; entry < items[i] + items[i + 1]; entry++) {
        const [k, v, first, end] = table.subarray(entry * 4, entry * 4 + 4);
        if (first === 0 && end === pageTokens) found.push([k, v]);
      }
    }
    return found;
  }

  /** Work lists of `sequences` over pages that lie one after the other: { items, table, merges }. */
  function plan({ sequences, pages, stride, pageTokens, qHeads, queries, position }) {
    const splitPages = Math.max(1, Math.floor(SPLIT_TOKENS / pageTokens));
    const splits = Math.ceil(pages / splitPages);
    const items = new Uint32Array(sequences.length * splits * 7);
    const table = new Uint32Array(sequences.length * pages * 4);
    const merges = new Uint32Array(sequences.length * 4);
    sequences.forEach((sequence, row) => {
      for (let page = 0; page < pages; page++) {
        const at = sequence * stride + page;
        table.set([at, at, 0, pageTokens], (row * pages + page) * 4);
      }
      for (let split = 0; split < splits; split++) {
        const first = split * splitPages;
        const partial = (row * splits + split) * qHeads;
        const count = Math.min(splitPages, pages - first);
        const item = [row * pages + first, count, first * pageTokens, sequence % queries, 1, position, partial];
        items.set(item, (row * splits + split) * 7);
      }
      merges.set([row * splits * qHeads, qHeads, splits, row], row * 4);
    });
    return { items, table, merges, partials: sequences.length * splits * qHeads };
  }

  /** One pair: fills pools with the full pages of its decode case, checks that outputs are right, and times a pass. */
  async function measurePair({ device, timer, reader, manifest, pipelines, entry, context, sequences, cacheBytes, seconds }) {
    const modules = new Map(manifest.modules.map((module) => [module.name, module]));
    const kase = await readCase(reader, manifest, entry);
    const steps = decodeSteps(modules, kase);
    if (!steps) throw new FolderError('its case has no attention');
    const { split, merge } = steps;
    const ready = new Map();
    for (const { module } of kase.steps) ready.set(module, await pipelines(device, modules.get(module)));
    const buffers = await runSteps(device, reader, entry.folder, kase, ready);
    const made = [];
    const keep = (buffer) => { made.push(buffer); return buffer; };
    try {
      const words = async (name) => new Uint32Array(await readBack(device, buffers.get(name).buffer, buffers.get(name).count * 4));
      const { k, v } = modules.get(split.module).pages;
      const base = fullPages(await words(split.bindings.items), await words(split.bindings.page_table), k.page_tokens);
      if (base.length === 0) throw new FolderError('its case has no full page');

      // A multiple of the case's pages: then the longest context has the same softmax as the pages once.
      const pages = Math.ceil(context / k.page_tokens / base.length) * base.length;
      const useful = pages * (liveBytes(k) + liveBytes(v));
      const most = Math.min(device.limits.maxStorageBufferBindingSize, device.limits.maxBufferSize, BUFFER_BYTES);
      const fits = Math.floor(most / (pages * Math.max(k.page_words, v.page_words) * 4));
      if (fits === 0) throw new FolderError(`a pool of ${pages} pages does not fit a buffer of this adapter: choose a shorter context`);
      const count = Math.min(fits, sequences || Math.ceil(CACHE_FACTOR * cacheBytes / useful));

      const pool = async (side, page, name) => {
        const all = await words(name);
        const pattern = new Uint32Array(base.length * page.page_words);
        base.forEach((pair, i) => pattern.set(all.subarray(pair[side] * page.page_words, (pair[side] + 1) * page.page_words), i * page.page_words));
        return keep(repeated(device, name, count * pages * page.page_words * 4, pattern));
      };
      const pools = await scoped(device, async () => ({ k: await pool(0, k, split.bindings.k_pages), v: await pool(1, v, split.bindings.v_pages) }));

      const qHeads = split.params.q_heads;
      const queries = kase.buffers.find((b) => b.name === split.bindings.q).shape[0];
      const dispatches = (rows, length) => {
        const position = length * k.page_tokens - 1;
        const lists = plan({ sequences: rows, pages: length, stride: pages, pageTokens: k.page_tokens, qHeads, queries, position });
        const own = {
          items: uploaded(device, 'items', lists.items), page_table: uploaded(device, 'page table', lists.table), k_pages: pools.k, v_pages: pools.v,
          merges: uploaded(device, 'merges', lists.merges), partial_o: scratch(device, 'partial sums', lists.partials * v.head_dim * 4),
          partial_ml: scratch(device, 'partial scores', lists.partials * 8), output: scratch(device, 'output', rows.length * qHeads * v.head_dim * 4),
          lse: scratch(device, 'lse', rows.length * qHeads * 4),
        };
        Object.values(own).forEach(keep);
        const run = (step, params) => {
          const { module } = ready.get(step.module);
          const values = { ...step.params, ...params };
          return prepare(device, ready.get(step.module), packParams(module, values),
            (name) => own[name] ?? buffers.get(step.bindings[name]).buffer, workgroups(module, values));
        };
        const all = [
          run(split, { items: lists.items.length / 7, back: 0xffffffff, ahead: 0, softcap: 0 }),
          run(merge, { rows: rows.length * qHeads, sinks: 0, lse: 1 }),
        ];
        return { all, output: own.output, lse: own.lse };
      };

      const every = [...Array(count).keys()];
      const long = await scoped(device, () => dispatches(every, pages));
      const times = await scoped(device, () => timer.sample(long.all, seconds));
      const short = dispatches([0, count - 1], base.length);
      await checkOutputs({ device, timer, long, short, count, qHeads, dim: v.head_dim, times: pages / base.length });

      // Query heads of a KV head that do not fit one workgroup read the pages again.
      const passes = modules.get(split.module).dispatch.z / k.heads;
      const bytes = useful * count * passes;
      return {
        pair: entry.pair, modules: [split.module, merge.module], context: pages * k.page_tokens, sequences: count, bytes,
        bytesPerToken: (liveBytes(k) + liveBytes(v)) / k.page_tokens, touched: useful * count, resident: useful * count < CACHE_FACTOR * cacheBytes,
        ...times, gbPerS: bytes / times.seconds[1] / 1e9, secondsPerSequence: times.seconds[1] / count,
      };
    } finally {
      destroyAll(buffers);
      made.forEach((buffer) => buffer.destroy());
    }
  }

  /**
   * Outputs and LSE of the first and the last sequence against attention over the case's pages once. Every page occurs
   * `times`, so the softmax is the same, and the LSE larger by the logarithm. 1 % of the largest output, and 0.01, leave
   * room for sums in another order. Whether a kernel is exact is for the cases to say: this tells work that was left out.
   */
  async function checkOutputs({ device, timer, long, short, count, qHeads, dim, times }) {
    await timer.read(short.all, 1);
    const floats = async (buffer, rows) => new Float32Array(await readBack(device, buffer, rows * 4));
    const [far, near] = [await floats(long.output, count * qHeads * dim), await floats(short.output, 2 * qHeads * dim)];
    const [farLse, nearLse] = [await floats(long.lse, count * qHeads), await floats(short.lse, 2 * qHeads)];
    const compare = (what, found, expected, tolerance) => {
      const at = expected.findIndex((x, i) => !(Math.abs(x - found[i]) <= tolerance));
      if (at >= 0 || !(tolerance > 0)) throw new FolderError(`${what} ${at} is wrong: ${found[at]}, not ${expected[at]}`);
    };
    [0, count - 1].forEach((sequence, i) => {
      const part = (all, row, size) => all.subarray(row * size, (row + 1) * size);
      const expected = part(near, i, qHeads * dim);
      const largest = expected.reduce((m, x) => Math.max(m, Math.abs(x)), 0);
      compare(`sequence ${sequence}, output`, part(far, sequence, qHeads * dim), expected, 0.01 * largest);
      compare(`sequence ${sequence}, LSE`, part(farLse, sequence, qHeads), part(nearLse, i, qHeads).map((x) => x + Math.log(times)), 0.01);
    });
  }

  /**
   * Measures the roof and every pair with a decode case. `sequences` 0 chooses as many as take a pass out of the cache.
   * `tell` gets { roof }, { row } and { pair } as they come; it may return a promise, and throws to stop.
   */
  async function runBench({ devices, reader, manifest, context, sequences, cacheBytes, seconds, tell }) {
    const entries = manifest.vectors.filter((entry) => entry.phase === 'decode' && entry.pair);
    const usable = (entry) => devices.missing(needs(manifest.modules.filter((m) => entry.modules?.includes(m.name)))) === '';
    const here = entries.filter(usable);
    const asked = needs(manifest.modules.filter((m) => /^read_/.test(m.kernel) || here.some((entry) => entry.modules?.includes(m.name))));
    const { limits, features } = devices.info;
    const device = await devices.get({
      features: [...asked.features, ...features.filter((name) => name === 'timestamp-query')],
      limits: {
        ...asked.limits,
        maxStorageBufferBindingSize: Math.min(limits.maxStorageBufferBindingSize, BUFFER_BYTES),
        maxBufferSize: Math.min(limits.maxBufferSize, BUFFER_BYTES),
      },
    });
    const own = { device, timer: new Timer(device), pipelines: pipelineStore(reader) };
    const common = { ...own, reader, manifest, context, sequences, cacheBytes, seconds, tell };
    const result = { context, sequences, cacheBytes, seconds, roof: [], rows: [] };
    result.roof = await measureRoof({ ...common, bytes: CACHE_FACTOR * cacheBytes, seconds: seconds / 2 });
    const roof = Math.max(0, ...result.roof.map((row) => row.gbPerS));
    const highest = Math.max(0, ...result.roof.map((row) => row.bytes / row.seconds[0] / 1e9));
    for (const entry of entries) {
      await tell({ pair: entry.pair });
      let row;
      try {
        if (!usable(entry)) throw new FolderError('this adapter lacks what its modules need');
        row = await measurePair({ ...common, entry });
        row.aboveRoof = highest > 0 && row.gbPerS > highest;
        // A rate from a cache, or one that is not believed, is no share of the memory's.
        row.share = roof > 0 && !row.aboveRoof && !row.resident ? row.gbPerS / roof : null;
      } catch (error) {
        if (error instanceof NoGpu) throw error;
        await devices.check(`the measurement of ${entry.pair}`);
        row = { pair: entry.pair, message: error.message };
      }
      result.rows.push(row);
      await tell({ row });
    }
    return { ...result, roofGbPerS: roof };
  }

  Object.assign(kvpack, { runBench, assumedCache, settle });
})();
