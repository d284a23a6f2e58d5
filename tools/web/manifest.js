// The manifest and the cases of an export folder: read, checked, and what follows from their numbers.
'use strict';
globalThis.kvpack ??= {};

(() => {
  const { FolderError, readJson } = kvpack;

  // ---- checks: each takes a value and where it stands, and throws what is wrong --------------------------------------

  const wrong = (at, value, needed) => {
    throw new FolderError(`${at}: ${needed} is needed, not ${JSON.stringify(value) ?? 'nothing'}`);
  };
  const text = (value, at) => (typeof value === 'string' ? value : wrong(at, value, 'a text'));
  const number = (value, at) => (typeof value === 'number' ? value : wrong(at, value, 'a number'));
  const count = (value, at) => (Number.isSafeInteger(value) && value >= 0 ? value : wrong(at, value, 'a whole number'));
  const truth = (value, at) => (typeof value === 'boolean' ? value : wrong(at, value, 'true or false'));
  const oneOf = (...names) => (value, at) => (names.includes(value) ? value : wrong(at, value, `one of ${names.join(', ')}`));
  const list = (of) => (value, at) => {
    if (!Array.isArray(value)) wrong(at, value, 'a list');
    value.forEach((item, i) => of(item, `${at}[${i}]`));
    return value;
  };
  /** An object with such fields at least. A name that ends with `?` may be left out. */
  const object = (fields) => (value, at) => {
    if (typeof value !== 'object' || value === null || Array.isArray(value)) wrong(at, value, 'an object');
    for (const [name, check] of Object.entries(fields)) {
      const key = name.replace('?', '');
      if (value[key] === undefined && name.endsWith('?')) continue;
      check(value[key], `${at}.${key}`);
    }
    return value;
  };
  const record = (of) => (value, at) => {
    if (typeof value !== 'object' || value === null || Array.isArray(value)) wrong(at, value, 'an object');
    for (const [key, item] of Object.entries(value)) of(item, `${at}.${key}`);
    return value;
  };
  /** A path below the folder, of plain names that mean the same in an address and on every system. */
  const path = (value, at) => {
    const inside = typeof value === 'string' && value.split('/').every((part) => /^[\w.-]+$/.test(part) && part !== '.' && part !== '..');
    return inside ? value : wrong(at, value, 'a path within the folder, of letters, digits and _ . -,');
  };
  const triple = (value, at) => {
    list(count)(value, at);
    return value.length === 3 ? value : wrong(at, value, 'three numbers');
  };

  const GEOMETRY = object({
    side: text, bits: count, heads: count, head_dim: count, head_words: count, page_tokens: count, page_words: count,
    scale_layout: text, scale_offset: count, scale_bits: count, token_group: count,
  });
  const MODULE = object({
    name: text, kernel: text, file: path, entry_point: text, workgroup_size: triple, portable: truth,
    features: list(text), limits: record(count),
    bindings: list(object({ group: count, binding: count, name: text, kind: oneOf('uniform', 'read', 'read_write'), type: text })),
    params: object({ size: count, fields: list(object({ name: text, type: oneOf('u32', 'f32', 'i32'), offset: count })) }),
    dispatch: object({ counts: oneOf('invocations', 'workgroups'), formula: text, z: count }),
    pages: record(GEOMETRY),
  });
  const MANIFEST = object({
    generator: text, target: text, shape: record(count), pairs: list(text), modules: list(MODULE),
    vectors: list(object({ case: text, folder: path, 'pair?': text, 'phase?': text, modules: list(text) })),
  });
  const CASE = object({
    case: text, data_offset: count,
    buffers: list(object({
      name: text, type: oneOf('u32', 'f32', 'f16'), shape: list(count), axes: text, 'file?': path, 'fill?': text, 'geometry?': GEOMETRY,
    })),
    steps: list(object({ module: text, workgroups: triple, params: record(number), bindings: record(text) })),
    expect: list(object({ name: text, buffer: text, rule: oneOf('bits', 'bound'), file: path, 'mask?': path, 'bound?': path, kernels: list(text) })),
  });

  function checkSchema(found, file, schema) {
    if (typeof found !== 'object' || found === null || found.schema !== schema) {
      throw new FolderError(`${file}: this is no file of kvpack: its schema is ${JSON.stringify(found?.schema) ?? 'not given'}, not "${schema}"`);
    }
    if (found.version !== 1) throw new FolderError(`${file}: version ${JSON.stringify(found.version)} of ${schema}; this page reads version 1`);
  }

  const twice = (names) => names.find((name, i) => names.indexOf(name) !== i);

  /** Reads and checks manifest.json. */
  async function readManifest(reader) {
    let manifest;
    try {
      manifest = await readJson(reader, 'manifest.json');
    } catch (error) {
      if (!/^manifest\.json: (not in|404)/.test(error.message)) throw error;
      throw new FolderError('there is no manifest.json here: take a folder that `kvpack shaders export` wrote');
    }
    checkSchema(manifest, 'manifest.json', 'kvpack.shaders');
    MANIFEST(manifest, 'manifest.json');
    if (!manifest.target.startsWith('wgsl')) {
      throw new FolderError(`manifest.json: the folder was exported for ${manifest.target}; this needs \`--to wgsl-browser\``);
    }
    const double = twice(manifest.modules.map((module) => module.name));
    if (double !== undefined) throw new FolderError(`manifest.json: two modules are called ${double}`);
    return manifest;
  }

  /** Reads and checks the case.json of one entry of the manifest's `vectors`. */
  async function readCase(reader, manifest, { folder }) {
    const file = `${folder}/case.json`;
    const found = await readJson(reader, file);
    checkSchema(found, file, 'kvpack.case');
    CASE(found, file);
    const fail = (what) => { throw new FolderError(`${file}: ${what}`); };
    const double = twice(found.buffers.map((buffer) => buffer.name));
    if (double !== undefined) fail(`two buffers are called ${double}`);
    const buffers = new Map(found.buffers.map((buffer) => [buffer.name, buffer]));
    for (const buffer of found.buffers) {
      if ((buffer.file === undefined) === (buffer.fill === undefined)) fail(`buffer ${buffer.name} needs a file or a fill`);
      if (buffer.fill !== undefined && !(Number(buffer.fill) <= 0xffffffff)) fail(`buffer ${buffer.name} is filled with ${buffer.fill}`);
    }
    for (const [i, step] of found.steps.entries()) {
      const module = manifest.modules.find((m) => m.name === step.module);
      if (!module) fail(`steps[${i}]: the manifest has no module ${step.module}`);
      for (const binding of module.bindings) {
        if (binding.kind !== 'uniform' && !buffers.has(step.bindings[binding.name])) {
          fail(`steps[${i}]: binding ${binding.name} of ${step.module} gets no buffer of the case`);
        }
      }
      for (const { name } of module.params.fields) {
        if (step.params[name] === undefined) fail(`steps[${i}]: params.${name} of ${step.module} is not given`);
      }
      const rule = workgroups(module, step.params);
      if (rule.some((n, axis) => n !== step.workgroups[axis])) {
        fail(`steps[${i}]: [${step.workgroups.join(', ')}] workgroups, by the manifest's rule [${rule.join(', ')}]`);
      }
    }
    for (const [i, expect] of found.expect.entries()) {
      if (!buffers.has(expect.buffer)) fail(`expect[${i}]: there is no buffer ${expect.buffer}`);
      if (expect.rule === 'bound' && expect.bound === undefined) fail(`expect[${i}]: no bound is given`);
    }
    return found;
  }

  // ---- numbers --------------------------------------------------------------------------------------------------------

  /** The value of a formula: a product of numbers, params.NAME, and such divided and rounded up: params.a * ceil(params.b / 4). */
  function evaluate(formula, params) {
    const fail = () => { throw new FolderError(`the formula ${formula} cannot be read`); };
    const factor = (text) => {
      const [, of, divisor] = /^\s*(?:ceil\(\s*)?([\w.]+)\s*(?:\/\s*([1-9]\d*)\s*\))?\s*$/.exec(text) ?? fail();
      if (text.includes('ceil(') !== (divisor !== undefined)) fail();
      const value = /^\d+$/.test(of) ? Number(of) : of.startsWith('params.') ? params[of.slice('params.'.length)] : undefined;
      if (typeof value !== 'number') fail();
      return Math.ceil(value / Number(divisor ?? 1));
    };
    return formula.split('*').map(factor).reduce((a, b) => a * b, 1);
  }

  /** Workgroups of a dispatch by the manifest's rule. */
  function workgroups(module, params) {
    const { counts, formula, z } = module.dispatch;
    const value = evaluate(formula, params);
    const groups = counts === 'invocations' ? Math.ceil(value / module.workgroup_size[0]) : value;
    // Folded, since one axis takes 65535 at most.
    const rows = Math.max(1, Math.ceil(groups / 65535));
    return [Math.ceil(groups / rows), rows, z];
  }

  /** The uniform's bytes, by the manifest's offsets. */
  function packParams(module, params) {
    const bytes = new DataView(new ArrayBuffer(Math.max(16, Math.ceil(module.params.size / 16) * 16)));
    const set = { u32: 'setUint32', i32: 'setInt32', f32: 'setFloat32' };
    for (const { name, type, offset } of module.params.fields) bytes[set[type]](offset, params[name], true);
    return bytes.buffer;
  }

  Object.assign(kvpack, { readManifest, readCase, workgroups, packParams });
})();
