// Runs an export folder under Dawn for Node: compiles every module, runs every case, judges what came out.
//
//   node tools/browser/run.mjs DIR [--case NAME]... [--unzeroed] [--json FILE]
//
// DIR is what `kvpack shaders export --to wgsl-browser --vectors --out DIR` wrote. Portable modules get a device with
// WebGPU's default limits and no feature; others what their manifest entry asks for. The driver is the one that Vulkan's
// loader finds: VK_DRIVER_FILES chooses (Dawn refuses Mesa before 24; `eval "$(tools/setup.sh)"` names a newer one).
// --unzeroed leaves workgroup memory as it is at first: kernels that store before they load must not need zeros there, and
// SwiftShader takes seconds a kernel to compile their writing.
// Output: a line for each module and check, then `N modules, N checks, N failed, N left out`.
// Exit: 0 all passed, 1 something failed or nothing was compared, 2 usage or no export folder, 3 the npm package is missing,
// 4 Dawn has no driver.

import { accessSync, constants, lstatSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { basename, dirname, join, resolve } from 'node:path';
import { Missing, need, runScript } from './chromium.mjs';
import '../web/folder.js';
import '../web/manifest.js';
import '../web/gpu.js';
import '../web/judge.js';
import '../web/run.js';

const { kvpack } = globalThis;
const { FolderError, NoGpu } = kvpack;

/** The reader of a folder on disk. */
function folderReader(folder) {
  return {
    name: basename(resolve(folder)),
    async read(path) {
      try {
        const file = readFileSync(join(folder, path));
        return file.buffer.slice(file.byteOffset, file.byteOffset + file.byteLength);
      } catch (error) {
        throw new FolderError(`${path}: ${error.code === 'ENOENT' ? 'not in the folder' : error.message}`);
      }
    },
  };
}

/** A text of the folder in one line, without letters that steer a terminal or turn the direction of a line. */
const plain = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (letter) => `\\u{${letter.codePointAt(0).toString(16)}}`);
/** The same for words of several lines; the further ones are indented, so that none looks like one of this script. */
const indented = (text) => String(text).split('\n').map(plain).join('\n    ');

/** What speaks against writing a file there; undefined where nothing does. */
function unwritable(path) {
  try {
    const found = statSync(path, { throwIfNoEntry: false });
    if (found?.isDirectory()) return 'it is a folder';
    const place = found ? path : dirname(resolve(path));
    if (!found && !statSync(place, { throwIfNoEntry: false })?.isDirectory()) return `there is no folder ${place}`;
    accessSync(place, constants.W_OK);
    return undefined;
  } catch (error) {
    return error.message;
  }
}

/** Writes a file, whole or not at all. Links (as /dev/stdout is one) and what is no file are never replaced, but written to. */
function writeWhole(path, text) {
  const found = lstatSync(path, { throwIfNoEntry: false });
  const made = found && !found.isFile() ? path : `${path}.${process.pid}.part`;
  try {
    writeFileSync(made, text);
    if (made !== path) renameSync(made, path);
  } catch (error) {
    if (made !== path) rmSync(made, { force: true });
    throw error;
  }
}

function checkLine(kase, check) {
  if (check.ok) {
    const bits = `${check.compared} words, every bit`;
    const bound = `${check.compared} numbers, at most ${(100 * check.worst).toFixed(1)}% of the bound`;
    return `ok      ${kase}: ${check.name}: ${check.rule === 'bits' ? bits : bound}`;
  }
  const head = `FAILED  ${kase}: ${check.name}: ${check.message ?? `${check.failures} of ${check.compared} differ`}`;
  if (!check.first) return head;
  const { place, expected, found, bound, differing } = check.first;
  return `${head}; the first at ${kvpack.placeText(place)}: expected ${expected}, found ${found}`
    + `${bound === undefined ? `, differing bits ${differing}` : `, bound ${bound}`}`;
}

