// Tests tools/web in headless Chromium with an export folder: what passes, what must fail, and how the page looks.
//
//   node tools/browser/page_test.mjs DIR [--only WORD] [--shots FOLDER]
//
// DIR is what `kvpack shaders export --to wgsl-browser --vectors --out DIR` wrote. --only runs the tests whose name has
// WORD; --shots writes pictures of the page. Output: a line for each test, then `N tests, N failed`.
// Exit: 0 all passed, 1 a test failed, 2 usage, 3 an npm package is missing, 4 Chromium is.

import assert from 'node:assert/strict';
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { axeFaults, HERE, Missing, openBrowser, runScript, withPage } from './chromium.mjs';

const WEB = join(HERE, '..', 'web');
const TIMEOUT = { timeout: 600_000 };

let folder; // the export
let manifest;
let browser;
let shots;

const read = (path) => readFileSync(join(folder, path));
const json = (path) => JSON.parse(read(path));

// ---- smaller exports ---------------------------------------------------------------------------------------------

/** The manifest with some cases and the modules that they take. */
function part(cases, alsoModule = () => false) {
  const vectors = manifest.vectors.filter((entry) => cases.includes(entry.case));
  assert.equal(vectors.length, cases.length, `the export lacks one of ${cases}`);
  const used = new Set(vectors.flatMap((entry) => entry.modules));
  return { ...manifest, vectors, modules: manifest.modules.filter((module) => used.has(module.name) || alsoModule(module)) };
}

/** The case of a pair and a phase. */
function caseOf(pair, phase = 'decode') {
  const entry = manifest.vectors.find((e) => e.pair === pair && e.phase === phase);
  assert.ok(entry, `the export has no ${phase} case of ${pair}`);
  return entry;
}

const SMALL = () => [caseOf('int4').case];

/** Serves the export with other bytes for some of its files. `files` maps a path in the folder to a buffer or an object. */
function served(files = {}) {
  return {
    folders: { '/': WEB, '/export/': folder },
    replace(path, body) {
      const other = files[path.replace('/export/', '')];
      if (other === undefined || !path.startsWith('/export/')) return body;
      return Buffer.isBuffer(other) || typeof other === 'string' ? other : JSON.stringify(other);
    },
  };
}

// ---- the page ----------------------------------------------------------------------------------------------------

const finished = (page) => page.waitForFunction(() => ['passed', 'failed', 'error'].includes(document.documentElement.dataset.state), null, TIMEOUT);
const state = (page) => page.evaluate(() => document.documentElement.dataset.state);
const text = (page, selector) => page.locator(selector).innerText();
const report = (page) => page.evaluate(() => globalThis.kvpack.report);

/** The page with the served export, run to its end. */
async function opened(options, use) {
  return withPage({ browser, ...options }, async (given) => {
    await given.page.goto(`${given.address}?export=export/`);
    await finished(given.page);
    return use(given);
  });
}

async function passes(page, cases) {
  const words = `${await text(page, '#verdict')} ${await page.locator('#problem').textContent()}`;
  assert.equal(await state(page), 'passed', words);
  const { modules, cases: done, kernels } = await report(page);
  assert.equal(done.length, cases);
  assert.ok(done.every((kase) => kase.status !== 'ok' || kase.checks.length > 0));
  assert.ok(kernels.every((row) => row.status !== 'failed'));
  return { modules, cases: done, kernels };
}

async function looksRight(page, name) {
  assert.deepEqual(await axeFaults(page), []);
  for (const width of [360, 1600]) {
    await page.setViewportSize({ width, height: 900 });
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `at ${width} px the page is wider than the window`);
    if (shots) await page.screenshot({ path: join(shots, `${name}-${width}.png`), fullPage: true });
  }
}

// ---- spoiling ----------------------------------------------------------------------------------------------------

/** A .npy file's bytes with a change of its data by `change(view)`. */
function spoilt(path, change) {
  const bytes = Buffer.from(read(path));
  change(new DataView(bytes.buffer, bytes.byteOffset + 128, bytes.length - 128));
  return bytes;
}

