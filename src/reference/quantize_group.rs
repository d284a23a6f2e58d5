use super::{count, finite_magnitude, put};
use crate::pages::PageLayout;
use crate::work::{SlotRun, Status};

/// Closes token groups of a per-channel side: each run names a page, the first slot of a group, how many slots at the
/// group's end are packed, and the page in which their rows wait. `source(run, i, head, channel)` is the number for slot
/// `run.slot + i`; it is not asked for slots before those, whose codes are 0.
pub fn quantize_group(
    layout: &PageLayout,
    runs: &[SlotRun],
    source: impl Fn(&SlotRun, u32, u32, u32) -> f32,
    pages: &mut [u32],
    status: &mut Status,
) {
    let group = layout.side.layout.token_group();
    for run in runs {
        let page = &mut pages[layout.range(run.page)];
        for head in 0..layout.heads {
            for channel in 0..layout.head_dim {
                let sinks = group - run.count;
                let number = |i| {
                    if i < sinks {
                        0.0
                    } else {
                        source(run, i, head, channel)
                    }
                };
                let numbers: Vec<f32> = (0..group).map(number).collect();
                let amax = numbers.iter().map(|&x| finite_magnitude(x)).fold(0.0, f32::max);
                let stored = layout.side.scale.from_amax(amax, layout.side.element.info().max);
                status.saturated += u32::from(stored.clamped);
                if let Some(at) = layout.scale_at(run.slot, head, channel) {
                    put(page, at, layout.side.scale.bits(), stored.bits);
                }
                for (slot, &x) in (run.slot..).zip(&numbers) {
                    let encoded = layout.side.element.encode(x, stored.value);
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
