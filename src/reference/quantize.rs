use super::{count, finite_magnitude, put};
use crate::pages::PageLayout;
use crate::scales::{BLOCK_CHANNELS, ScaleLayout};
use crate::work::{SlotRun, Status};

/// New rows into packed pages, for sides whose scale belongs to one token (or to none). `source(run, i, head, channel)`
/// is the number for slot `run.slot + i`; `pages` are the pool's words.
pub fn quantize(
    layout: &PageLayout,
    runs: &[SlotRun],
    source: impl Fn(&SlotRun, u32, u32, u32) -> f32,
    tensor_scale: f32,
    pages: &mut [u32],
    status: &mut Status,
) {
    let channels = match layout.side.layout {
        ScaleLayout::PerBlock => BLOCK_CHANNELS,
        _ => layout.head_dim,
    };
    for run in runs {
        let page = &mut pages[layout.range(run.page)];
        for i in 0..run.count {
            let slot = run.slot + i;
            for unit in 0..layout.heads * layout.head_dim / channels {
                let numbers: Vec<(u32, u32, f32)> = (unit * channels..(unit + 1) * channels)
                    .map(|c| (c / layout.head_dim, c % layout.head_dim))
                    .map(|(head, channel)| (head, channel, source(run, i, head, channel)))
                    .collect();
                let mut scale = if layout.side.layout == ScaleLayout::PerTensor {
                    tensor_scale
                } else {
                    1.0
                };
                if let Some(at) = layout.scale_at(slot, numbers[0].0, numbers[0].1) {
                    let amax = numbers.iter().map(|n| finite_magnitude(n.2)).fold(0.0, f32::max);
                    let stored = layout.side.scale.from_amax(amax, layout.side.element.info().max);
                    put(page, at, layout.side.scale.bits(), stored.bits);
                    status.saturated += u32::from(stored.clamped);
                    scale = stored.value;
                }
                for (head, channel, x) in numbers {
                    let encoded = layout.side.element.encode(x, scale);
                    put(
                        page,
                        layout.code_at(slot, head, channel),
                        layout.side.element.bits(),
                        encoded.code,
                    );
                    count(status, encoded);
                }
            }
        }
    }
}
