//! The case of a pair: two sequences are quantised into shuffled, poisoned pages, read back, and attended to.

use super::super::modules::{Choice, Phase, plain};
use super::side_rows::{SideRows, float_words, list, rows_buffer};
use super::twist::{Lie, Twist};
use super::{Case, NumberType, POISON, Param, Sequence};
use crate::error::{Error, Result};
use crate::kernels::FloatType;
use crate::reference::{self, AttentionShape, Partials};
use crate::spec::Pair;
use crate::validate::attention::{Plain, output_rounding};
use crate::validate::{Random, formulas};
use crate::variant::Arithmetic;
use crate::work::{Merge, Status, TableEntry, WorkItem};

/// Query tokens of a sequence in prefill.
const PREFILL_QUERIES: u32 = 5;
/// Tokens of the shorter sequence.
const SHORT: u32 = 5;

pub(super) fn case(choice: &Choice, pair: Pair, phase: Phase, tokens: u32) -> Result<Case> {
    // The page that measures takes whole pages from decode.
    let twist = Twist {
        halves: phase == Phase::Prefill,
        ..Twist::default()
    };
    twisted(choice, pair, phase, tokens, &twist)
}

/// The same with every option, or at the edges of what attention takes.
pub(super) fn twisted(choice: &Choice, pair: Pair, phase: Phase, tokens: u32, twist: &Twist) -> Result<Case> {
    let shape = &choice.shape;
    if tokens == 0 || tokens > 1 << 16 {
        return Err(Error::Shape {
            what: "tokens of golden vectors",
            value: u64::from(tokens),
            limit: "1 to 65536".to_owned(),
            advice: "some pages are enough to see all that a kernel does".to_owned(),
        });
    }
    let mut lengths = vec![tokens, SHORT.min(tokens)];
    if twist.empty {
        lengths.push(0);
    }
    let mut random = Random::new(u64::from(tokens) << 32 | u64::from(shape.k_head_dim));
    let mut sequences = Vec::new();
    let (mut first_row, mut first_query) = (0, 0);
    for &tokens in &lengths {
        let queries = match phase {
            Phase::Decode => 1,
            Phase::Prefill => PREFILL_QUERIES.min(tokens),
        };
        sequences.push(Sequence {
            tokens,
            queries,
            first_row,
            first_query,
            ..Sequence::default()
        });
        first_row += tokens;
        first_query += queries;
    }
    let ending = match twist.name {
        "" => phase.to_string(),
        name => name.to_owned(),
    };
    let beside = match twist.name {
        "options" => {
            "; window, soft cap, scale and sinks, rows with gaps, ranges of half a page, output rows in reverse, no LSE"
        }
        "edges" => {
            "; large scores, a third sequence without a token, ranges of half a page, output rows in reverse"
        }
        _ => "",
    };
    let mut case = Case::new(
        format!("attention-{}-{}-{ending}", plain(pair.k), plain(pair.v)),
        format!(
            "K in {} and V in {}: rows are packed into pages, read back, and attended to ({phase}), in two sequences of {} and \
             {} tokens{beside}",
            pair.k, pair.v, lengths[0], lengths[1]
        ),
    );
    case.pair = Some(pair.to_string());
    // The page that measures takes cases by their phase: plain ones.
    case.phase = twist.name.is_empty().then(|| phase.to_string());

    let mut k = SideRows::new(choice, pair.k, false, &lengths, (twist, &mut random))?;
    let mut v = SideRows::new(choice, pair.v, true, &lengths, (twist, &mut random))?;
    for (i, sequence) in sequences.iter_mut().enumerate() {
        let [k, v] = [&k, &v].map(|side| side.places[i].clone());
        (sequence.k_pages, sequence.k_waiting, sequence.k_packed) = (k.pages, k.waiting, k.packed);
        (sequence.v_pages, sequence.v_waiting, sequence.v_packed) = (v.pages, v.waiting, v.packed);
    }
    let mut status = Status::default();
    case.filled(
        "tensor_scales",
        NumberType::F32,
        &[4],
        "[side]",
        "per-tensor scales of K and V, where there are any",
        0,
    );
    case.filled(
        "status",
        NumberType::U32,
        &[4],
        "[count]",
        "inputs that were not finite, inputs that were saturated; two words that stay",
        0,
    );
    for side in [&mut k, &mut v] {
        side.pack(choice, &mut case, &sequences, &mut status)?;
    }
    let mut scales = [0_u32; 4];
    for side in [&k, &v] {
        scales[side.place as usize] = side.tensor_scale.to_bits();
    }
    if scales != [0; 4] {
        let what = "per-tensor scales, made from the largest magnitudes";
        case.bits(
            "tensor_scales",
            &["amax", "tensor_scale"],
            what,
            scales.to_vec(),
            Vec::new(),
        );
    }
    let counts = vec![status.non_finite, status.saturated, 0, 0];
    let packers = [&k, &v].map(SideRows::packer);
    case.bits("status", &packers, "what packing counted", counts, Vec::new());
    attend(
        choice,
        &mut case,
        [&k, &v],
        &sequences,
        phase,
        (twist, &mut random),
    )?;
    case.sequences = sequences;
    Ok(case)
}