function tell({ module, case: kase }) {
  const word = { ok: 'ok     ', failed: 'FAILED ', 'left out': 'left out' };
  if (module) console.log(`${word[module.status]} module ${plain(module.name)}${module.message ? `: ${indented(module.message)}` : ''}`);
  if (!kase) return;
  if (kase.message) console.log(`${word[kase.status]} ${plain(kase.case)}: ${indented(kase.message)}`);
  for (const check of kase.checks) console.log(plain(checkLine(kase.case, check)));
}

function parse(args) {
  const options = { cases: [] };
  for (let i = 0; i < args.length; i++) {
    if (args[i] === '--case' && i + 1 < args.length) options.cases.push(args[++i]);
    else if (args[i] === '--unzeroed') options.unzeroed = true;
    else if (args[i] === '--json' && i + 1 < args.length) options.json = args[++i];
    else if (!args[i].startsWith('-') && options.folder === undefined) options.folder = args[i];
    else return undefined;
  }
  return options.folder === undefined ? undefined : options;
}

async function main(args) {
  const options = parse(args);
  if (!options) {
    console.error('usage: node run.mjs DIR [--case NAME]... [--unzeroed] [--json FILE]');
    return 2;
  }
  const reader = folderReader(options.folder);
  let manifest;
  try {
    manifest = await kvpack.readManifest(reader);
    const known = manifest.vectors.map((entry) => entry.case);
    const unknown = options.cases.find((name) => !known.includes(name));
    if (unknown !== undefined) throw new FolderError(`manifest.json has no case ${unknown}; it has ${known.join(', ') || 'none'}`);
  } catch (error) {
    if (!(error instanceof FolderError)) throw error;
    console.error(`run.mjs: ${plain(options.folder)}: ${plain(error.message)}`);
    return 2;
  }
  const against = options.json === undefined ? undefined : unwritable(options.json);
  if (against !== undefined) {
    console.error(`run.mjs: --json ${plain(options.json)}: ${plain(against)}`);
    return 2;
  }

  const webgpu = await need('webgpu');
  Object.assign(globalThis, webgpu.globals);
  const gpu = webgpu.create(options.unzeroed ? ['enable-dawn-features=disable_workgroup_init'] : []);
  let devices;
  try {
    devices = new kvpack.Devices(gpu, await kvpack.openAdapter(gpu));
  } catch (error) {
    if (!(error instanceof NoGpu)) throw error;
    throw new Missing(`Dawn finds no adapter that it accepts.\nRun:  eval "$(tools/setup.sh)"   which names a driver that it does`, 4);
  }
  console.log(`adapter: ${plain(kvpack.title(devices.info))}`);
  try {
    const only = (name) => options.cases.length === 0 || options.cases.includes(name);
    const report = await kvpack.runExport({ devices, reader, manifest, tell, only });
    const checks = report.cases.flatMap((kase) => kase.checks);
    const all = [...report.modules, ...report.cases.filter((kase) => kase.message), ...checks];
    const failed = all.filter((r) => r.status === 'failed' || r.ok === false).length;
    const leftOut = all.filter((r) => r.status === 'left out').length;
    console.log(`${report.modules.length} modules, ${checks.length} checks, ${failed} failed, ${leftOut} left out`);
    if (options.json) {
      const { generator, target, shape, pairs } = manifest;
      const about = { schema: 'kvpack.results', version: 1, export: { folder: reader.name, generator, target, shape, pairs } };
      try {
        writeWhole(options.json, `${JSON.stringify({ ...about, adapter: devices.info, ...report }, null, 1)}\n`);
      } catch (error) {
        console.error(`run.mjs: --json ${plain(options.json)}: ${plain(error.message)}`);
        return 1;
      }
    }
    const nothing = kvpack.nothingCompared(report);
    if (nothing) console.error(`run.mjs: nothing was compared, which is no pass: ${nothing}`);
    return kvpack.allPassed(report) ? 0 : 1;
  } finally {
    devices.destroy();
  }
}

await runScript('run.mjs', main);
