// Sentences, terms, the theme, and the start.

function drawSentences() {
  $('sentences').replaceChildren(...DATA.formats.map(({ pair, sentences }) => el('article', { class: 'card' },
    el('h3', {}, el('span', { text: pair }), el('button', { type: 'button', text: 'Watch', 'aria-label': `Watch ${pair}`, onclick: () => { setFormat(pair); $('watch').scrollIntoView(); $('play').focus({ preventScroll: true }); } })),
    ...sentences.map((text) => el('p', { text: readable(text) })))));
}

function drawTerms() {
  const terms = [
    ['Key, value', 'Two lists of numbers that a transformer makes of every token in every layer. A new token compares its query with all keys, and mixes the values by how well they fit.'],
    ['Layer, head, channel', 'A model is a stack of layers, each with keys and values of its own. A layer splits them over heads that look at the text side by side, and a head\u2019s key or value is a short list of numbers: its channels.'],
    ['Prefill, decode', 'Prefill: a whole prompt goes into the cache at once. Decode: tokens come one by one, as when a model writes.'],
    ['Code, scale', 'A stored number is a small code times a scale that several numbers share. The page of the cache holds codes in 32-bit words, the lowest channel in the lowest bits, and the scales in words behind them. Only fp8 keeps its scales beside the pages.'],
    ['Names of formats', 'K/V, or one name for both. f32 and f16: floats of 32 and 16 bits without a scale. fp8: 8-bit floats, one scale for K and one for V of a layer. fp4: 4-bit floats, a scale for every 16 channels of a token. '
      + 'int8, int4 and int2: whole numbers of 8, 4 and 2 bits, a scale for each token and head; int2 has only \u22121, 0 and 1. int4c, and likewise int8c and int2c: a scale for each channel over a group of 32 tokens; int4c(8) over 8.'],
    ['Logit drift', 'How far the model\u2019s scores for the next token move: the root of the summed squared differences over the root of the summed squares, against the same model with an f32 cache. Centred: after each row\u2019s mean is taken off both.'],
    ['Largest difference', 'The largest change of a single score (a logit), of all scores of all predictions.'],
    ['Unchanged, mean KL', 'Predictions whose most likely token stays the same; and how much information the quantised distribution loses on average, in nats: 1 nat is 1.44 bits, 0 means that nothing changed.'],
    ['Outlier factor', 'Channel 3 of each head of K times this and of q divided by it: full precision does not see it.'],
    ['Software driver', 'A program that does a GPU\u2019s work on the CPU, such as llvmpipe. It computes the same numbers; its times say nothing about a GPU.'],
  ];
  $('terms').replaceChildren(...terms.map(([name, text]) => el('div', {}, el('dt', { text: name }), el('dd', { text }))));
}

const THEMES = ['system', 'light', 'dark'];

function startTheme() {
  let theme = 0;
  $('theme').addEventListener('click', () => {
    theme = (theme + 1) % THEMES.length;
    if (theme === 0) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = THEMES[theme];
    $('theme').textContent = `Theme: ${THEMES[theme]}`;
    redraw();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
}

function startSaving() {
  $('save').addEventListener('click', () => {
    const link = el('a', { download: 'kvpack-report.json' });
    link.href = URL.createObjectURL(new Blob([$('data').textContent], { type: 'application/json' }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

measuredFacts();
drawTable();
startPlayer();
choose();
drawSentences();
startLayouts();
startBench();
drawTerms();
startTheme();
startSaving();
drawers.push(drawScatter, drawStep, drawLayers);
redraw();
{
  // Drawn again where the width changes, not where only the height does.
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    requestAnimationFrame(redraw);
  }).observe(document.body);
}
