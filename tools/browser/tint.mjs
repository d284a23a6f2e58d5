// Compiles WGSL with Tint, the shader compiler of Chromium, through Dawn's null backend: no driver, nothing runs.
//
//   node tools/browser/tint.mjs DIR_OR_FILE...  every .wgsl file, folders searched to any depth
//   node tools/browser/tint.mjs --self-test     proves that bad shaders are rejected and a good one is not
//
// A shader passes if the module has no error and a compute pipeline (automatic layout) can be made from each of its
// entry points, on a device at WebGPU's default limits. Features are asked for only where the file enables them.
// Output: one line (Tint's may be several) per failing file, then `N shaders, N failed`.
// Exit: 0 all compile, 1 a shader failed, 2 usage or no .wgsl file found, 3 the npm package is missing.

import { readFileSync, readdirSync, statSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

/** WGSL `enable` name -> WebGPU feature that a caller may request. Any other name is left for Tint to refuse. */
const FEATURES = { f16: 'shader-f16', subgroups: 'subgroups' };

/** The text with comments blanked out (line breaks kept). WGSL's block comments nest. */
function withoutComments(text) {
  let out = '';
  for (let i = 0, depth = 0; i < text.length; ) {
    const two = text.slice(i, i + 2);
    if (two === '/*') { depth++; i += 2; continue; }
    if (depth > 0 && two === '*/') { depth--; i += 2; out += ' '; continue; }
    if (depth === 0 && two === '//') { while (i < text.length && text[i] !== '\n') i++; continue; }
    if (depth === 0 || text[i] === '\n') out += text[i];
    i++;
  }
  return out;
}

/** Names in `enable a, b;` directives. */
function enabled(text) {
  return [...text.matchAll(/\benable\s+([^;]*);/g)].flatMap((m) => m[1].split(',')).map((s) => s.trim()).filter(Boolean);
}

/** Names of compute entry points: functions whose attributes, in any order, include `@compute`. */
function entryPoints(text) {
  const attribute = String.raw`@\s*\w+\s*(?:\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*)?`;
  const fn = new RegExp(String.raw`((?:${attribute})+)fn\s+([\p{L}\p{N}_]+)\s*\(`, 'gu');
  return [...text.matchAll(fn)].filter((m) => /@\s*compute\b/.test(m[1])).map((m) => m[2]);
}

/** Devices of the null backend, one for each set of features, made when first needed. */
class Devices {
  #gpu;
  #made = new Map();

  constructor(create) {
    this.#gpu = create(['backend=null']);
  }

  async get(features) {
    const key = [...features].sort().join(' ');
    if (!this.#made.has(key)) {
      const adapter = await this.#gpu.requestAdapter();
      if (!adapter) throw new Error("Dawn's null backend gave no adapter");
      this.#made.set(key, await adapter.requestDevice({ requiredFeatures: features }));
    }
    return this.#made.get(key);
  }

  destroy() {
    for (const device of this.#made.values()) device.destroy();
    this.#made.clear();
    this.#gpu = undefined;
  }
}

/** All that Tint and Dawn have against the shader; empty means that it compiles. */
async function complaints(devices, source) {
  const text = withoutComments(source);
  const features = [...new Set(enabled(text).map((name) => FEATURES[name]).filter(Boolean))];
  const device = await devices.get(features);

  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code: source });
  const info = await module.getCompilationInfo();
  const moduleError = await device.popErrorScope();
  const found = info.messages
    .filter((m) => m.type === 'error')
    .map((m) => `${m.lineNum}:${m.linePos} ${m.message}`);
  if (found.length === 0 && moduleError) found.push(moduleError.message);
  if (found.length > 0) return found;

  for (const entryPoint of entryPoints(text)) {
    device.pushErrorScope('validation');
    let thrown;
    try {
      await device.createComputePipelineAsync({ layout: 'auto', compute: { module, entryPoint } });
    } catch (error) {
      thrown = error;
    }
    const scoped = await device.popErrorScope();
    const error = thrown ?? scoped;
    if (error) found.push(`entry point ${entryPoint}: ${error.message}`);
  }
  return found;
}

/** The .wgsl files that a path stands for; a path that is not there is an error. */
function shaderFiles(path) {
  if (!statSync(path).isDirectory()) return [path];
  return readdirSync(path, { withFileTypes: true })
    .sort((a, b) => (a.name < b.name ? -1 : 1))
    .flatMap((entry) => {
      const full = join(path, entry.name);
      if (entry.name === 'node_modules') return [];
      if (statSync(full).isDirectory()) return shaderFiles(full);
      return entry.name.endsWith('.wgsl') ? [full] : [];
    });
}

