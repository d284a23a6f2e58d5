use crate::pages::PageLayout;
use crate::work::SlotRun;

/// Pages back into f32 rows, `[token][head][channel]`; a run's `source` is its first row in `rows`.
pub fn dequantize(layout: &PageLayout, runs: &[SlotRun], tensor_scale: f32, pages: &[u32], rows: &mut [f32]) {
    let row_len = (layout.heads * layout.head_dim) as usize;
    for run in runs {
        let page = &pages[layout.range(run.page)];
        for i in 0..run.count {
            let row = &mut rows[(run.source + i) as usize * row_len..][..row_len];
            for (c, x) in (0..).zip(row) {
                *x = layout.number(
                    page,
                    run.slot + i,
                    c / layout.head_dim,
                    c % layout.head_dim,
                    tensor_scale,
                );
            }
        }
    }
}
