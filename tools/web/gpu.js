// The adapter, devices with what modules ask for, and compiled modules.
'use strict';
globalThis.kvpack ??= {};

(() => {
  const { FolderError, readText } = kvpack;

  /** WebGPU cannot be used here, and the message says why. */
  class NoGpu extends Error {}

  /** Names by which drivers that compute on the CPU are known. */
  const SOFTWARE = /swiftshader|llvmpipe|lavapipe|softpipe|microsoft basic render|\bwarp\b|software/i;

  /** What can be known about an adapter. Browsers hide most of it. */
  function describe(adapter) {
    const info = adapter.info ?? {};
    const { vendor = '', architecture = '', device = '', description = '' } = info;
    const limits = {};
    for (const name in adapter.limits) if (typeof adapter.limits[name] === 'number') limits[name] = adapter.limits[name];
    const fallback = info.isFallbackAdapter === true || adapter.isFallbackAdapter === true;
    const software = fallback || SOFTWARE.test(`${architecture} ${device} ${description}`);
    return {
      vendor, architecture, device, description, software,
      subgroupMinSize: info.subgroupMinSize ?? null, subgroupMaxSize: info.subgroupMaxSize ?? null,
      features: [...adapter.features].sort(), limits,
    };
  }

  /** An adapter's name in one line. A software driver is never called a GPU. */
  function title({ vendor, architecture, device, description, software }) {
    const name = description || [vendor, architecture, device].filter(Boolean).join(' ') || 'unnamed';
    return `${name} (${software ? 'software, runs on the CPU' : 'GPU, as far as the browser tells'})`;
  }

  /** Opens the adapter, or says why there is none. `gpu` is navigator.gpu, or Dawn's for Node. */
  async function openAdapter(gpu, secure = true) {
    if (!secure) {
      throw new NoGpu('This page is no secure context, and browsers give WebGPU to those only. '
        + 'Open it by https, by http://localhost, or as a file.');
    }
    if (!gpu) {
      throw new NoGpu('This browser has no WebGPU. Chrome and Edge from 113 on have it, Safari from 26 on, Firefox from 141 on '
        + '(not on every system). On Linux, Chrome may need chrome://flags/#enable-unsafe-webgpu.');
    }
    let adapter;
    try {
      adapter = await gpu.requestAdapter({ powerPreference: 'high-performance' });
    } catch (error) {
      throw new NoGpu(`WebGPU gave no adapter: ${error.message}`);
    }
    if (!adapter) {
      throw new NoGpu('WebGPU found no adapter: there is no driver that it accepts, or it is switched off. '
        + 'chrome://gpu and about:support tell more.');
    }
    return adapter;
  }

  /** What a module, or several, need beyond WebGPU's defaults, as { features, limits }; the defaults need not be asked for. */
  const DEFAULTS = {
    maxStorageBuffersPerShaderStage: 8, maxComputeWorkgroupStorageSize: 16384, maxComputeInvocationsPerWorkgroup: 256,
    maxComputeWorkgroupSizeX: 256, maxComputeWorkgroupSizeY: 256, maxComputeWorkgroupSizeZ: 64,
    maxStorageBufferBindingSize: 134217728, maxBufferSize: 268435456,
  };
  function needs(modules) {
    const features = [...new Set(modules.flatMap((module) => module.features))].sort();
    const limits = {};
    for (const module of modules) {
      for (const [name, value] of Object.entries(module.limits)) {
        if (value > (DEFAULTS[name] ?? 0)) limits[name] = Math.max(value, limits[name] ?? 0);
      }
    }
    return { features, limits };
  }

  /** Devices of one adapter: one for each set of needs, so that a portable module gets WebGPU's defaults and no feature. */
  class Devices {
    #gpu;
    #made = new Map();
    lost; // what the driver said when a device was lost

    constructor(gpu, adapter) {
      this.#gpu = gpu;
      this.info = describe(adapter);
    }

    /** Why the adapter cannot meet the needs; empty where it can. */
    missing({ features, limits }) {
      return [
        ...features.filter((name) => !this.info.features.includes(name)),
        ...Object.entries(limits).filter(([name, value]) => !(this.info.limits[name] >= value)).map(([name, value]) => `${name} ${value}`),
      ].join(', ');
    }

    async get({ features, limits }) {
      const key = JSON.stringify([features, limits]);
      if (!this.#made.has(key)) {
        // An adapter makes one device.
        const adapter = await openAdapter(this.#gpu);
        const device = await adapter.requestDevice({ requiredFeatures: features, requiredLimits: limits });
        device.lost.then(({ reason, message }) => {
          if (reason !== 'destroyed') this.lost = message || 'the driver gave no reason';
        });
        this.#made.set(key, device);
      }
      return this.#made.get(key);
    }

    /** Throws if a device was lost, with what was going on. */
    async check(during) {
      await Promise.resolve();
      if (this.lost !== undefined) throw new NoGpu(`The device was lost during ${during}. Reload to start again. The driver says: ${this.lost}`);
    }

    destroy() {
      for (const device of this.#made.values()) device.destroy();
      this.#made.clear();
      this.#gpu = undefined;
    }
  }

  /** The result of `work`, or throws what the device has against it. */
  async function scoped(device, work) {
    device.pushErrorScope('out-of-memory');
    device.pushErrorScope('validation');
    let result;
    let thrown;
    try {
      result = await work();
    } catch (error) {
      thrown = error;
    }
    const errors = [await device.popErrorScope(), await device.popErrorScope()];
    const error = thrown ?? errors.find(Boolean);
    if (error) throw error instanceof Error ? error : new Error(error.message);
    return result;
  }

  /** The compiler's messages as `file:line:column: words` and the line of the file. */
  function compilerWords(file, source, messages) {
    const lines = source.split('\n');
    return messages.filter((m) => m.type === 'error').map((m) => {
      const line = lines[m.lineNum - 1];
      const quoted = line === undefined ? '' : `\n    ${line.trimEnd()}\n    ${' '.repeat(Math.max(0, m.linePos - 1))}^`;
      return `${file}:${m.lineNum}:${m.linePos}: ${m.message}${quoted}`;
    });
  }

  /** Compiles a module of the manifest to a pipeline; throws a FolderError with the compiler's words. */
  async function compile(device, reader, module) {
    const source = await readText(reader, module.file);
    device.pushErrorScope('validation');
    const shader = device.createShaderModule({ label: module.file, code: source });
    const { messages } = await shader.getCompilationInfo();
    const failed = await device.popErrorScope();
    const words = compilerWords(module.file, source, messages);
    if (words.length > 0) throw new FolderError(words.join('\n'));
    if (failed) throw new FolderError(`${module.file}: ${failed.message}`);
    const types = { uniform: 'uniform', read: 'read-only-storage', read_write: 'storage' };
    try {
      return await scoped(device, async () => {
        const groups = [];
        for (const { group, binding, kind } of module.bindings) {
          (groups[group] ??= []).push({ binding, visibility: 4 /* compute */, buffer: { type: types[kind] } });
        }
        const bindGroupLayouts = Array.from(groups, (entries) => device.createBindGroupLayout({ entries: entries ?? [] }));
        const layout = device.createPipelineLayout({ bindGroupLayouts });
        const pipeline = await device.createComputePipelineAsync({ layout, compute: { module: shader, entryPoint: module.entry_point } });
        return { module, pipeline, bindGroupLayouts };
      });
    } catch (error) {
      throw new FolderError(`${module.file}: entry point ${module.entry_point}: ${error.message}`);
    }
  }

  // Numbers of GPUBufferUsage and GPUMapMode, which Node has no globals for until Dawn's are put there.
  const USAGE = { MAP_READ: 1, COPY_SRC: 4, COPY_DST: 8, UNIFORM: 64, STORAGE: 128, QUERY_RESOLVE: 512 };

  /** A buffer of at least so many bytes. Runtime-sized arrays need one element, so none is smaller than 64 bytes. */
  function makeBuffer(device, label, size, usage) {
    return device.createBuffer({ label, size: Math.max(64, Math.ceil(size / 4) * 4), usage });
  }

  /** A dispatch, ready to be recorded: `buffers` maps names of bindings to buffers. */
  function prepare(device, { module, pipeline, bindGroupLayouts }, params, buffers, groups) {
    const uniform = makeBuffer(device, `${module.name} params`, params.byteLength, USAGE.UNIFORM | USAGE.COPY_DST);
    device.queue.writeBuffer(uniform, 0, params);
    const bindGroups = bindGroupLayouts.map((layout, group) => device.createBindGroup({
      layout,
      entries: module.bindings.filter((b) => b.group === group)
        .map((b) => ({ binding: b.binding, resource: { buffer: b.kind === 'uniform' ? uniform : buffers(b.name) } })),
    }));
    return {
      record(pass) {
        pass.setPipeline(pipeline);
        bindGroups.forEach((bindGroup, group) => pass.setBindGroup(group, bindGroup));
        pass.dispatchWorkgroups(...groups);
      },
      destroy: () => uniform.destroy(),
    };
  }

  /** The bytes of a buffer's beginning, read back. */
  async function readBack(device, buffer, size) {
    const copy = makeBuffer(device, 'read back', size, USAGE.MAP_READ | USAGE.COPY_DST);
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, copy, 0, Math.ceil(size / 4) * 4);
    device.queue.submit([encoder.finish()]);
    try {
      await copy.mapAsync(1 /* read */);
      return copy.getMappedRange().slice(0, size);
    } finally {
      copy.destroy();
    }
  }

  Object.assign(kvpack, { NoGpu, USAGE, openAdapter, title, needs, Devices, scoped, compile, makeBuffer, prepare, readBack });
})();