const COMPUTE = '@compute @workgroup_size(64)\nfn main(@builtin(local_invocation_index) i: u32)';
const OUT = '@group(0) @binding(0) var<storage, read_write> out: array<u32>;\n';

/** [name, what a message must contain, or null where the shader must compile, source] */
const SELF_TEST = [
  ['good shader', null, `${OUT}${COMPUTE} { out[i] = i; workgroupBarrier(); }`],
  ['good shader with f16 and subgroups', null,
    `enable f16;\nenable subgroups;\n${OUT}${COMPUTE} { out[i] = subgroupAdd(u32(f16(i))); }`],
  ['good shader at the limit of workgroup memory', null,
    `var<workgroup> w: array<u32, 4096>;\n${OUT}${COMPUTE} { w[i] = i; workgroupBarrier(); out[i] = w[63u - i]; }`],
  ['barrier in non-uniform flow', 'uniform',
    `${OUT}${COMPUTE} { if (i < 3u) { workgroupBarrier(); } out[i] = i; }`],
  ['undefined identifier', 'nonsense', `${OUT}${COMPUTE} { out[i] = nonsense; }`],
  ['over 16384 bytes of workgroup memory', '16384',
    `var<workgroup> w: array<u32, 4097>;\n${OUT}${COMPUTE} { w[i] = i; workgroupBarrier(); out[i] = w[63u - i]; }`],
  ['second entry point over the limit of invocations', 'entry point second',
    `${OUT}${COMPUTE} { out[i] = i; }\n@workgroup_size(512) @compute fn second() { out[0] = 1u; }`],
  ['f16 without its enable line', 'f16', `${OUT}${COMPUTE} { out[i] = u32(f16(i)); }`],
  ['subgroup call without its enable line', 'subgroup', `${OUT}${COMPUTE} { out[i] = subgroupAdd(i); }`],
  ['enable line only in a comment', 'f16', `// enable f16;\n${OUT}${COMPUTE} { out[i] = u32(f16(i)); }`],
  ['unknown extension', 'expected extension', `enable wgpu_cooperative_matrix;\n${OUT}${COMPUTE} { out[i] = i; }`],
];

async function selfTest(devices) {
  let wrong = 0;
  for (const [name, expected, source] of SELF_TEST) {
    const found = (await complaints(devices, source)).join('\n');
    const right = expected === null ? found === '' : found.includes(expected);
    if (!right) wrong++;
    const verdict = found === '' ? 'accepted' : `rejected: ${found.split('\n')[0]}`;
    console.log(`${right ? 'ok   ' : 'WRONG'} ${name}: ${verdict}`);
  }
  console.log(`self-test: ${SELF_TEST.length} shaders, ${wrong} judged wrongly`);
  return wrong === 0 ? 0 : 1;
}

async function check(devices, files) {
  let failed = 0;
  for (const file of files) {
    let found;
    try {
      found = await complaints(devices, readFileSync(file, 'utf8'));
    } catch (error) {
      found = [error.message];
    }
    if (found.length > 0) {
      failed++;
      console.log(found.map((message) => `${file}${/^\d/.test(message) ? ':' : ': '}${message}`).join('\n'));
    }
  }
  console.log(`${files.length} shaders, ${failed} failed`);
  return failed === 0 ? 0 : 1;
}

async function main(args) {
  const selfTesting = args.length === 1 && args[0] === '--self-test';
  if (args.length === 0 || (!selfTesting && args.some((a) => a.startsWith('-')))) {
    console.error('usage: node tint.mjs DIR_OR_FILE...  |  node tint.mjs --self-test');
    return 2;
  }

  let files = [];
  if (!selfTesting) {
    try {
      files = [...new Set(args.flatMap(shaderFiles))];
    } catch (error) {
      console.error(`tint.mjs: ${error.message}`);
      return 2;
    }
    if (files.length === 0) {
      console.error(`tint.mjs: no .wgsl file in ${args.join(' ')}`);
      return 2;
    }
  }

  let webgpu;
  try {
    webgpu = await import('webgpu');
  } catch (error) {
    const here = dirname(fileURLToPath(import.meta.url));
    console.error(`tint.mjs: the npm package \`webgpu\` does not load (${error.message.split('\n')[0]})`);
    console.error(`Run:  npm ci --prefix "${here}"`);
    return 3;
  }
  Object.assign(globalThis, webgpu.globals);

  const devices = new Devices(webgpu.create);
  try {
    return selfTesting ? await selfTest(devices) : await check(devices, files);
  } finally {
    devices.destroy();
  }
}

// Dawn keeps node alive while a device exists, so leave by hand once the output is out.
const code = await main(process.argv.slice(2));
process.stdout.write('', () => process.exit(code));