fn attend(
    choice: &Choice,
    case: &mut Case,
    [k, v]: [&SideRows; 2],
    sequences: &[Sequence],
    phase: Phase,
    (twist, random): (&Twist, &mut Random),
) -> Result<()> {
    let shape = &choice.shape;
    let (q_heads, q_dim, v_dim) = (shape.q_heads, shape.k_head_dim, shape.v_head_dim);
    let rows: u32 = sequences.iter().map(|s| s.queries).sum();
    let mut kinds = Vec::new();
    for (k_side, v_side) in choice.kinds(Pair { k: k.side, v: v.side }) {
        let module =
            choice.attention_split(&shape.page(k_side, false)?, &shape.page(v_side, true)?, phase)?;
        kinds.push(Kind {
            waits: [k_side != k.side, v_side != v.side],
            module,
            items: Vec::new(),
            table: Vec::new(),
        });
    }
    let tile = kinds
        .iter()
        .filter_map(|kind| kind.module.variant)
        .map(|v| v.token_tile)
        .min();
    let (merges, partials) = plan(&mut kinds, [k, v], sequences, (tile.unwrap_or(1), q_heads), twist)?;
    kinds.retain(|kind| !kind.items.is_empty());

    let arithmetic = kinds
        .iter()
        .filter_map(|kind| kind.module.variant)
        .map(|v| v.arithmetic);
    let arithmetic = arithmetic.fold(
        Arithmetic::F32,
        |known, a| if a == Arithmetic::F32 { known } else { a },
    );
    let factor = twist.factor.unwrap_or(1.0);
    let q: Vec<f32> = (0..rows * q_heads * q_dim)
        .map(|_| random.normal() * factor)
        .collect();
    let lie = Lie::new(q_heads, q_dim, twist.gaps);
    rows_buffer(case, "q", "queries", &q, (lie, choice.queries));
    let q: Vec<f32> = q
        .iter()
        .map(|&x| formulas::rounded(x, choice.queries) as f32)
        .collect();
    let heads = q.chunks(q_dim as usize);
    let q: Vec<f32> = heads.flat_map(|row| arithmetic.round_query(row)).collect();

    let what = "weighted sums of values of each partial";
    case.filled(
        "partial_o",
        NumberType::F32,
        &[partials, v_dim],
        "[partial, channel]",
        what,
        POISON,
    );
    let what = "largest score, and sum of exp(score - largest), of each partial";
    case.filled(
        "partial_ml",
        NumberType::F32,
        &[partials, 2],
        "[partial, (m, l)]",
        what,
        POISON,
    );
    list(
        case,
        "merges",
        &merges,
        "[query token, (first partial, stride, partials, output row)]",
        "what to combine",
    );
    let options = twist.options.map_sinks(Vec::as_slice);
    match options.sinks {
        Some(sinks) => {
            let words = float_words(sinks, FloatType::F32).1;
            let what = "a score without a value for each query head";
            case.data("sinks", NumberType::F32, &[q_heads], "[query head]", what, words);
        }
        None => {
            let what = "not read: there are no sinks";
            case.filled("sinks", NumberType::F32, &[q_heads], "[query head]", what, 0);
        }
    }
    let output = match choice.outputs {
        FloatType::F32 => NumberType::F32,
        FloatType::F16 => NumberType::F16,
    };
    case.filled(
        "output",
        output,
        &[rows, q_heads, v_dim],
        "[query token, query head, channel]",
        "outputs",
        POISON,
    );
    let what = "log of the sum of exp(score)";
    case.filled(
        "lse",
        NumberType::F32,
        &[rows, q_heads],
        "[query token, query head]",
        what,
        POISON,
    );

    let mut reference_partials = Partials::new(partials as usize, v_dim);
    let wide: Vec<f64> = q.iter().map(|&x| f64::from(x)).collect();
    for kind in &kinds {
        let pick = |side: &SideRows, waits: bool| match (waits, side.waiting) {
            (true, Some(waiting)) => (waiting, side.buffer("waiting")),
            _ => (side.page, side.buffer("pages")),
        };
        let ((k_page, k_buffer), (v_page, v_buffer)) = (pick(k, kind.waits[0]), pick(v, kind.waits[1]));
        let suffix = match kind.waits {
            [false, false] => "",
            [true, false] => "_k_waiting",
            [false, true] => "_v_waiting",
            [true, true] => "_waiting",
        };
        let (items, table) = (format!("items{suffix}"), format!("page_table{suffix}"));
        let axes = "[item, (table entry, pages, position of slot 0, query token, query tokens, their position, partial)]";
        list(
            case,
            &items,
            &kind.items,
            axes,
            "ranges of pages with the query tokens that attend to them",
        );
        list(
            case,
            &table,
            &kind.table,
            "[entry, (K page, V page, first live slot, end)]",
            "pages of the items",
        );
        let reach = options.reach();
        let params = [
            ("items", Param::U32(kind.items.len() as u32)),
            ("q_heads", Param::U32(q_heads)),
            ("scale", Param::F32(options.score_scale(q_dim) as f32)),
            ("k_tensor", Param::U32(k.place)),
            ("v_tensor", Param::U32(v.place)),
            ("back", Param::U32(reach.back)),
            ("ahead", Param::U32(reach.ahead)),
            ("softcap", Param::F32(options.softcap.unwrap_or(0.0))),
            ("q_offset", Param::U32(lie.offset / 4)),
            ("q_row", Param::U32(lie.row / 4)),
            ("q_head", Param::U32(lie.head / 4)),
            ("k_turns", Param::U32(0)),
        ];
        let bindings = [
            ("items", items.as_str()),
            ("page_table", table.as_str()),
            ("q", "q"),
            ("k_pages", k_buffer.as_str()),
            ("v_pages", v_buffer.as_str()),
            ("tensor_scales", "tensor_scales"),
            ("partial_o", "partial_o"),
            ("partial_ml", "partial_ml"),
        ];
        case.step(&kind.module, &params, &bindings)?;
        let shape = AttentionShape {
            k: k_page,
            v: v_page,
            q_heads,
            options,
            k_tensor_scale: k.tensor_scale,
            v_tensor_scale: v.tensor_scale,
            key_rotation: None,
        };
        let words = |side: &SideRows, waits: bool| match waits {
            true => side.waiting_pool.clone(),
            false => side.pool.clone(),
        };
        let (k_words, v_words) = (words(k, kind.waits[0]), words(v, kind.waits[1]));
        let lists = (&kind.items, &kind.table);
        reference::attention_split(
            &shape,
            lists.0,
            lists.1,
            &wide,
            &k_words,
            &v_words,
            &mut reference_partials,
        );
    }
    let params = [
        ("rows", Param::U32(rows * q_heads)),
        ("q_heads", Param::U32(q_heads)),
        ("sinks", Param::U32(u32::from(options.sinks.is_some()))),
        ("lse", Param::U32(u32::from(!twist.no_lse))),
    ];
    let bindings = ["merges", "partial_o", "partial_ml", "output", "lse", "sinks"].map(|name| (name, name));
    case.step(&choice.attention_merge(), &params, &bindings)?;

    let mut outputs = vec![0.0; (rows * q_heads * v_dim) as usize];
    let mut lse = vec![0.0; (rows * q_heads) as usize];
    reference::attention_merge(
        &merges,
        q_heads,
        v_dim,
        options.sinks,
        &reference_partials,
        &mut outputs,
        &mut lse,
    );
    let mut judged = vec![[0.0; 2]; outputs.len()];
    let mut judged_lse = vec![[0.0; 2]; lse.len()];
    for sequence in sequences {
        for query in 0..sequence.queries {
            let own = sequence.tokens.saturating_sub(sequence.queries) + query;
            let first = options
                .window
                .map_or(0, |window| (own + 1).saturating_sub(window));
            let seen = sequence.first_row + first..sequence.first_row + (own + 1).min(sequence.tokens);
            let row = sequence.first_query + query;
            for head in 0..q_heads {
                let kv_head = head / (q_heads / shape.kv_heads);
                let of = |token| (k.head(token, kv_head), v.head(token, kv_head));
                let pairs: Vec<_> = seen.clone().map(of).collect();
                let q = &q[((row * q_heads + head) * q_dim) as usize..][..q_dim as usize];
                let sink = options.sinks.map(|sinks| sinks[head as usize]);
                let mut plain = Plain::new(q, &pairs, (&options, sink), (arithmetic, v_dim));
                if twist.factor.is_some() {
                    plain.large_scores(q, &pairs, options.score_scale(q_dim));
                }
                let at = (output_row(row, rows, twist) * q_heads + head) as usize;
                let wanted = &outputs[at * v_dim as usize..][..v_dim as usize];
                let bound = plain.bound(wanted);
                for (judged, &w) in judged[at * v_dim as usize..].iter_mut().zip(wanted) {
                    *judged = [w, bound + output_rounding(choice.outputs, w)];
                }
                // An infinity must be met as it is; bounds are numbers.
                let bound = if lse[at].is_finite() {
                    plain.lse_bound(lse[at])
                } else {
                    0.0
                };
                judged_lse[at] = [lse[at], bound];
            }
        }
    }
    let kernels = ["attention_split", "attention_merge"];
    let what = "attention in f64 over the same pages; bound: twice the error of plain f32 attention + 4e-6 x the largest value";
    case.bound("output", &kernels, what, &judged);
    if twist.no_lse {
        let untouched = vec![POISON; judged_lse.len()];
        case.bits(
            "lse",
            &kernels[1..],
            "not asked for, so that nothing is written",
            untouched,
            Vec::new(),
        );
    } else {
        case.bound(
            "lse",
            &kernels,
            "log of the sum of exp(score), in f64",
            &judged_lse,
        );
    }
    Ok(())
}

