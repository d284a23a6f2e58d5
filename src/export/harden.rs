//! What a kernel of another hand must withstand beyond a case as it stands: a dispatch folded into y with workgroups to
//! spare, lists that go on behind their end, and runs in another order.

use super::cases::Case;

/// Entries behind the end of a list.
const DECOYS: usize = 64;

/// Turns the runs round, and lets every work list go on behind its end with entries that spoil what the first ones made.
/// The counts in the uniforms stay as they are.
pub(super) fn lists(case: &mut Case) {
    for step in &case.steps {
        for (binding, width) in [("runs", 4), ("items", 7), ("merges", 4)] {
            let Some(name) = step.bindings.get(binding) else {
                continue;
            };
            let Some(buffer) = case.buffers.iter_mut().find(|buffer| buffer.name == *name) else {
                continue;
            };
            if buffer
                .shape
                .first()
                .is_none_or(|&n| (n as usize * width) != buffer.words.len())
            {
                // Lengthened already, for another step.
                continue;
            }
            let mut entries: Vec<Vec<u32>> = buffer.words.chunks(width).map(<[u32]>::to_vec).collect();
            let (Some(first), Some(last)) = (entries.first().cloned(), entries.last().cloned()) else {
                continue;
            };
            let decoy = match binding {
                // The first slots with the last row, and the first row from the last slots.
                "runs" => {
                    entries.reverse();
                    [
                        vec![first[0], first[1], 4, last[3]],
                        vec![last[0], last[1] / 4 * 4, 4, first[3]],
                    ]
                }
                // Nothing is seen.
                "items" => {
                    let mut none = first.clone();
                    none[1] = 0;
                    [none.clone(), none]
                }
                _ => {
                    let none = vec![first[0], first[1], 0, first[3]];
                    [none.clone(), none]
                }
            };
            entries.extend((0..DECOYS).map(|i| decoy[i % 2].clone()));
            buffer.words = entries.concat();
        }
    }
}

/// Folds the dispatches of some modules into two rows, with a workgroup to spare where their number is odd.
pub(super) fn fold(case: &mut Case, modules: &[String]) {
    for step in case
        .steps
        .iter_mut()
        .filter(|step| modules.contains(&step.module))
    {
        let [x, y, z] = step.workgroups;
        if x > 0 && y == 1 {
            step.workgroups = [x.div_ceil(2), 2, z];
        }
    }
}
