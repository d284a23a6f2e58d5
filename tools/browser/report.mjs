// Checks a page of `kvpack report` in headless Chromium.
//
//   node tools/browser/report.mjs looks PAGE [DIR]   three widths, both themes: faults of layout, contrast and accessibility;
//                                                    with DIR a picture of each
//   node tools/browser/report.mjs glance PAGE        the same at one width in one theme
//   node tools/browser/report.mjs plays PAGE         plays to the end, with and without reduced motion
//   node tools/browser/report.mjs mouse PAGE         every control by pointer
//   node tools/browser/report.mjs keys PAGE          every control by keyboard alone
//   node tools/browser/report.mjs numbers PAGE       what is shown of a sample of numbers, as JSON
//   node tools/browser/report.mjs inert PAGE         that no text of the data became markup or ran; shown tokens as JSON
//   node tools/browser/report.mjs quick PAGE         milliseconds of opening and of steps, as JSON
//
// Exit: 0 all well, 1 a fault, 3 Chromium or a package is missing.

import { mkdirSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { axeFaults, openBrowser, openPage, runScript } from './chromium.mjs';

const WIDTHS = [360, 900, 1600];
const faults = [];
const demand = (holds, what) => { if (!holds) faults.push(what); };

/** Opens the page; console errors and requests count as faults. */
async function opened(browser, file, options, use) {
  const { page, faults: own } = await openPage(browser, { viewport: { width: 1280, height: 900 }, acceptDownloads: true, ...options });
  const requests = [];
  page.on('request', (request) => requests.push(request.url()));
  page.on('dialog', (dialog) => { faults.push(`a dialog: ${dialog.message()}`); dialog.dismiss(); });
  await page.goto(pathToFileURL(resolve(file)).href);
  await page.waitForFunction(() => typeof state !== 'undefined' && document.querySelector('#terms dt'));
  await settled(page);
  await use(page);
  const others = requests.filter((url) => !url.startsWith('blob:')).slice(1);
  demand(others.length === 0, `requests: ${others}`);
  faults.push(...own);
  await page.context().close();
}

const settled = (page) => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

// ---- layout and contrast -----------------------------------------------------------------------------------------------

/** Runs in the page: texts that are cut, that cover each other, or that can hardly be read. */
function layoutFaults() {
  const found = [];
  const root = document.documentElement;
  if (root.scrollWidth > window.innerWidth) found.push(`the page is ${root.scrollWidth} wide in a window of ${window.innerWidth}`);
  const name = (node) => `<${node.tagName.toLowerCase()}${node.id ? ` #${node.id}` : ''}> ${JSON.stringify(node.textContent.slice(0, 30))}`;
  const scroller = (node) => node.closest('.scroll, .rowtable, .words');
  const shown = (node) => node.checkVisibility?.({ visibilityProperty: true }) !== false && !node.closest('.hidden, .skip, noscript, script, style, caption.hidden');

  // Leaves: nodes with text of their own, and the boxes of that text.
  const leaves = [];
  for (const node of document.querySelectorAll('body *')) {
    if (!shown(node) || node.closest('select')) continue;
    const own = [...node.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE && child.data.trim() !== '');
    if (own.length === 0) continue;
    const range = document.createRange();
    for (const text of own) {
      range.selectNodeContents(text);
      for (const box of range.getClientRects()) {
        if (box.width > 0 && box.height > 0) leaves.push({ node, left: box.left, right: box.right, top: box.top, bottom: box.bottom });
      }
    }
  }
  for (const { node, left, right } of leaves) {
    if (scroller(node)) continue;
    if (left < -0.5 || right > window.innerWidth + 0.5) found.push(`beyond the window: ${name(node)}`);
    const chart = node.closest('svg');
    if (chart) {
      const box = chart.getBoundingClientRect();
      if (left < box.left - 1 || right > box.right + 1) found.push(`beyond its chart: ${name(node)} ${Math.round(left - box.left)} ${Math.round(right - box.right)}`);
    }
  }
  // Texts on top of each other, by more than the space between letters and lines.
  const free = leaves.filter(({ node }) => !scroller(node) && !node.closest('.transport'));
  free.sort((a, b) => a.top - b.top);
  free.forEach((a, i) => {
    for (let j = i + 1; j < free.length && free[j].top < a.bottom - 4; j++) {
      const b = free[j];
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (a.node !== b.node && width > 2 && height > 5) found.push(`covers: ${name(a.node)} and ${name(b.node)}`);
    }
  });
  // Boxes whose content is cut, but for those that scroll and tokens that end in an ellipsis.
  for (const node of document.querySelectorAll('button, h1, h2, h3, h4, p, dt, dd, output, figcaption, td, th, li')) {
    if (shown(node) && !scroller(node) && node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== 'inline') found.push(`cut: ${name(node)}`);
  }

  // Contrast of text with what lies behind it.
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => { const s = v / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const worst = new Map();
  for (const { node } of leaves) {
    if (node.closest('button:disabled')) continue;
    const style = getComputedStyle(node);
    const [front, back] = [rgba(node.closest('svg') ? style.fill : style.color), behind(node)].map((c) => luminance(c.slice(0, 3)));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (!(ratio >= 4.5)) worst.set(name(node), ratio.toFixed(2));
  }
  for (const [node, ratio] of worst) found.push(`contrast ${ratio}: ${node}`);
  return { found, texts: leaves.length };
}

async function looks(browser, file, folder, widths = WIDTHS, themes = ['light', 'dark']) {
  if (folder) mkdirSync(folder, { recursive: true });
  for (const width of widths) {
    for (const colorScheme of themes) {
      await opened(browser, file, { viewport: { width, height: 900 }, colorScheme }, async (page) => {
        const at = `${width} ${colorScheme}`;
        const note = async (when) => {
          const { found, texts } = await page.evaluate(layoutFaults);
          demand(texts > 100, `${at}: only ${texts} texts`);
          faults.push(...found.map((fault) => `${at} ${when}: ${fault}`));
        };
        await note('at first');
        if (folder) await page.screenshot({ path: join(folder, `${width}-${colorScheme}.png`), fullPage: true });
        // Empty, full, two formats, a group that closes, a row of values.
        await page.click('#first');
        await note('before the first token');
        for (const id of ['format', 'other']) {
          const values = await page.$$eval(`#${id} option`, (all) => all.map((option) => option.value));
          await page.selectOption(`#${id}`, values[values.length - (id === 'format' ? 1 : 2)]);
        }
        await page.selectOption('#side', 'v');
        await page.click('#last');
        await settled(page);
        await note('at the end, two formats');
        faults.push(...(await axeFaults(page)).map((fault) => `${at}: axe: ${fault}`));
        if (folder) await page.screenshot({ path: join(folder, `${width}-${colorScheme}-two.png`), fullPage: true });
      });
    }
  }
}

// ---- playing -------------------------------------------------------------------------------------------------------------

async function plays(browser, file) {
  for (const reducedMotion of ['no-preference', 'reduce']) {
    await opened(browser, file, { reducedMotion }, async (page) => {
      demand(await page.textContent('#play') === 'Play', 'it plays by itself');
      await page.selectOption('#speed', '6');
      await page.click('#first');
      await page.click('#play');
      demand(await page.textContent('#play') === 'Pause', 'Play does not turn to Pause');
      const seen = new Set();
      const end = Number(await page.getAttribute('#scrub', 'max'));
      const limit = Date.now() + 20_000;
      while (Date.now() < limit && await page.textContent('#play') === 'Pause') {
        seen.add(Number(await page.inputValue('#scrub')));
        await page.waitForTimeout(20);
      }
      demand(Number(await page.inputValue('#scrub')) === end, `it stopped at ${await page.inputValue('#scrub')} of ${end}`);
      demand(await page.textContent('#play') === 'Play', 'it does not stop at the end');
      // Polling may miss a few.
      demand(seen.size >= end * 0.5, `only ${seen.size} of ${end} steps were seen`);
      // Once more from the end starts at the beginning; a press pauses.
      await page.click('#play');
      await page.waitForTimeout(250);
      await page.click('#play');
      const paused = Number(await page.inputValue('#scrub'));
      await page.waitForTimeout(300);
      demand(paused > 0 && paused < end && Number(await page.inputValue('#scrub')) === paused, `a pause does not hold at ${paused}`);
    });
  }
}

// ---- controls ------------------------------------------------------------------------------------------------------------

/** Runs in the page: all that it shows, in short. */
function shownNow() {
  const pictures = [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL());
  const text = document.body.innerText + document.querySelector('#drift').innerHTML + document.querySelector('#scatter').innerHTML;
  const chosen = [...document.querySelectorAll('select, input')].map((control) => control.value);
  return JSON.stringify([pictures, text, chosen, getComputedStyle(document.body).backgroundColor]);
}

/** Does something and demands that it shows. */
async function changes(page, what, act) {
  const before = await page.evaluate(shownNow);
  await act();
  await settled(page);
  demand(await page.evaluate(shownNow) !== before, `nothing changes: ${what}`);
}

const SELECTS = ['format', 'other', 'prompt', 'layer', 'head', 'outlier', 'speed', 'stretch', 'inspect', 'side', 'layout-bits'];

/** Whether a choice has nothing to choose from; then it must be off. */
async function single(page, id) {
  const [count, off] = await page.$eval(`#${id}`, (select) => [select.options.length, select.disabled]);
  demand((count < 2) === off, `${id} has ${count} choices and is ${off ? 'off' : 'on'}`);
  return count < 2;
}

async function mouse(browser, file) {
  await opened(browser, file, {}, async (page) => {
    for (const theme of ['light', 'dark', 'system']) {
      await page.click('#theme');
      demand((await page.textContent('#theme')).includes(theme), `the theme is not ${theme}`);
    }
    const points = page.locator('#scatter .point');
    for (let i = 0; i < await points.count(); i++) {
      const pair = await points.nth(i).getAttribute('data-pair');
      await points.nth(i).locator('circle').hover({ force: true });
      demand(await page.textContent('#scatter-readout h3') === pair, `${pair}: pointing at it does not tell its numbers`);
    }
    await points.nth(0).locator('circle').click({ force: true });
    demand(await page.inputValue('#format') === await points.nth(0).getAttribute('data-pair'), 'a point does not choose its format');
    const heads = page.locator('#table thead button');
    for (let i = 0; i < await heads.count(); i++) {
      for (const order of ['ascending', 'descending']) {
        await heads.nth(i).click();
        demand(await page.locator('#table thead th').nth(i).getAttribute('aria-sort') === order, `column ${i} is not ${order}`);
      }
      const cells = await page.$$eval('#table tbody tr', (all, n) => all.map((row) => row.children[n].textContent), i);
      const numbers = cells.map((cell) => parseFloat(cell.replaceAll(',', '').replaceAll('\u2212', '-')));
      const sorted = i === 0 ? [...cells].sort((a, b) => b.localeCompare(a)) : [...numbers].sort((a, b) => b - a);
      demand(JSON.stringify(i === 0 ? cells : numbers) === JSON.stringify(sorted), `column ${i} is not sorted: ${cells}`);
    }
    for (const [id, step] of [['first', 0], ['next', 1], ['next', 2], ['back', 1], ['last', null]]) {
      await page.click(`#${id}`);
      const wanted = step ?? Number(await page.getAttribute('#scrub', 'max'));
      demand(Number(await page.inputValue('#scrub')) === wanted, `${id} does not lead to ${wanted}`);
    }
    const scrub = await page.locator('#scrub').boundingBox();
    await changes(page, 'the scrubber', () => page.mouse.click(scrub.x + scrub.width * 0.4, scrub.y + scrub.height / 2));
    for (const id of SELECTS) {
      if (await single(page, id)) continue;
      for (const value of await page.$$eval(`#${id} option`, (all) => all.filter((option) => !option.selected).slice(0, 2).map((option) => option.value))) {
        await changes(page, `${id} ${value}`, () => page.selectOption(`#${id}`, value));
      }
    }
    await changes(page, 'a token', () => page.locator('#tokens .token').nth(4).click());
    demand(await page.inputValue('#scrub') === '5', 'a token does not lead to itself');
    await page.click('#last');
    await changes(page, 'a heat map', () => page.locator('#lanes canvas').first().click({ position: { x: 9, y: 9 } }));
    demand(await page.inputValue('#inspect') === '0', 'a heat map does not choose its token');
    await changes(page, 'pointing at a heat map', () => page.locator('#lanes canvas').first().hover({ position: { x: 30, y: 30 } }));
    demand(/channel \d+: computed/.test(await page.textContent('#heat-readout')), 'pointing at a heat map tells no numbers');
    const watch = page.locator('.card button').last();
    await changes(page, 'Watch', () => watch.click());
    const factor = await page.locator('#factor').boundingBox();
    await changes(page, 'the slider of the factor', async () => {
      await page.locator('#factor').scrollIntoViewIfNeeded();
      const box = await page.locator('#factor').boundingBox();
      await page.mouse.click(box.x + 3, box.y + box.height / 2);
    });
    demand(factor && await page.inputValue('#factor') === '0', 'the slider does not go to its beginning');
    await beside(page);
    await changed(page);
    const [download] = await Promise.all([page.waitForEvent('download'), page.click('#save')]);
    demand(download.suggestedFilename() === 'kvpack-report.json', 'the data is not saved');
  });
}

/** Pointing at a map level with the number of a channel tells of that channel, whether rows wait or not. */
async function beside(page) {
  for (const waits of [false, true]) {
    const format = await page.evaluate((wanted) => DATA.formats.map(({ pair }) => pair).find((pair) => runOf(MAIN, state.outlier, pair).k.waits === wanted), waits);
    if (!format) continue;
    await page.selectOption('#format', format);
    await page.evaluate(() => go(Infinity));
    for (const map of await page.locator('#lanes .lane:first-child .map:not([hidden])').all()) {
      await map.evaluate((node) => node.scrollIntoView({ block: 'center', behavior: 'instant' }));
      const box = await map.locator('canvas').boundingBox();
      for (const label of await map.locator('.channels span').all()) {
        const at = await label.boundingBox();
        await page.mouse.move(box.x + 5, at.y + at.height / 2);
        const [said, channel] = [await page.textContent('#heat-readout'), await label.textContent()];
        demand(said.includes(`channel ${channel}:`), `${format}, ${await map.locator('figcaption').textContent()}: beside ${channel} stands ${JSON.stringify(said)}`);
      }
    }
  }
}

/** Lines under tokens: of each of two formats its own, in its colour. */
async function changed(page) {
  const formats = await page.$$eval('#format option', (all) => all.map((option) => option.value));
  if (formats.length < 2) return;
  await page.selectOption('#format', formats[formats.length - 1]);
  await page.selectOption('#other', formats[formats.length - 2]);
  await page.evaluate(() => go(Infinity));
  const wrong = await page.evaluate(() => {
    const reference = promptOf(null);
    const paint = (name) => css(colour(name)).replaceAll(' ', ', ');
    return [...document.querySelectorAll('#tokens .token')].flatMap((chip, i) => [['before', state.format, 'a'], ['after', state.other, 'b']].filter(([where, pair, name]) => {
      const style = getComputedStyle(chip, `::${where}`);
      const drawn = style.content !== 'none' && style.backgroundColor === paint(name);
      return drawn !== isFlipped(reference, promptOf(pair), i);
    }).map(([, pair]) => `${pair} ${i}`));
  });
  demand(wrong.length === 0, `lines under tokens that are not those of the predictions: ${wrong}`);
  demand((await page.textContent('#marks')).includes(formats[formats.length - 2]), 'nothing says whose the lower line is');
}

async function keys(browser, file) {
  await opened(browser, file, {}, async (page) => {
    // All that can be worked is reached with Tab, in the order of the page, and shows that it has the focus.
    const wanted = await page.$$eval('button:not(:disabled), select:not(:disabled), input, [tabindex="0"], a[href], .point', (all) => all.filter((node) => node.checkVisibility()).length);
    const reached = [];
    for (let i = 0; i < wanted + 5; i++) {
      await page.keyboard.press('Tab');
      const at = await page.evaluate(() => {
        const node = document.activeElement;
        if (!node || node === document.body) return null;
        const ring = getComputedStyle(node);
        const circle = node.querySelector?.('circle');
        return { name: node.id || node.getAttribute('aria-label') || node.textContent, ring: ring.outlineStyle !== 'none' || Boolean(circle && getComputedStyle(circle).strokeWidth === '4px') };
      });
      if (at === null) break;
      reached.push(at);
    }
    demand(reached.length === wanted, `${reached.length} of ${wanted} controls are reached: ${reached.map((at) => at.name).join(' | ')}`);
    for (const at of reached) demand(at.ring, `the focus does not show on ${at.name}`);

    const press = async (id, key) => { await page.focus(`#${id}`); await page.keyboard.press(key); };
    await changes(page, 'theme', () => press('theme', 'Enter'));
    await changes(page, 'theme', () => press('theme', ' '));
    for (const key of ['Enter', ' ']) {
      const points = page.locator('#scatter .point');
      const n = key === 'Enter' ? 1 : 0;
      await points.nth(n).focus();
      const pair = await points.nth(n).getAttribute('data-pair');
      demand(await page.textContent('#scatter-readout h3') === pair, `${pair}: the focus does not tell its numbers`);
      await page.keyboard.press(key);
      demand(await page.inputValue('#format') === pair, `${JSON.stringify(key)} on a point does not choose its format`);
      demand(await page.evaluate(() => document.activeElement?.dataset?.pair) === pair, 'the point loses the focus');
    }
    await page.locator('#table thead button').nth(1).focus();
    await changes(page, 'sorting', () => page.keyboard.press('Enter'));
    await changes(page, 'sorting again', () => page.keyboard.press(' '));
    for (const [id, key, step] of [['first', 'Enter', 0], ['next', ' ', 1], ['next', 'Enter', 2], ['back', 'Enter', 1], ['scrub', 'ArrowRight', 2], ['scrub', 'Home', 0],
      ['scrub', 'End', null], ['play', 'ArrowLeft', -1], ['play', 'Home', 0], ['play', 'ArrowRight', 1], ['play', 'End', null]]) {
      await press(id, key);
      const end = Number(await page.getAttribute('#scrub', 'max'));
      const to = step === null ? end : step < 0 ? end + step : step;
      demand(Number(await page.inputValue('#scrub')) === to, `${JSON.stringify(key)} on ${id} leads to ${await page.inputValue('#scrub')}, not ${to}`);
    }
    await press('first', 'Enter');
    await press('play', ' ');
    demand(await page.textContent('#play') === 'Pause', 'Space on Play does not play');
    await press('play', 'Enter');
    demand(await page.textContent('#play') === 'Play', 'Enter on Pause does not pause');
    await press('last', 'Enter');
    for (const id of SELECTS) {
      if (await single(page, id)) continue;
      // Up where it stands at the last.
      const last = await page.$eval(`#${id}`, (select) => select.selectedIndex === select.options.length - 1);
      await changes(page, id, () => press(id, last ? 'ArrowUp' : 'ArrowDown'));
    }
    await changes(page, 'the slider of the factor', () => press('factor', 'ArrowLeft'));
    await page.locator('.card button').first().focus();
    await changes(page, 'Watch', () => page.keyboard.press('Enter'));
    for (const region of ['.scroll', '.rowtable', '.words']) {
      const wide = await page.$eval(region, (node) => node.scrollWidth > node.clientWidth || node.scrollHeight > node.clientHeight);
      if (!wide) continue;
      await page.locator(region).first().focus();
      await page.keyboard.press(region === '.scroll' ? 'ArrowRight' : 'ArrowDown');
      await page.waitForTimeout(200);
      demand(await page.$eval(region, (node) => node.scrollLeft + node.scrollTop > 0), `${region} does not scroll by keyboard`);
    }
    const [download] = await Promise.all([page.waitForEvent('download'), press('save', 'Enter')]);
    demand(download.suggestedFilename() === 'kvpack-report.json', 'the data is not saved');
  });
}

// ---- numbers -------------------------------------------------------------------------------------------------------------

/** Runs in the page: a sample of what it shows, the numbers as the bits of an f64, and that the table of the row says the same. */
function sample() {
  const bits = (value) => {
    const view = new DataView(new ArrayBuffer(8));
    view.setFloat64(0, value);
    return view.getBigUint64(0).toString();
  };
  const found = [];
  let count = 0;
  const chosen = MAIN.takes.flatMap((take) => take.runs.filter((run) => run.pair !== null).map((run) => [take, run]));
  for (const [i, [taken, run]] of chosen.entries()) {
    for (const prompt of MAIN.prompts.keys()) {
      for (const layer of MAIN.shown_layers.keys()) {
        for (const head of MAIN.shown_heads.keys()) {
          for (const side of ['k', 'v']) {
            const stored = new Stored(MAIN, run, prompt, layer, head, side);
            const length = MAIN.prompts[prompt].ids.length;
            const token = (i * 7 + prompt * 11 + layer * 5 + head * 3 + (side === 'k' ? 0 : 17)) % stored.positions.length;
            Object.assign(state, { format: run.pair, other: '', prompt, layer, head, outlier: taken.outlier, step: stored.positions.length });
            document.getElementById('side').value = side;
            choose();
            inspectToken(token);
            const words = [...document.querySelectorAll('#inspector .scales .word')].map((word) => ({ index: Number(word.querySelector('p span').textContent.replaceAll(',', '')),
              hex: word.querySelector('code')?.textContent, parts: [...word.querySelectorAll('.code')].reverse().map((part) => ({ own: part.classList.contains('own'), bits: part.children[0].textContent,
                label: part.children[1].textContent })) }));
            // Of a channel, where labels tell channels; else its block of 16, counted by the row of all heads, or the only word.
            const scaleOfChannel = (channel) => {
              for (const [n, { index, parts }] of words.entries()) {
                const at = parts.findIndex(({ own, label }) => own && (stored.kind.layout !== 'per_channel' || label === `c${channel}`));
                if (at >= 0 && (stored.kind.layout !== 'per_block' || n === Math.floor(channel / 16))) return [index, at * parts[at].bits.length, parseInt(parts[at].bits, 2)];
              }
              return null;
            };
            const tensor = document.querySelector('#inspector .tensor code')?.textContent ?? null;
            const whole = words.filter(({ hex }) => hex).map(({ index, hex }) => [index, hex]);
            const cells = [...document.querySelectorAll('#inspector tbody tr')].map((row) => [...row.children].map((cell) => cell.textContent));
            for (let channel = 0; channel < stored.channels; channel++) {
              const packed = stored.isPacked(token, length);
              const [read, error] = [stored.read(token, channel, length), stored.error(token, channel, length)];
              const row = cells[channel];
              const shown = row[1] === digits(stored.computed(token, channel)) && row[row.length - 1] === digits(error) && row[row.length - 2].replace(' lost', '') === digits(read)
                && (!packed || row[2] === stored.code(token, channel).toString(2).padStart(stored.kind.bits, '0'));
              count++;
              found.push({ pair: run.pair, outlier: taken.outlier, prompt, layer, head, side, token, channel, packed, read: bits(read), error: bits(error),
                code: packed ? stored.code(token, channel) : 0, shown, scale: scaleOfChannel(channel), scale_words: whole, tensor });
            }
          }
        }
      }
    }
  }
  return { count, found };
}

async function numbers(browser, file) {
  await opened(browser, file, {}, async (page) => console.log(JSON.stringify(await page.evaluate(sample))));
}

async function inert(browser, file) {
  await opened(browser, file, {}, async (page) => {
    const found = await page.evaluate(() => ({
      hacked: typeof globalThis.hacked !== 'undefined',
      elements: document.querySelectorAll('img, iframe, object, embed, video, audio, link, base, form, b, i, marquee').length,
      scripts: document.scripts.length,
      tokens: [...document.querySelectorAll('#tokens .token')].map((token) => token.textContent),
      short: document.getElementById('short').textContent,
      shown: { meaning: !document.getElementById('meaning').hidden },
      sampled: document.getElementById('sampled').textContent,
      text: document.querySelector('main').textContent,
    }));
    demand(!found.hacked, 'a text ran');
    demand(found.elements === 0, `${found.elements} elements came from texts`);
    demand(found.scripts === 2, `${found.scripts} scripts`);
    await page.click('#first');
    await page.click('#last');
    console.log(JSON.stringify(found));
  });
}

async function quick(browser, file) {
  await opened(browser, file, {}, async (page) => {
    const times = await page.evaluate(() => {
      const [entry] = performance.getEntriesByType('navigation');
      const steps = [];
      for (let step = 0; step <= shownTokens().length; step++) {
        const start = performance.now();
        go(step);
        steps.push(performance.now() - start);
      }
      steps.sort((a, b) => a - b);
      return { open: entry.domComplete, step: steps[Math.floor(steps.length / 2)], steps: steps.length };
    });
    console.log(JSON.stringify(times));
  });
}

runScript('report.mjs', async ([what, file, folder]) => {
  const glance = (browser, file) => looks(browser, file, undefined, [360], ['light']);
  const checks = { looks, glance, plays, mouse, keys, numbers, inert, quick };
  if (!checks[what] || !file) {
    console.error(`report.mjs: one of ${Object.keys(checks).join(', ')}, then a page`);
    return 2;
  }
  const browser = await openBrowser({ webgpu: false });
  try {
    await checks[what](browser, file, folder);
  } finally {
    await browser.close();
  }
  for (const fault of [...new Set(faults)].slice(0, 60)) console.error(fault);
  return faults.length > 0 ? 1 : 0;
});
