// Runs an export folder: compiles every module, runs every case, judges what came out. The page and Node share it.
'use strict';
globalThis.kvpack ??= {};

(() => {
  const { FolderError, NoGpu, USAGE, readCase, readNpy, packParams, needs, scoped, compile, makeBuffer, prepare, readBack, judge } = kvpack;

  /** The case's buffers on the device by name, each with its `count` of words. */
  async function upload(device, reader, folder, kase) {
    const buffers = new Map();
    for (const { name, type, shape, file, fill } of kase.buffers) {
      const count = Math.ceil(shape.reduce((a, b) => a * b, 1) * (type === 'f16' ? 2 : 4) / 4);
      const words = new Uint32Array(count).fill(Number(fill ?? 0));
      if (file !== undefined) {
        const array = await readNpy(reader, `${folder}/${file}`);
        const needed = { u32: '<u4', f32: '<f4', f16: '<f2' }[type];
        if (array.type !== needed || array.shape.join() !== shape.join()) {
          throw new FolderError(`${folder}/${file}: ${array.type} (${array.shape.join(', ')}), the case says ${type} (${shape.join(', ')})`);
        }
        new Uint8Array(words.buffer).set(new Uint8Array(array.values.buffer));
      }
      const buffer = makeBuffer(device, name, count * 4, USAGE.STORAGE | USAGE.COPY_SRC | USAGE.COPY_DST);
      device.queue.writeBuffer(buffer, 0, words);
      buffers.set(name, { buffer, count });
    }
    return buffers;
  }

  /** Runs the steps of a case; its buffers, as the last step left them. The caller destroys them. */
  async function runSteps(device, reader, folder, kase, pipelines) {
    const buffers = await scoped(device, () => upload(device, reader, folder, kase));
    for (const [i, step] of kase.steps.entries()) {
      const pipeline = pipelines.get(step.module);
      try {
        await scoped(device, () => {
          const dispatch = prepare(device, pipeline, packParams(pipeline.module, step.params),
            (name) => buffers.get(step.bindings[name]).buffer, step.workgroups);
          const encoder = device.createCommandEncoder();
          const pass = encoder.beginComputePass();
          dispatch.record(pass);
          pass.end();
          device.queue.submit([encoder.finish()]);
          dispatch.destroy();
        });
      } catch (error) {
        throw new FolderError(`steps[${i}], ${step.module}: ${error.message}`);
      }
    }
    return buffers;
  }

  const destroyAll = (buffers) => { for (const { buffer } of buffers.values()) buffer.destroy(); };

  /** Compiles all modules on devices that have what each needs. Returns the names of those that compiled, and one result each. */
  async function compileAll(devices, manifest, pipelines, tell) {
    const compiled = new Set();
    const results = [];
    for (const module of manifest.modules) {
      const result = { name: module.name, kernel: module.kernel, portable: module.portable, status: 'ok' };
      const missing = devices.missing(needs([module]));
      if (missing) {
        Object.assign(result, { status: module.portable ? 'failed' : 'left out', message: `this adapter lacks ${missing}` });
      } else {
        try {
          await pipelines(await devices.get(needs([module])), module);
          compiled.add(module.name);
        } catch (error) {
          await devices.check(`the compilation of ${module.file}`);
          Object.assign(result, { status: 'failed', message: error.message });
        }
      }
      results.push(result);
      tell({ module: result, done: results.length, of: manifest.modules.length });
    }
    return { compiled, results };
  }

  /** Runs one case of the manifest on a device with what its modules need, and judges it. */
  async function runCase(devices, reader, manifest, entry, compiled, pipelines) {
    const result = { case: entry.case, pair: entry.pair ?? '', phase: entry.phase ?? '', status: 'ok', checks: [] };
    const started = performance.now();
    try {
      const kase = await readCase(reader, manifest, entry);
      Object.assign(result, { case: kase.case, pair: kase.pair ?? result.pair, phase: kase.phase ?? result.phase, what: kase.what ?? '' });
      const modules = new Map(manifest.modules.map((module) => [module.name, module]));
      const used = [...new Set(kase.steps.map((step) => step.module))].map((name) => modules.get(name));
      result.modules = used.map((module) => module.name);
      const missing = devices.missing(needs(used));
      if (missing) {
        const portable = used.every((module) => module.portable);
        return Object.assign(result, { status: portable ? 'failed' : 'left out', message: `this adapter lacks ${missing}` });
      }
      const broken = used.map((module) => module.name).filter((name) => !compiled.has(name));
      if (broken.length > 0) {
        result.modules = broken; // the others are not to blame
        throw new FolderError(`not run: ${broken.join(', ')} did not compile`);
      }
      const device = await devices.get(needs(used));
      const ready = new Map();
      for (const module of used) ready.set(module.name, await pipelines(device, module));
      const buffers = await runSteps(device, reader, entry.folder, kase, ready);
      try {
        for (const expect of kase.expect) {
          const { buffer, count } = buffers.get(expect.buffer);
          const words = new Uint32Array(await readBack(device, buffer, count * 4));
          result.checks.push(await judge(reader, entry.folder, kase, expect, words));
        }
      } finally {
        destroyAll(buffers);
      }
      if (kase.expect.length === 0) throw new FolderError(`${entry.folder}/case.json: nothing is expected`);
      if (result.checks.some((check) => !check.ok)) result.status = 'failed';
    } catch (error) {
      if (error instanceof NoGpu) throw error;
      await devices.check(`case ${entry.case}`);
      Object.assign(result, { status: 'failed', message: error.message });
    }
    result.seconds = (performance.now() - started) / 1000;
    return result;
  }

  /** Pipelines that are kept, by device and module. */
  function pipelineStore(reader) {
    const kept = new Map();
    return async (device, module) => {
      if (!kept.has(device)) kept.set(device, new Map());
      const some = kept.get(device);
      if (!some.has(module.name)) some.set(module.name, await compile(device, reader, module));
      return some.get(module.name);
    };
  }

  /**
   * Compiles every module and runs every case of an export folder.
   * `tell` is called with { module } or { case } results as they come, each with { done, of }.
   */
  async function runExport({ devices, reader, manifest, tell = () => {}, only = () => true }) {
    const pipelines = pipelineStore(reader);
    const { compiled, results } = await compileAll(devices, manifest, pipelines, tell);
    const cases = [];
    const entries = manifest.vectors.filter((entry) => only(entry.case));
    for (const entry of entries) {
      cases.push(await runCase(devices, reader, manifest, entry, compiled, pipelines));
      tell({ case: cases.at(-1), done: cases.length, of: entries.length });
    }
    return { modules: results, cases, kernels: byKernel(results, cases) };
  }

  /** One line for each kernel: modules that compiled, checks that passed, and whether any ran. */
  function byKernel(modules, cases) {
    const kernels = new Map();
    const of = (name) => {
      if (!kernels.has(name)) kernels.set(name, { kernel: name, modules: 0, compiled: 0, leftOut: 0, checks: 0, passed: 0 });
      return kernels.get(name);
    };
    const kernelOf = new Map(modules.map((module) => [module.name, module.kernel]));
    for (const module of modules) {
      const row = of(module.kernel);
      row.modules++;
      if (module.status === 'ok') row.compiled++;
      if (module.status === 'left out') row.leftOut++;
    }
    for (const kase of cases) {
      for (const check of kase.checks) {
        for (const name of check.kernels) {
          const row = of(name);
          row.checks++;
          if (check.ok) row.passed++;
        }
      }
      // A case that failed before its checks counts against all kernels that it blames.
      if (kase.status === 'failed' && kase.message) {
        for (const name of new Set((kase.modules ?? []).map((module) => kernelOf.get(module)))) of(name).checks++;
      }
    }
    for (const row of kernels.values()) {
      if (row.compiled + row.leftOut < row.modules || row.passed < row.checks) row.status = 'failed';
      else if (row.checks > 0) row.status = 'ok';
      else row.status = row.compiled > 0 ? 'compiled' : 'left out';
    }
    return [...kernels.values()];
  }

  /** Why a run compared nothing, though nothing failed; undefined where something was compared, or failed. */
  function nothingCompared({ modules, cases }) {
    if ([...modules, ...cases].some((r) => r.status === 'failed') || cases.some((kase) => kase.checks.length > 0)) return undefined;
    if (modules.length === 0) return 'the export has no modules';
    if (cases.length === 0) return 'the export has no cases (--vectors writes them)';
    return 'every case needs what this adapter lacks';
  }

  /** Whether nothing failed, and something was compared. */
  const allPassed = (report) => [...report.modules, ...report.cases].every((r) => r.status !== 'failed') && nothingCompared(report) === undefined;

  Object.assign(kvpack, { runExport, runSteps, pipelineStore, destroyAll, nothingCompared, allPassed });
})();