/// The output row of a query.
fn output_row(query: u32, rows: u32, twist: &Twist) -> u32 {
    if twist.reverse { rows - 1 - query } else { query }
}

/// Ranges of one kind: packed, or waiting on either side.
struct Kind {
    waits: [bool; 2],
    module: super::super::modules::Module,
    items: Vec<WorkItem>,
    table: Vec<TableEntry>,
}

/// Cuts every sequence into ranges of one kind and at most a page, in token order; the merges and the number of partials.
fn plan(
    kinds: &mut [Kind],
    [k, v]: [&SideRows; 2],
    sequences: &[Sequence],
    (tile, q_heads): (u32, u32),
    twist: &Twist,
) -> Result<(Vec<Merge>, u32)> {
    let (mut merges, mut partials) = (Vec::new(), 0);
    let page = k.page.tokens;
    let range = if twist.halves { page / 2 } else { page };
    let rows = sequences.iter().map(|sequence| sequence.queries).sum();
    for (i, sequence) in sequences.iter().enumerate() {
        let packed = [k.places[i].packed, v.places[i].packed];
        let first_position = sequence.tokens.saturating_sub(sequence.queries);
        for first in (0..sequence.queries).step_by(tile as usize) {
            let queries = tile.min(sequence.queries - first);
            let (base, stride) = (partials, queries * q_heads);
            let mut count = 0;
            let mut start = 0;
            while start < sequence.tokens {
                let ends = [packed[0], packed[1], (start / range + 1) * range];
                let end = ends
                    .into_iter()
                    .filter(|&end| end > start)
                    .fold(sequence.tokens, u32::min);
                let waits = [packed[0] <= start, packed[1] <= start];
                let kind = kinds
                    .iter_mut()
                    .find(|kind| kind.waits == waits)
                    .ok_or_else(|| Error::Usage {
                        asked: "golden vectors for these sides".to_owned(),
                        reason: "no kind of range has both as they wait here".to_owned(),
                        advice: "this is a fault of the exporter".to_owned(),
                    })?;
                let place = (start / page) as usize;
                let id = |side: &SideRows, waits: bool| match waits {
                    true => side.places[i].waiting[place],
                    false => side.places[i].pages[place],
                };
                kind.items.push(WorkItem {
                    table: kind.table.len() as u32,
                    pages: 1,
                    position: start / page * page,
                    query: sequence.first_query + first,
                    queries,
                    query_position: first_position + first,
                    partial: base + count * stride,
                });
                kind.table.push(TableEntry {
                    k_page: id(k, waits[0]),
                    v_page: id(v, waits[1]),
                    first: start % page,
                    last: (end - 1) % page + 1,
                });
                count += 1;
                start = end;
            }
            partials += count * stride;
            merges.extend((0..queries).map(|t| Merge {
                first: base + t * q_heads,
                stride,
                count,
                row: output_row(sequence.first_query + first + t, rows, twist),
            }));
        }
    }
    Ok((merges, partials))
}
