// Reading an export folder: the three ways in which a browser is given one, and .npy files.
//
// All scripts of this folder are classic ones that add to the global `kvpack`, so that the page also opens from a file,
// where browsers load no modules. Node takes them by `import`.
//
// A reader is { name, read(path) }: `read` gives an ArrayBuffer, or throws a FolderError.
'use strict';
globalThis.kvpack ??= {};

(() => {
  /** Something is wrong with the folder, and the message says what. */
  class FolderError extends Error {}

  const parts = (path) => path.split('/').filter((part) => part !== '' && part !== '.');

  /** A reader over files by their paths within the folder. */
  function mapReader(name, files) {
    return {
      name,
      async read(path) {
        const file = files.get(path);
        if (!file) throw new FolderError(`${path}: not in the folder`);
        return file.arrayBuffer();
      },
    };
  }

  /** The map of files as a reader; where manifest.json lies in one folder further down, that folder. */
  function readerOf(name, files) {
    const roots = [...files.keys()].filter((path) => /(^|\/)manifest\.json$/.test(path)).sort((a, b) => parts(a).length - parts(b).length);
    const root = roots.length > 0 ? roots[0].slice(0, -'manifest.json'.length) : '';
    const below = new Map([...files].filter(([path]) => path.startsWith(root)).map(([path, file]) => [path.slice(root.length), file]));
    return mapReader(root ? parts(root).at(-1) : name, below);
  }

  /** What an <input type="file" webkitdirectory> holds. */
  function readerOfInput(list) {
    const files = new Map();
    let name = 'folder';
    for (const file of list) {
      const [root, ...rest] = parts(file.webkitRelativePath || file.name);
      if (rest.length > 0) name = root;
      files.set(rest.length > 0 ? rest.join('/') : root, file);
    }
    return readerOf(name, files);
  }

  /** The files below an entry of the older interface for dropped folders, which Safari and Firefox have. */
  async function walkEntry(entry, path, files) {
    if (entry.isFile) {
      files.set(path, await new Promise((done, failed) => { entry.file(done, failed); }));
      return;
    }
    const reader = entry.createReader();
    for (;;) {
      // At most 100 entries a call.
      const some = await new Promise((done, failed) => { reader.readEntries(done, failed); });
      if (some.length === 0) return;
      for (const child of some) await walkEntry(child, path ? `${path}/${child.name}` : child.name, files);
    }
  }

  /** The same of the newer one. Chromium needs it where the page is a file: there the older one gives no contents. */
  async function walkHandle(handle, path, files) {
    if (handle.kind === 'file') {
      files.set(path, await handle.getFile());
      return;
    }
    for await (const child of handle.values()) await walkHandle(child, path ? `${path}/${child.name}` : child.name, files);
  }

  /** What was dropped. Call it while the event is handled: later the items are gone. */
  async function readerOfDrop(transfer) {
    const items = [...transfer.items].filter((item) => item.kind === 'file');
    const newer = items.every((item) => item.getAsFileSystemHandle);
    const roots = await Promise.all(items.map((item) => (newer ? item.getAsFileSystemHandle() : item.webkitGetAsEntry())));
    const files = new Map();
    const single = roots.length === 1 && (roots[0].kind === 'directory' || roots[0].isDirectory);
    for (const root of roots) await (newer ? walkHandle : walkEntry)(root, single ? '' : root.name, files);
    return readerOf(single ? roots[0].name : 'dropped files', files);
  }

  /** A folder on a server, by its address. */
  function readerOfAddress(address, base) {
    let root;
    try {
      root = new URL(address.endsWith('/') ? address : `${address}/`, base);
    } catch {
      throw new FolderError(`?export= needs the address of a folder; ${JSON.stringify(address)} is none`);
    }
    if (!['http:', 'https:', new URL(base).protocol].includes(root.protocol)) {
      throw new FolderError(`?export= takes a folder by http or https, not by ${root.protocol} as in ${JSON.stringify(address)}`);
    }
    return {
      name: parts(root.pathname).at(-1) ?? root.host,
      async read(path) {
        const file = new URL(path.split('/').map(encodeURIComponent).join('/'), root);
        let answer;
        try {
          answer = await fetch(file);
        } catch (error) {
          throw new FolderError(root.protocol === 'file:'
            ? 'a page that was opened from a file cannot fetch a folder by its address: choose or drop the folder'
            : `${file}: ${error.message}`);
        }
        if (!answer.ok) throw new FolderError(`${path}: ${answer.status} ${answer.statusText} from ${root}`.trim());
        return answer.arrayBuffer();
      },
    };
  }

  async function readText(reader, path) {
    const bytes = await reader.read(path);
    try {
      return new TextDecoder('utf-8', { fatal: true }).decode(bytes);
    } catch {
      throw new FolderError(`${path}: not UTF-8`);
    }
  }

  async function readJson(reader, path) {
    const text = await readText(reader, path);
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new FolderError(`${path}: no JSON: ${error.message}`);
    }
  }

  const ARRAYS = { '<u4': Uint32Array, '<f2': Uint16Array, '<f4': Float32Array, '<f8': Float64Array };

  /** A .npy file, little-endian in C order, as { type, shape, values }; `values` is a typed array, of bits for <f2. */
  async function readNpy(reader, path) {
    const bytes = await reader.read(path);
    const fail = (what) => { throw new FolderError(`${path}: ${what}`); };
    const head = new DataView(bytes);
    if (bytes.byteLength < 12 || head.getUint32(0) !== 0x934e554d || head.getUint16(4) !== 0x5059) fail('no .npy file');
    const major = head.getUint8(6);
    const [length, start] = major === 1 ? [head.getUint16(8, true), 10] : [head.getUint32(8, true), 12];
    if (start + length > bytes.byteLength) fail('the header is cut off');
    const text = new TextDecoder('latin1').decode(bytes.slice(start, start + length));
    const type = /'descr':\s*'([^']*)'/.exec(text)?.[1];
    const shape = /'shape':\s*\(([\d,\s]*)\)/.exec(text)?.[1].split(',').map((n) => n.trim()).filter(Boolean).map(Number);
    if (!ARRAYS[type] || !shape || !/'fortran_order':\s*False/.test(text)) fail(`<u4, <f2, <f4 or <f8 in C order is needed: ${text.trim()}`);
    const Numbers = ARRAYS[type];
    const count = shape.reduce((a, b) => a * b, 1);
    const data = bytes.slice(start + length);
    if (data.byteLength !== count * Numbers.BYTES_PER_ELEMENT) {
      fail(`shape (${shape.join(', ')}) of ${type} takes ${count * Numbers.BYTES_PER_ELEMENT} bytes, there are ${data.byteLength}`);
    }
    return { type, shape, values: new Numbers(data) };
  }

  Object.assign(kvpack, { FolderError, readerOfInput, readerOfDrop, readerOfAddress, readText, readJson, readNpy });
})();
