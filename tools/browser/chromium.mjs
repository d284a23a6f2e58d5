// Headless Chromium for the tests of pages: with WebGPU on its own software driver, without network.
//
//   import { withPage } from './chromium.mjs';
//   await withPage({ folders: { '/': 'tools/web' } }, async ({ page, address, faults }) => {
//     await page.goto(address + 'index.html');       // http://localhost/index.html, answered from the folder
//     ...                                            // or page.goto('file:///...') for a file that stands alone
//   });                                              // throws if there was a console error or an outside request
//
// The browser is KVPACK_CHROMIUM, or the first of chromium, chromium-browser, google-chrome in PATH. Where something is
// missing, Missing is thrown, with the command that helps; scripts end with exit code 3 for an npm package then, and with 4
// for a browser or a driver.

import { accessSync, constants, readFileSync, statSync } from 'node:fs';
import { delimiter, dirname, extname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';

export const HERE = dirname(fileURLToPath(import.meta.url));

/** Something that these scripts need is not installed; the message says what helps. */
export class Missing extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

/** Imports an npm package of this folder. */
export async function need(name) {
  try {
    return await import(name);
  } catch (error) {
    throw new Missing(`the npm package \`${name}\` does not load (${error.message.split('\n')[0]})\nRun:  npm ci --prefix "${HERE}"`, 3);
  }
}

function executable() {
  if (process.env.KVPACK_CHROMIUM) return process.env.KVPACK_CHROMIUM;
  for (const name of ['chromium', 'chromium-browser', 'google-chrome']) {
    for (const folder of (process.env.PATH ?? '').split(delimiter)) {
      const file = join(folder, name);
      try {
        accessSync(file, constants.X_OK);
        return file;
      } catch { /* not here */ }
    }
  }
  throw new Missing('Chromium is not installed.\nRun:  apt-get install -y --no-install-recommends chromium\n'
    + 'or set KVPACK_CHROMIUM to the program of a Chromium or Chrome', 4);
}

// WebGPU without a GPU, and no traffic of the browser's own; playwright adds more of the latter. Workgroup memory is not
// zeroed: SwiftShader takes seconds a kernel to compile that, and kernels that store before they load must not need it.
const FLAGS = ['--no-sandbox', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader',
  '--enable-dawn-features=disable_workgroup_init', '--disable-background-networking', '--disable-component-update',
  '--disable-domain-reliability', '--no-pings'];

/** Starts the browser. */
export async function openBrowser() {
  const { chromium } = await need('playwright-core');
  return chromium.launch({ executablePath: executable(), args: FLAGS, headless: true, timeout: 120_000 });
}

const TYPES = { '.html': 'text/html', '.js': 'text/javascript', '.mjs': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml',
  '.json': 'application/json', '.wgsl': 'text/plain', '.md': 'text/markdown', '.png': 'image/png' };

/**
 * Opens a page. `folders` maps a path of `origin` to a folder, the longest fitting path wins; `replace(path, body)` may
 * return another body for a file; `init` is a function that runs in the page before its scripts. Further options
 * (viewport, colorScheme, reducedMotion) are playwright's.
 * Returns the page, the origin's `address`, and `faults`: what a sound page has none of - console errors and warnings,
 * uncaught exceptions, requests to anything but the origin, file:, blob: and data:.
 */
export async function openPage(browser, { folders = {}, origin = 'http://localhost', replace, init, ...options } = {}) {
  const context = await browser.newContext(options);
  if (init) await context.addInitScript(init);
  const page = await context.newPage();
  const faults = [];
  page.on('console', (message) => {
    if (message.type() === 'error' || message.type() === 'warning') faults.push(`console ${message.type()}: ${message.text()}`);
  });
  page.on('pageerror', (error) => faults.push(`exception: ${error.stack ?? error}`));
  await context.route('**/*', (route) => {
    const url = new URL(route.request().url());
    if (['file:', 'blob:', 'data:'].includes(url.protocol)) return route.continue();
    if (url.origin !== origin) {
      faults.push(`request outside: ${url}`);
      return route.abort();
    }
    const path = decodeURIComponent(url.pathname);
    const prefix = Object.keys(folders).filter((p) => path.startsWith(p)).sort((a, b) => b.length - a.length)[0];
    const rest = prefix === undefined ? '' : normalize(path.slice(prefix.length)).replace(/^(\.\.[/\\])+/, '');
    let file = prefix === undefined ? '' : join(folders[prefix], rest);
    let body;
    try {
      if (statSync(file).isDirectory()) file = join(file, 'index.html');
      body = readFileSync(file);
    } catch {
      if (path === '/favicon.ico') return route.fulfill({ status: 204 });
      return route.fulfill({ status: 404, body: 'not found' });
    }
    return route.fulfill({ body: replace?.(path, body) ?? body, contentType: TYPES[extname(file)] ?? 'application/octet-stream' });
  });
  return { page, address: `${origin}/`, faults };
}

/**
 * Calls `use({ page, address, faults })` with a page of `browser`, or of one that lives as long. Faults that are left in the
 * list are thrown.
 */
export async function withPage(options, use) {
  const { browser: given, ...rest } = options;
  const browser = given ?? await openBrowser();
  try {
    const opened = await openPage(browser, rest);
    const result = await use(opened);
    await opened.page.context().close();
    if (opened.faults.length > 0) throw new Error(`the page is at fault:\n${opened.faults.join('\n')}`);
    return result;
  } finally {
    if (!given) await browser.close();
  }
}

/** Serious and critical faults that axe-core finds in the page as it is shown, one line each. */
export async function axeFaults(page) {
  const { default: axe } = await need('axe-core');
  await page.evaluate(axe.source);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ['violations'] }));
  return violations
    .filter((v) => v.impact === 'serious' || v.impact === 'critical')
    .flatMap((v) => v.nodes.map((n) => `${v.id}: ${n.target.join(' ')}: ${n.failureSummary.replace(/\s+/g, ' ')}`));
}

/** Runs a script's `main(arguments)`, which returns the exit code. */
export async function runScript(name, main) {
  let code;
  try {
    code = await main(process.argv.slice(2));
  } catch (error) {
    console.error(`${name}: ${error instanceof Missing ? error.message : error.stack}`);
    code = error instanceof Missing ? error.code : 1;
  }
  // Dawn keeps node alive while a device exists, so leave by hand once the output is out.
  process.stdout.write('', () => process.exit(code));
}
