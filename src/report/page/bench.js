// Times and bandwidths of a benchmark as bars.

function seconds(value) {
  if (value < 1e-3) return `${trimmed(value * 1e6, value < 1e-5 ? 2 : 1)} \u00b5s`;
  return value < 1 ? `${trimmed(value * 1e3, 2)} ms` : `${trimmed(value, 2)} s`;
}

function startBench() {
  if (!DATA.bench) return;
  $('bench').hidden = false;
  const { header, roofs, rows: all } = DATA.bench;
  const kind = header.software ? ', a software driver: these are the times of a CPU' : '';
  $('bench-intro').textContent = readable(`Measured by kvpack bench on ${header.adapter} (${header.backend}, ${header.driver})${kind}. ${header.shape}, ${header.batch} `
    + `${header.batch === 1 ? 'sequence' : 'sequences'}. Times are of one layer: the median, with a line from the lower to the upper quartile.`);
  const roof = Math.max(0, ...roofs.map((r) => r.gb_per_s));
  const groups = new Map();
  for (const row of all) {
    const name = `${row.work}, ${whole(row.context)} tokens${row.new_tokens > 1 ? `, ${whole(row.new_tokens)} of them new` : ''}`;
    groups.set(name, [...(groups.get(name) ?? []), row]);
  }
  for (const [name, list] of groups) {
    const slowest = Math.max(...list.map((row) => row.seconds_high));
    const quickest = Math.max(roof, ...list.map((row) => row.gb_per_s));
    const times = el('div', { class: 'bars' });
    const rates = el('div', { class: 'bars' });
    for (const row of list) {
      const track = bar(row.seconds / slowest, row.above_roof || row.cache_resident);
      const spread = el('span', { class: 'spread' });
      spread.style.left = `${row.seconds_low / slowest * 100}%`;
      spread.style.width = `${(row.seconds_high - row.seconds_low) / slowest * 100}%`;
      track.append(spread);
      times.append(el('span', { text: row.pair }), track, el('span', { class: 'share', text: seconds(row.seconds) + (row.speed_up ? ` \u00b7 ${trimmed(row.speed_up, 2)}\u00d7` : '') }));
      const rate = bar(row.gb_per_s / quickest, row.above_roof || row.cache_resident);
      if (roof > 0) {
        const line = el('span', { class: 'roof' });
        line.style.left = `${roof / quickest * 100}%`;
        rate.append(line);
      }
      rates.append(el('span', { text: row.pair }), rate, el('span', { class: 'share', text: `${digits(row.gb_per_s)} GB/s` }));
      const doubt = row.above_roof ? 'faster than a plain read, so it is not believed' : row.cache_resident ? 'read from a cache in part, not from memory' : null;
      if (doubt) rates.append(el('span', { class: 'remark', text: `${row.pair}: ${doubt}` }));
    }
    $('bench-bars').append(el('h3', { text: name }), el('div', { class: 'two' },
      el('div', {}, el('h4', { text: list.some((row) => row.speed_up) ? 'Time, and how many times as fast as f16' : 'Time' }), times),
      el('div', {}, el('h4', { text: roof > 0 ? `Codes and scales read; the line is the read roof, ${digits(roof)} GB/s` : 'Codes and scales' }), rates)));
  }
}

function bar(share, doubt) {
  const fill = el('span', { class: 'fill' });
  fill.style.width = `${Math.min(1, share) * 100}%`;
  return el('div', { class: doubt ? 'track doubt' : 'track', 'aria-hidden': 'true' }, fill);
}
