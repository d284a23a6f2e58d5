// The page: takes a folder, shows what the runner and the measurement say, and gives the results as JSON.
'use strict';

(() => {
  const { FolderError, NoGpu, placeText } = kvpack;
  const at = (id) => document.getElementById(id);

  /** An element with attributes and children; texts become text nodes. */
  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  const terms = (pairs) => pairs.flatMap(([term, words]) => [element('dt', {}, term), element('dd', {}, words)]);
  const some = (count, one, many = `${one}s`) => `${count.toLocaleString('en')} ${count === 1 ? one : many}`;

  /** What is to be downloaded, and what the browser test reads. */
  kvpack.report = null;
  /** empty, running, passed, failed, error: also an attribute of the page. */
  const state = (name) => { document.documentElement.dataset.state = name; };

  let loaded; // { devices, reader, manifest }
  let busy = false;

  // ---- words ------------------------------------------------------------------------------------------------------

  function problem(error) {
    const known = error instanceof FolderError || error instanceof NoGpu;
    at('problem').textContent = known ? error.message : `${error.message ?? error}\n${error.stack ?? ''}`;
    at('problem').hidden = false;
    state('error');
  }

  function showFolder({ name }, manifest) {
    const { shape, modules, vectors } = manifest;
    const facts = [['Folder', name], ['Written by', manifest.generator]];
    if (shape.q_heads) {
      const dims = shape.k_head_dim === shape.v_head_dim ? shape.k_head_dim : `${shape.k_head_dim} and ${shape.v_head_dim}`;
      const heads = `${some(shape.q_heads, 'query head')}, ${some(shape.kv_heads, 'KV head')} of ${dims} channels`;
      facts.push(['Shape', `${heads}, pages of ${shape.page_tokens} tokens`]);
    }
    facts.push(['Pairs', manifest.pairs.join(', ') || 'none'], ['Inside', `${some(modules.length, 'module')}, ${some(vectors.length, 'case')}`]);
    at('about').replaceChildren(...terms(facts));
    at('about').hidden = false;
  }

  function showAdapter(info) {
    const hidden = 'not told';
    const has = (feature) => (info.features.includes(feature) ? 'yes' : 'no');
    const [least, most] = [info.subgroupMinSize, info.subgroupMaxSize];
    const subgroups = !least || !info.features.includes('subgroups') ? '' : least === most ? `, of ${least}` : `, of ${least} to ${most}`;
    at('adapter').replaceChildren(...terms([
      ['Kind', info.software ? 'software: shaders run on the CPU' : 'a GPU, as far as the browser tells'],
      ['Vendor', info.vendor || hidden], ['Architecture', info.architecture || hidden],
      ['Device', info.device || hidden], ['Description', info.description || hidden],
      ['f16 arithmetic', has('shader-f16')],
      ['Subgroups', `${has('subgroups')}${subgroups}`],
      ['Timestamps', has('timestamp-query')],
    ]));
    at('features').textContent = info.features.join(', ') || 'no features';
    at('limits').replaceChildren(...Object.entries(info.limits).sort(([a], [b]) => (a < b ? -1 : 1))
      .map(([name, value]) => element('div', {}, element('dt', {}, name), element('dd', {}, value.toLocaleString('en')))));
    at('machine').hidden = false;
  }

  const WORDS = { ok: ['pass', 'good'], failed: ['fail', 'bad'], 'left out': ['left out', 'quiet'], compiled: ['builds', 'quiet'] };
  const result = (name, status) => element(name, { class: WORDS[status][1] }, WORDS[status][0]);

  function showKernels(kernels) {
    at('kernels').replaceChildren(...kernels.map((row) => element('tr', {},
      element('th', { scope: 'row' }, row.kernel),
      element('td', { class: 'n' }, `${row.compiled} of ${row.modules}`),
      element('td', { class: 'n' }, row.checks === 0 ? 'no case' : `${row.passed} of ${row.checks}`),
      result('td', row.status))));
  }

  function complain(module) {
    at('complaints').append(element('div', { class: `complaint ${WORDS[module.status][1]}` },
      element('p', {}, element('strong', {}, module.name), module.status === 'failed' ? ' does not compile' : ' is left out'),
      element('pre', { tabindex: '0' }, module.message)));
  }

  function checkItem(check) {
    const byBits = check.rule === 'bits';
    const compared = some(check.compared, byBits ? 'word' : 'number');
    const good = byBits ? `${compared}, every bit` : `${compared}, at most ${(100 * check.worst).toFixed(1)} % of the bound`;
    const bad = check.message ?? `${check.failures.toLocaleString('en')} of ${compared} differ`;
    const item = element('li', {}, result('span', check.ok ? 'ok' : 'failed'), ` ${check.name}: ${check.ok ? good : bad}`);
    if (!check.first) return item;
    const { place, expected, found, bound, differing } = check.first;
    const numbers = [['Expected', expected], ['Found', found], byBits ? ['Differing bits', differing] : ['Bound', bound]];
    item.append(element('dl', { class: 'place' }, ...terms([
      ['First at', placeText(place)],
      ...numbers.map(([term, words]) => [term, element('span', { class: 'bits' }, words)]),
    ])));
    return item;
  }

  function showCase(kase) {
    const passed = kase.checks.filter((check) => check.ok).length;
    const inside = element('div', { class: 'inside' });
    if (kase.what) inside.append(element('p', {}, kase.what));
    if (kase.message) inside.append(element('pre', { tabindex: '0' }, kase.message));
    inside.append(element('ul', {}, ...kase.checks.map(checkItem)));
    const all = some(kase.checks.length, 'check');
    const details = element('details', {},
      element('summary', {},
        element('span', {}, kase.case),
        element('span', {}, passed === kase.checks.length ? all : `${passed} of ${all}`),
        result('span', kase.status)),
      inside);
    details.open = kase.status === 'failed';
    at('cases').append(details);
  }

  function showVerdict({ modules, cases, kernels }) {
    const checks = cases.flatMap((kase) => kase.checks);
    const failed = [...modules, ...cases].filter((r) => r.status === 'failed').length;
    const leftOut = [...modules, ...cases].filter((r) => r.status === 'left out').length;
    const ok = kvpack.allPassed({ modules, cases });
    const rest = leftOut > 0 ? ` ${some(leftOut, 'module or case', 'modules and cases')} need what this adapter lacks.` : '';
    at('verdict').className = `verdict ${ok ? 'good' : 'bad'}`;
    const compiled = some(modules.filter((m) => m.status === 'ok').length, 'module');
    const nothing = kvpack.nothingCompared({ modules, cases });
    let words = `${some(failed, 'module or case', 'modules and cases')} of ${modules.length + cases.length} failed.${rest}`;
    if (nothing) words = `Nothing was compared: ${nothing}.`;
    if (ok) {
      words = `Everything passed: ${compiled} of ${some(kernels.length, 'kernel')} compiled, `
        + `${some(checks.length, 'check')} in ${some(cases.length, 'case')}.${rest}`;
    }
    at('verdict').textContent = words;
    state(ok ? 'passed' : 'failed');
  }

  // ---- the run ----------------------------------------------------------------------------------------------------

  async function run(takeReader) {
    if (busy) return;
    busy = true;
    state('running');
    kvpack.report = null;
    for (const id of ['problem', 'about', 'results', 'bench', 'save', 'bench-table']) at(id).hidden = true;
    for (const id of ['kernels', 'complaints', 'cases', 'roof-rows', 'bench-rows', 'bench-notes', 'bench-status']) at(id).replaceChildren();
    try {
      loaded?.devices.destroy();
      loaded = undefined;
      const reader = await takeReader();
      const manifest = await kvpack.readManifest(reader);
      showFolder(reader, manifest);
      const devices = new kvpack.Devices(navigator.gpu, await kvpack.openAdapter(navigator.gpu, isSecureContext));
      loaded = { devices, reader, manifest };
      showAdapter(devices.info);
      at('cache').value = kvpack.assumedCache(devices.info) / 2 ** 20;
      at('results').hidden = false;
      at('progress').hidden = false;
      at('verdict').className = 'verdict quiet';
      const steps = manifest.modules.length + manifest.vectors.length;
      const tell = ({ module, case: kase, done, of }) => {
        at('progress').value = (module ? done : manifest.modules.length + done) / steps;
        at('verdict').textContent = module ? `Compiling: ${done} of ${some(of, 'module')}` : `Running: ${done} of ${some(of, 'case')}`;
        if (module && module.status !== 'ok') complain(module);
        if (kase) showCase(kase);
      };
      const results = await kvpack.runExport({ devices, reader, manifest, tell });
      const { generator, target, shape, pairs } = manifest;
      kvpack.report = {
        schema: 'kvpack.results', version: 1, date: new Date().toISOString(), agent: navigator.userAgent,
        export: { folder: reader.name, generator, target, shape, pairs }, adapter: devices.info, ...results, bench: null,
      };
      showKernels(results.kernels);
      at('progress').hidden = true;
      at('save').hidden = false;
      at('bench').hidden = !manifest.vectors.some((entry) => entry.phase === 'decode');
      showVerdict(results);
    } catch (error) {
      at('progress').hidden = true;
      problem(error);
    }
    busy = false;
  }

  // ---- bandwidth --------------------------------------------------------------------------------------------------

  const seconds = (s) => (s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(2)} ms` : `${(s * 1e6).toFixed(1)} µs`);
  const spread = (row) => `${seconds(row.seconds[1])} (${seconds(row.seconds[0])} to ${seconds(row.seconds[2])})`;

  function benchRow(row, roof, f16) {
    const name = element('th', { scope: 'row' }, row.pair ?? row.kernel);
    if (row.message) return element('tr', {}, name, element('td', { colspan: '7', class: 'quiet' }, `not measured: ${row.message}`));
    const number = (words) => element('td', { class: 'n' }, words);
    const bar = element('i', row.resident ? { class: 'resident' } : {});
    bar.style.width = `${Math.min(100, 100 * (row.gbPerS / roof))}%`;
    const marks = `${row.resident ? '*' : ''}${row.aboveRoof ? '†' : ''}`;
    const toF16 = f16 ? `${(f16.secondsPerSequence / row.secondsPerSequence).toFixed(2)}×` : '';
    const own = row.pair ? [toF16, row.bytesPerToken.toLocaleString('en'), row.sequences.toLocaleString('en')] : ['', '', ''];
    // A rate from a cache, or one that is not believed, is no share of the memory's.
    const share = marks ? '–' : `${(100 * row.gbPerS / roof).toFixed(0)} %`;
    const rate = number(`${row.gbPerS.toFixed(2)} ${marks}`.trim());
    return element('tr', {}, name, rate, element('td', { class: 'bar' }, bar), number(share), ...own.map(number), number(spread(row)));
  }

  function showBench(roofRows, rows, cacheBytes) {
    const { software } = loaded.devices.info;
    const all = [...roofRows, ...rows.filter((row) => !row.message)];
    const roof = Math.max(...roofRows.map((row) => row.gbPerS));
    const f16 = rows.find((row) => row.pair === 'f16' && !row.message);
    at('roof-rows').replaceChildren(...roofRows.map((row) => benchRow(row, roof)));
    at('bench-rows').replaceChildren(...rows.map((row) => benchRow(row, roof, f16)));
    at('bench-table').hidden = false;
    const notes = [];
    if (software) notes.push('These are times of a software driver on the CPU: they say nothing about a GPU.');
    const clocks = [...new Set(all.map((row) => (row.note ? `${row.clock} (${row.note})` : row.clock)))];
    notes.push(`Timed with ${clocks.join('; ')}${clocks.some((c) => c.startsWith('wall')) ? ', from the submission until the queue was done' : ''}. `
      + 'Median, lower and upper quartile; what comes before the first sample, with all compiling, is in none.');
    notes.push('To f16: how many times less time a sequence of the same context takes. '
      + 'Packed pages only: tokens that wait in f16 for their group are left out.');
    if (all.some((row) => row.resident)) {
      notes.push(`* a pass reads less than 4 times the assumed cache of ${cacheBytes / 2 ** 20} MiB: some of it may have come from there, `
        + 'so this is no figure of memory.');
    }
    if (all.some((row) => row.aboveRoof)) notes.push('† above the roof: not believed. The cache may be larger than assumed.');
    at('bench-notes').replaceChildren(...notes.map((words) => element('li', {}, words)));
  }

  async function measure() {
    if (busy || !loaded) return;
    busy = true;
    let stopped = false;
    at('measure').disabled = true;
    at('stop').hidden = false;
    at('stop').onclick = () => { stopped = true; };
    at('problem').hidden = true;
    const roof = [];
    const rows = [];
    const cacheBytes = Number(at('cache').value) * 2 ** 20;
    const tell = async ({ roof: read, row, pair }) => {
      if (read) roof.push(read);
      if (row) rows.push(row);
      if (pair) at('bench-status').textContent = `Measuring ${pair} …`;
      if (roof.length > 0) showBench(roof, rows, cacheBytes);
      // Lets the browser draw and take clicks.
      await new Promise((done) => { setTimeout(done); });
      if (stopped) throw new FolderError('stopped');
    };
    at('bench-status').textContent = 'Measuring the read roof …';
    try {
      const bench = await kvpack.runBench({
        ...loaded, tell, cacheBytes,
        context: Number(at('context').value), sequences: Number(at('sequences').value), seconds: Number(at('seconds').value),
      });
      kvpack.report.bench = bench;
      at('bench-status').textContent = `Done: the read roof of this run is ${bench.roofGbPerS.toFixed(2)} GB/s.`;
    } catch (error) {
      at('bench-status').textContent = stopped ? 'Stopped.' : 'The measurement failed.';
      if (!stopped) problem(error);
    }
    at('stop').hidden = true;
    at('measure').disabled = false;
    busy = false;
  }

  // ---- controls ---------------------------------------------------------------------------------------------------

  at('folder').addEventListener('change', ({ target }) => {
    const { files } = target;
    if (files.length > 0) run(() => kvpack.readerOfInput(files)).then(() => { target.value = ''; });
  });
  addEventListener('dragover', (event) => { event.preventDefault(); document.body.classList.add('dropping'); });
  addEventListener('dragleave', (event) => { if (!event.relatedTarget) document.body.classList.remove('dropping'); });
  addEventListener('drop', (event) => {
    event.preventDefault();
    document.body.classList.remove('dropping');
    const reading = kvpack.readerOfDrop(event.dataTransfer);
    run(() => reading);
  });
  at('bench-form').addEventListener('submit', (event) => { event.preventDefault(); measure(); });
  at('download').addEventListener('click', () => {
    const address = URL.createObjectURL(new Blob([`${JSON.stringify(kvpack.report, null, 1)}\n`], { type: 'application/json' }));
    element('a', { href: address, download: 'kvpack-results.json' }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  });

  state('empty');
  const address = new URLSearchParams(location.search).get('export');
  if (address) run(() => kvpack.readerOfAddress(address, location.href));
})();
