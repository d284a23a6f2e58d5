//! The case of a side: rows as bad as they come are packed and read back.

use super::super::modules::Choice;
use super::side_rows::{RUN, float_words, list, mask_padding};
use super::{Case, NumberType, POISON, Param};
use crate::error::Result;
use crate::kernels::FloatType;
use crate::pages::PageLayout;
use crate::reference;
use crate::scales::ScaleLayout;
use crate::spec::Side;
use crate::validate::nasty_rows;
use crate::work::{SlotRun, Status, slot_runs};

/// The scale of per-tensor sides.
const TENSOR_SCALE: f32 = 0.0123;

pub(super) fn case(choice: &Choice, side: Side, value: bool) -> Result<Case> {
    let page = choice.shape.page(side, value)?;
    let (tokens, row) = (page.tokens, page.heads * page.head_dim);
    let group = side.layout.token_group();
    // Groups are packed whole; other sides end in the middle of four slots that share words of scales.
    let live = 2 * tokens - if group > 1 { 0 } else { 3 };
    let name = format!("pages-{}", choice.side_name(&page));
    let mut case = Case::new(
        name,
        format!(
            "rows with NaN, infinities, ties, outliers, zeros and subnormal numbers into pages of {side}, and back"
        ),
    );
    let rows: Vec<f32> = nasty_rows(live, row, u64::from(page.head_dim))
        .into_iter()
        // By itself, not through f64: the bits of a NaN stay what they are.
        .map(|x| match choice.rows {
            FloatType::F32 => x,
            FloatType::F16 => half::f16::from_f32(x).to_f32(),
        })
        .collect();
    let axes = "[token, head, channel]";
    let (kind, words) = float_words(&rows, choice.rows);
    case.data(
        "source",
        kind,
        &[live, page.heads, page.head_dim],
        axes,
        "new rows",
        words,
    );
    let scales = match side.layout {
        ScaleLayout::PerTensor => TENSOR_SCALE,
        _ => 0.0,
    };
    let words = vec![scales.to_bits(), 0, 0, 0];
    case.data(
        "tensor_scales",
        NumberType::F32,
        &[4],
        "[side]",
        "per-tensor scale, where there is one",
        words,
    );
    let what = "inputs that were not finite, inputs that were saturated; two words that stay";
    case.filled("status", NumberType::U32, &[4], "[count]", what, 0);

    // Two pages in the wrong order, and one that nothing may touch.
    let ids = [2, 0];
    let count = 3;
    let mut runs = Vec::new();
    for (place, id) in (0..).zip(ids) {
        let start = place * tokens;
        slot_runs(id, 0, (live - start).min(tokens), |slot| start + slot, &mut runs);
    }
    list(
        &mut case,
        "runs",
        &runs,
        RUN,
        "runs of up to four slots of a page, with the row of the first",
    );
    let waiting = (group > 1)
        .then(|| choice.shape.page(Side::F16, value))
        .transpose()?;
    let (first_page, first_pool) = match &waiting {
        Some(waiting) => (*waiting, "waiting"),
        None => (page, "pages"),
    };
    case.pages(first_pool, &first_page, count);
    let runs_param = |runs: &[SlotRun]| ("runs", Param::U32(runs.len() as u32));
    let params = [
        runs_param(&runs),
        ("row_offset", Param::U32(0)),
        ("row_stride", Param::U32(row)),
        ("head_stride", Param::U32(page.head_dim)),
        ("side_tensor", Param::U32(0)),
    ];
    let mut bindings = vec![
        ("source", "source"),
        ("runs", "runs"),
        ("tensor_scales", "tensor_scales"),
        ("pages", first_pool),
        ("status", "status"),
    ];
    case.step(&choice.quantize(&first_page), &params, &bindings)?;
    let mut status = Status::default();
    let mut first = vec![POISON; (first_page.words * count) as usize];
    let number = |run: &SlotRun, i: u32, head: u32, channel: u32| {
        rows[((run.source + i) * row + head * page.head_dim + channel) as usize]
    };
    reference::quantize(&first_page, &runs, number, scales, &mut first, &mut status);
    let mut pool = first.clone();
    if let Some(waiting) = &waiting {
        case.pages("pages", &page, count);
        let group_runs = |id| {
            let firsts = (0..tokens).step_by(group as usize);
            firsts.map(move |slot| SlotRun {
                page: id,
                slot,
                count: group,
                source: id,
            })
        };
        let groups: Vec<SlotRun> = ids.into_iter().flat_map(group_runs).collect();
        list(
            &mut case,
            "groups",
            &groups,
            RUN,
            "groups of slots of a page, with the page in which their rows wait",
        );
        let zeros =
            ["row_offset", "row_stride", "head_stride", "side_tensor"].map(|field| (field, Param::U32(0)));
        let params = [&zeros[..], &[runs_param(&groups)]].concat();
        bindings = vec![
            ("source", "waiting"),
            ("runs", "groups"),
            ("pages", "pages"),
            ("status", "status"),
        ];
        case.step(&choice.quantize_group(&page, waiting), &params, &bindings)?;
        pool = vec![POISON; (page.words * count) as usize];
        let number = |run: &SlotRun, i: u32, head: u32, channel: u32| {
            waiting.number(
                &first[waiting.range(run.source)],
                run.slot + i,
                head,
                channel,
                1.0,
            )
        };
        reference::quantize_group(&page, &groups, number, &mut pool, &mut status);
    }
    case.filled(
        "rows",
        NumberType::F32,
        &[live, page.heads, page.head_dim],
        axes,
        "rows read back",
        POISON,
    );
    let params = [runs_param(&runs), ("side_tensor", Param::U32(0))];
    let bindings = [
        ("side_pages", "pages"),
        ("runs", "runs"),
        ("tensor_scales", "tensor_scales"),
        ("rows", "rows"),
    ];
    case.step(&choice.dequantize(&page), &params, &bindings)?;
    let mut back = vec![0.0; rows.len()];
    reference::dequantize(&page, &runs, scales, &pool, &mut back);

    let counted = |page: &PageLayout| {
        let mut counted = vec![u32::MAX; (page.words * count) as usize];
        for (place, id) in (0..).zip(ids) {
            let live = (live - place * tokens).min(tokens);
            mask_padding(page, live, &mut counted[page.range(id)]);
        }
        counted
    };
    let packer = if group > 1 { "quantize_group" } else { "quantize" };
    if waiting.is_some() {
        case.bits(
            "waiting",
            &["quantize"],
            "rows that wait, in f16",
            first,
            counted(&first_page),
        );
    }
    case.bits(
        "pages",
        &[packer],
        "pages: dead slots untouched",
        pool,
        counted(&page),
    );
    let counts = vec![status.non_finite, status.saturated, 0, 0];
    case.bits(
        "status",
        &["quantize", packer],
        "what packing counted",
        counts,
        Vec::new(),
    );
    let back = back.iter().map(|x| x.to_bits()).collect();
    case.bits(
        "rows",
        &["dequantize"],
        "code x scale, one f32 multiply",
        back,
        Vec::new(),
    );
    if packer == "quantize"
        && let Some(expect) = case.expect.iter_mut().find(|expect| expect.name == "status")
    {
        expect.kernels = vec![packer.to_owned()];
    }
    Ok(case)
}