const TESTS = {
  async 'every module and case passes'() {
    await opened({ ...served(), colorScheme: 'light' }, async ({ page }) => {
      const { modules, cases } = await passes(page, manifest.vectors.length);
      assert.equal(modules.length, manifest.modules.length);
      assert.ok(modules.filter((module) => module.portable).every((module) => module.status === 'ok'));
      const portable = new Set(manifest.modules.filter((module) => module.portable).map((module) => module.name));
      for (const kase of cases) {
        const runs = manifest.vectors.find((entry) => entry.case === kase.case).modules.every((name) => portable.has(name));
        assert.ok(kase.status === 'ok' || !runs, kase.case);
      }
      const checks = cases.reduce((n, kase) => n + kase.checks.length, 0);
      assert.match(await text(page, '#verdict'), new RegExp(`Everything passed.*\\b${checks.toLocaleString('en')} checks`));
      assert.match(await text(page, '#adapter'), /software: shaders run on the CPU/);
      const [download] = await Promise.all([page.waitForEvent('download'), page.click('#download')]);
      const saved = JSON.parse(readFileSync(await download.path(), 'utf8'));
      assert.equal(saved.schema, 'kvpack.results');
      assert.equal(saved.cases.length, manifest.vectors.length);
      assert.equal(saved.adapter.software, true);
      await looksRight(page, 'passed-light');
    });
  },

  async 'a folder is chosen or dropped on a page that is a file'() {
    const copy = mkdtempSync(join(tmpdir(), 'kvpack-export-'));
    const small = part(SMALL());
    writeFileSync(join(copy, 'manifest.json'), JSON.stringify(small));
    for (const module of small.modules) cpSync(join(folder, module.file), join(copy, module.file));
    for (const entry of small.vectors) {
      mkdirSync(dirname(join(copy, entry.folder)), { recursive: true });
      cpSync(join(folder, entry.folder), join(copy, entry.folder), { recursive: true });
    }
    try {
      await withPage({ browser }, async ({ page, faults }) => {
        await page.goto(pathToFileURL(join(WEB, 'index.html')).href);
        assert.equal(await state(page), 'empty');
        // The keyboard gets to the choice first.
        await page.keyboard.press('Tab');
        assert.equal(await page.evaluate(() => document.activeElement.id), 'folder');
        await page.setInputFiles('#folder', copy);
        await finished(page);
        await passes(page, 1);

        assert.deepEqual(faults, []);

        await page.reload();
        const drag = await page.context().newCDPSession(page);
        const data = { items: [], files: [copy], dragOperationsMask: 1 };
        for (const type of ['dragEnter', 'dragOver', 'drop']) await drag.send('Input.dispatchDragEvent', { type, x: 200, y: 200, data });
        await finished(page);
        await passes(page, 1);
        assert.deepEqual(faults, []);

        await page.goto(`${pathToFileURL(join(WEB, 'index.html')).href}?export=export/`);
        await finished(page);
        assert.match(await text(page, '#problem'), /choose or drop the folder/);
        faults.length = 0; // Chromium says in its console why
      });
    } finally {
      rmSync(copy, { recursive: true });
    }
  },

  async 'a flipped bit of a packed page is found where it is'() {
    const entry = caseOf('int4');
    const kase = json(`${entry.folder}/case.json`);
    const pages = kase.buffers.find((buffer) => buffer.name === 'k_pages');
    const { geometry: g } = pages;
    const [page, slot, head, channel] = [kase.sequences[0].k_pages[0], 3, g.heads - 1, 5];
    const word = (head * g.head_words + Math.floor(channel * g.bits / 32)) * g.page_tokens + slot;
    const file = `${entry.folder}/k_pages.expected.npy`;
    const files = { 'manifest.json': part([entry.case]), [file]: spoilt(file, (view) => {
      const at = (page * g.page_words + word) * 4;
      view.setUint32(at, view.getUint32(at, true) ^ 1 << channel * g.bits % 32, true);
    }) };
    await opened({ ...served(files), colorScheme: 'dark' }, async ({ page: shown }) => {
      assert.equal(await state(shown), 'failed');
      const check = (await report(shown)).cases[0].checks.find((c) => !c.ok);
      assert.equal(check.name, 'k_pages');
      assert.equal(check.failures, 1);
      const place = `page ${page}, word ${word}, slot ${slot}, head ${head}, channel ${channel}, code`;
      assert.ok((await text(shown, '#cases')).includes(place), `${await text(shown, '#cases')}\nlacks ${place}`);
      assert.match(await text(shown, '#cases'), /Expected\s+0x[0-9a-f]{8}\s+Found\s+0x[0-9a-f]{8}\s+Differing bits\s+0x/);
      assert.match(await text(shown, '#verdict'), /1 module or case of \d+ failed/);
      const row = await text(shown, '#kernels tr:has-text("quantize") >> nth=0');
      assert.match(row, /fail$/);
      await looksRight(shown, 'failed-dark');
    });
  },

  async 'an output outside its bound is found where it is'() {
    const entry = caseOf('int4');
    const output = json(`${entry.folder}/case.json`).buffers.find((buffer) => buffer.name === 'output');
    const [, heads, dim] = output.shape;
    const file = `${entry.folder}/output.expected.npy`;
    const spoil = (change) => ({ 'manifest.json': part([entry.case]), [file]: spoilt(file, (view) => {
      const at = ((1 * heads + 2) * dim + 7) * 8;
      view.setFloat64(at, change(view.getFloat64(at, true)), true);
    }) });
    for (const change of [(x) => x + 0.01, () => NaN, () => Infinity]) {
      await opened(served(spoil(change)), async ({ page }) => {
        const check = (await report(page)).cases[0].checks.find((c) => !c.ok);
        assert.equal(check?.name, 'output');
        assert.equal(check.failures, 1);
        assert.deepEqual(check.first.place.map(([, at]) => at), [1, 2, 7]);
      });
    }
  },

  async 'a broken shader shows the words of the compiler'() {
    const small = part(SMALL());
    const { file, entry_point: entry, kernel } = small.modules.find((module) => module.kernel === 'attention_merge');
    const source = read(file).toString();
    const broken = source.replace(/(@compute[^{]*\{)/, '$1\n    let broken = nonsense;');
    const line = broken.slice(0, broken.indexOf('nonsense')).split('\n').length;
    await opened({ ...served({ 'manifest.json': small, [file]: broken }), colorScheme: 'light' }, async ({ page, faults }) => {
      assert.equal(await state(page), 'failed');
      const words = await text(page, '#complaints');
      assert.ok(words.includes(`${file}:${line}:`) && words.includes('nonsense'), words);
      assert.match(await text(page, '#cases'), /did not compile/);
      // What other modules compute does not suffer.
      const { kernels } = await report(page);
      assert.deepEqual(kernels.filter((row) => row.status === 'failed').map((row) => row.kernel), [kernel]);
      faults.length = 0; // Chromium says it in its console too
      await looksRight(page, 'broken-light');
    });
    const other = { ...small, modules: small.modules.map((m) => (m.file === file ? { ...m, entry_point: `${entry}_2` } : m)) };
    await opened(served({ 'manifest.json': other }), async ({ page, faults }) => {
      const words = await text(page, '#complaints');
      assert.ok(words.includes(file) && words.includes(`${entry}_2`), words);
      faults.length = 0;
    });
  },

  async 'folders that are none are refused'() {
    const small = part(SMALL());
    const [entry] = small.vectors;
    const kase = json(`${entry.folder}/case.json`);
    const module = small.modules[0];
    const cut = read(`${entry.folder}/k.npy`).subarray(0, 1000);
    const other = (fields) => ({ 'manifest.json': { ...small, modules: [{ ...module, ...fields }] } });
    const refused = [
      ['no export', { 'manifest.json': '{"name": "something"}' }, /no file of kvpack.*schema is not given/],
      ['no JSON', { 'manifest.json': '{"schema": ' }, /manifest\.json: no JSON/],
      ['another version', { 'manifest.json': { ...small, version: 2 } }, /version 2 .*reads version 1/],
      ['another target', { 'manifest.json': { ...small, target: 'spirv' } }, /exported for spirv.*wgsl-browser/],
      ['a field that is missing', other({ bindings: undefined }), /modules\[0\]\.bindings: a list is needed/],
      ...['../x.wgsl', '%2e%2e/x.wgsl', '..%2fx.wgsl', '/x.wgsl', './x.wgsl', 'a//x.wgsl', '..\\x.wgsl', 'http://x/x.wgsl', 'x.wgsl?a', '']
        .map((file) => [`the path ${file}`, other({ file }), /modules\[0\]\.file: a path within the folder/]),
    ];
    for (const [name, files, words] of refused) {
      await opened(served(files), async ({ page }) => {
        assert.equal(await state(page), 'error', name);
        assert.match(await text(page, '#problem'), words, name);
      });
    }
    // What is wrong with a case fails that case.
    const wrong = [
      ['a step without a module', { ...kase, steps: [{ ...kase.steps[0], module: 'none' }] }, /no module none/],
      ['a missing param', { ...kase, steps: [{ ...kase.steps[0], params: {} }] }, /params\.\w+ of .* is not given/],
      ['other workgroups', { ...kase, steps: [{ ...kase.steps[0], workgroups: [7, 1, 1] }] }, /by the manifest's rule/],
    ];
    for (const [name, spoiltCase, words] of wrong) {
      await opened(served({ 'manifest.json': small, [`${entry.folder}/case.json`]: spoiltCase }), async ({ page }) => {
        assert.equal(await state(page), 'failed', name);
        assert.match(await text(page, '#cases'), words, name);
      });
    }
    await opened(served({ 'manifest.json': small, [`${entry.folder}/k.npy`]: cut }), async ({ page }) => {
      assert.match(await text(page, '#cases'), /k\.npy: shape .* takes \d+ bytes, there are/);
    });
    await withPage({ browser, folders: { '/': WEB } }, async ({ page, address, faults }) => {
      await page.goto(`${address}?export=nowhere/`);
      await finished(page);
      assert.match(await text(page, '#problem'), /no manifest\.json here: take a folder that/);
      faults.length = 0; // Chromium logs the 404
    });
  },

  async 'addresses that are no folder are refused in one sentence'() {
    const wrong = [['javascript:alert(1)', /by http or https, not by javascript:/], ['data:text/plain,x', /not by data:/],
      ['file:///tmp', /not by file:/], ['http://[', /"http:\/\/\[" is none/]];
    for (const [given, words] of wrong) {
      await withPage({ browser, folders: { '/': WEB } }, async ({ page, address }) => {
        await page.goto(`${address}?export=${encodeURIComponent(given)}`);
        await finished(page);
        const told = await text(page, '#problem');
        assert.match(told, words);
        assert.ok(!/\n|TypeError/.test(told), told);
      });
    }
  },

  async 'a run that compares nothing does not pass, and says why'() {
    const small = part(SMALL());
    const lacking = small.modules.map((module) => ({ ...module, portable: false, features: ['nope'] }));
    for (const [fields, words] of [
      [{ vectors: [] }, /Nothing was compared: the export has no cases/],
      [{ vectors: [], modules: [] }, /Nothing was compared: the export has no modules/],
      [{ modules: lacking }, /Nothing was compared: every case needs what this adapter lacks/],
    ]) {
      await opened(served({ 'manifest.json': { ...small, ...fields } }), async ({ page }) => {
        assert.equal(await state(page), 'failed');
        assert.match(await text(page, '#verdict'), words);
        await looksRight(page, 'nothing');
      });
    }
  },

  async 'without WebGPU, an adapter, or a secure context the page says so'() {
    const tell = async (options, words) => opened({ ...served({ 'manifest.json': part(SMALL()) }), ...options }, async ({ page }) => {
      assert.equal(await state(page), 'error');
      assert.match(await text(page, '#problem'), words);
    });
    await tell({ origin: 'http://kvpack.test' }, /no secure context/);
    const hidden = (script) => ({ init: script });
    await tell(hidden(() => { Object.defineProperty(Navigator.prototype, 'gpu', { get: () => undefined }); }), /has no WebGPU/);
    await tell(hidden(() => { globalThis.GPU.prototype.requestAdapter = async () => null; }), /no adapter/);
  },

  async 'a lost device is told'() {
    const own = await openBrowser();
    try {
      await withPage({ browser: own, ...served() }, async ({ page, address, faults }) => {
        await page.goto(`${address}?export=export/`);
        await page.waitForFunction(() => document.querySelector('#progress').value > 0, null, TIMEOUT);
        await (await own.newBrowserCDPSession()).send('Browser.crashGpuProcess');
        await finished(page);
        assert.match(await text(page, '#problem'), /device was lost during the compilation of \S+\.wgsl/);
        assert.equal(await state(page), 'error');
        faults.length = 0;
      });
    } finally {
      await own.close();
    }
  },

  async 'decode bandwidth is measured beside the read roof'() {
    const pairs = ['f16', 'int4'];
    const small = part(pairs.map((pair) => caseOf(pair).case), (module) => module.kernel.startsWith('read_'));
    await opened({ ...served({ 'manifest.json': small }), colorScheme: 'light' }, async ({ page }) => {
      await passes(page, pairs.length);
      for (const [id, value] of Object.entries({ context: 2048, sequences: 2, cache: 1, seconds: 0.1 })) await page.fill(`#${id}`, String(value));
      await page.click('#measure');
      await page.waitForFunction(() => /^(Done|The measurement)/.test(document.querySelector('#bench-status').textContent), null, TIMEOUT);
      const { bench } = await report(page);
      assert.ok(bench, await page.locator('#problem').textContent());
      assert.equal(bench.roof.length, small.modules.filter((module) => module.kernel.startsWith('read_')).length);
      assert.deepEqual(bench.rows.map((row) => [row.pair, row.message]), pairs.map((pair) => [pair, undefined]));
      for (const row of [...bench.roof, ...bench.rows]) {
        assert.ok(row.samples.length >= 5 && row.gbPerS > 0 && row.warmUp > 0, JSON.stringify(row));
        assert.ok(['timestamps', 'wall clock'].includes(row.clock));
      }
      // Codes and scales of both sides by hand: f16 has 2 bytes a number, int4 half a byte and a f16 scale a token and head.
      const { kv_heads: heads, k_head_dim: k, v_head_dim: v } = manifest.shape;
      assert.deepEqual(bench.rows.map((row) => row.bytesPerToken), [2 * heads * (k + v), heads * (k + v) / 2 + 4 * heads]);
      for (const row of bench.rows) assert.equal(row.bytes, row.bytesPerToken * row.context * row.sequences);
      assert.ok(bench.rows.every((row) => row.resident));
      assert.match(await text(page, '#bench-notes'), /software driver.*nothing about a GPU[^]*less than 4 times the assumed cache of 1 MiB/);
      await looksRight(page, 'bench-light');
      // Timestamps that stand still, go back, or last longer than the time around them are not believed.
      const clocks = await page.evaluate(() => [[1n, 10_000_001n], [5n, 5n], [9n, 5n], [0n, 10_000_000n], [1n, 20_000_001n], undefined]
        .map((ticks) => { const { clock, seconds: [s] } = globalThis.kvpack.settle([{ wall: 0.0101, ticks }]); return `${clock} ${s}`; }));
      assert.deepEqual(clocks, ['timestamps 0.01', ...Array(5).fill('wall clock 0.0101')]);
    });
  },
};

async function main(args) {
  const options = {};
  for (let i = 0; i < args.length; i++) {
    if (['--only', '--shots'].includes(args[i]) && i + 1 < args.length) options[args[i]] = args[++i];
    else if (!args[i].startsWith('-') && folder === undefined) folder = resolve(args[i]);
    else folder = options.wrong = null;
  }
  if (!folder || options.wrong === null) {
    console.error('usage: node page_test.mjs DIR [--only WORD] [--shots FOLDER]');
    return 2;
  }
  shots = options['--shots'];
  if (shots) mkdirSync(shots, { recursive: true });
  manifest = json('manifest.json');
  browser = await openBrowser();
  let failed = 0;
  const chosen = Object.entries(TESTS).filter(([name]) => name.includes(options['--only'] ?? ''));
  for (const [name, test] of chosen) {
    const started = Date.now();
    try {
      await test();
      console.log(`ok      ${name} (${((Date.now() - started) / 1000).toFixed(1)} s)`);
    } catch (error) {
      if (error instanceof Missing) throw error;
      failed++;
      console.log(`FAILED  ${name}: ${error.stack ?? error}`);
    }
  }
  await browser.close();
  console.log(`${chosen.length} tests, ${failed} failed`);
  return failed > 0 || chosen.length === 0 ? 1 : 0;
}

await runScript('page_test.mjs', main);
