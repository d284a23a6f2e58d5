//! The case of a pair: two sequences are quantised into shuffled, poisoned pages, read back, and attended to.

use super::super::geometry::Geometry;
use super::super::modules::{Choice, Phase};
use super::{Case, NumberType, POISON, Param, Sequence};
use crate::error::{Error, Result};
use crate::kernels::FloatType;
use crate::options::AttentionOptions;
use crate::pages::PageLayout;
use crate::reference::{self, AttentionShape, Partials};
use crate::scales::ScaleLayout;
use crate::spec::{Pair, Side};
use crate::validate::Random;
use crate::validate::attention::{Plain, output_rounding};
use crate::variant::Arithmetic;
use crate::work::{Merge, SlotRun, Status, TableEntry, WorkItem, slot_runs};

/// Query tokens of a sequence in prefill.
const PREFILL_QUERIES: u32 = 5;
/// Tokens of the shorter sequence.
const SHORT: u32 = 5;

/// K or V of all sequences.
struct SideRows {
    side: Side,
    /// `k` or `v`.
    name: &'static str,
    page: PageLayout,
    /// Pages in which rows wait, for sides whose rows do.
    waiting: Option<PageLayout>,
    /// `[token][head][channel]`, as the type of rows holds them.
    rows: Vec<f32>,
    /// For each sequence its pages, its waiting pages, and how many tokens are packed.
    places: Vec<(Vec<u32>, Vec<u32>, u32)>,
    tensor_scale: f32,
    pool: Vec<u32>,
    waiting_pool: Vec<u32>,
    /// What the pages hold.
    dequantised: Vec<f32>,
}

pub(super) fn case(choice: &Choice, pair: Pair, phase: Phase, tokens: u32) -> Result<Case> {
    let shape = &choice.shape;
    if tokens == 0 || tokens > 1 << 16 {
        return Err(Error::Shape {
            what: "tokens of golden vectors",
            value: u64::from(tokens),
            limit: "1 to 65536".to_owned(),
            advice: "some pages are enough to see all that a kernel does".to_owned(),
        });
    }
    let lengths = [tokens, SHORT.min(tokens)];
    let mut random = Random::new(u64::from(tokens) << 32 | u64::from(shape.k_head_dim));
    let mut sequences = Vec::new();
    let (mut first_row, mut first_query) = (0, 0);
    for tokens in lengths {
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
    let name = |side: Side| -> String {
        side.to_string()
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .collect()
    };
    let mut case = Case::new(
        format!("attention-{}-{}-{phase}", name(pair.k), name(pair.v)),
        format!(
            "K in {} and V in {}: rows are packed into pages, read back, and attended to ({phase}), in two sequences of {} and \
             {} tokens",
            pair.k, pair.v, lengths[0], lengths[1]
        ),
    );
    case.pair = Some(pair.to_string());
    case.phase = Some(phase.to_string());

    let mut k = SideRows::new(choice, pair.k, false, &lengths, &mut random)?;
    let mut v = SideRows::new(choice, pair.v, true, &lengths, &mut random)?;
    for (i, sequence) in sequences.iter_mut().enumerate() {
        (sequence.k_pages, sequence.k_waiting, sequence.k_packed) = k.places[i].clone();
        (sequence.v_pages, sequence.v_waiting, sequence.v_packed) = v.places[i].clone();
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
    let scales = [k.tensor_scale, v.tensor_scale, 0.0, 0.0].map(f32::to_bits);
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
    attend(choice, &mut case, [&k, &v], &sequences, phase, &mut random)?;
    case.sequences = sequences;
    Ok(case)
}

impl SideRows {
    fn new(
        choice: &Choice,
        side: Side,
        value: bool,
        lengths: &[u32],
        random: &mut Random,
    ) -> Result<SideRows> {
        let page = choice.shape.page(side, value)?;
        let row = (page.heads * page.head_dim) as usize;
        let tokens: u32 = lengths.iter().sum();
        // One channel of K is an outlier, as in trained models.
        let outlier = if value { 1.0 } else { 8.0 };
        let rows = (0..tokens as usize * row).map(|i| {
            let x = random.normal()
                * if i % page.head_dim as usize == 3 {
                    outlier
                } else {
                    1.0
                };
            match choice.rows {
                FloatType::F32 => x,
                FloatType::F16 => half::f16::from_f32(x).to_f32(),
            }
        });
        let rows: Vec<f32> = rows.collect();
        // One page more than is needed: nothing may touch it.
        let count = lengths.iter().map(|len| len.div_ceil(page.tokens)).sum::<u32>() + 1;
        let waits = side.waits(0);
        let mut orders = [0, 1].map(|_| random.permutation(count));
        let group = side.layout.token_group();
        let places = lengths.iter().map(|&len| {
            let pages = len.div_ceil(page.tokens) as usize;
            let mut take = |order: usize| {
                let left = orders[order].len() - pages;
                orders[order].split_off(left)
            };
            let own = take(0);
            let waiting = if waits { take(1) } else { Vec::new() };
            (own, waiting, if waits { len / group * group } else { len })
        });
        let places = places.collect();
        let waiting = waits.then(|| choice.shape.page(Side::F16, value)).transpose()?;
        let words = |page: &PageLayout| vec![POISON; (page.words * count) as usize];
        Ok(SideRows {
            side,
            name: if value { "v" } else { "k" },
            page,
            tensor_scale: match side.layout {
                ScaleLayout::PerTensor => {
                    reference::tensor_scale(side.element, reference::amax(rows.iter().copied(), 0.0))
                }
                _ => 0.0,
            },
            pool: words(&page),
            waiting_pool: waiting.as_ref().map(words).unwrap_or_default(),
            waiting,
            dequantised: vec![0.0; rows.len()],
            rows,
            places,
        })
    }

    fn packer(&self) -> &'static str {
        match self.waiting {
            Some(_) => "quantize_group",
            None => "quantize",
        }
    }

    fn place(&self) -> u32 {
        u32::from(self.name == "v")
    }

    fn buffer(&self, what: &str) -> String {
        format!("{}_{what}", self.name)
    }

    /// Runs over the tokens [first, last) of each sequence; a run's source is its row.
    fn runs(&self, sequences: &[Sequence], waiting: bool, range: impl Fn(usize) -> [u32; 2]) -> Vec<SlotRun> {
        let mut runs = Vec::new();
        for (i, sequence) in sequences.iter().enumerate() {
            let [first, last] = range(i);
            let ids = if waiting {
                &self.places[i].1
            } else {
                &self.places[i].0
            };
            for (place, &id) in (0..).zip(ids) {
                let start = place * self.page.tokens;
                let [from, to] = [first, last].map(|at| at.clamp(start, start + self.page.tokens) - start);
                slot_runs(id, from, to, |slot| sequence.first_row + start + slot, &mut runs);
            }
        }
        runs
    }

    /// Whole groups of the packed tokens; a run's source is the page in which they wait.
    fn groups(&self) -> Vec<SlotRun> {
        let (group, tokens) = (self.side.layout.token_group(), self.page.tokens);
        let of = |(pages, waiting, packed): &(Vec<u32>, Vec<u32>, u32)| {
            let firsts = (0..*packed).step_by(group as usize);
            let run = |first: u32| SlotRun {
                page: pages[(first / tokens) as usize],
                slot: first % tokens,
                count: group,
                source: waiting[(first / tokens) as usize],
            };
            firsts.map(run).collect::<Vec<_>>()
        };
        self.places.iter().flat_map(of).collect()
    }

    /// Adds all that brings the rows into pages and back, in the case and here.
    fn pack(
        &mut self,
        choice: &Choice,
        case: &mut Case,
        sequences: &[Sequence],
        status: &mut Status,
    ) -> Result<()> {
        let (name, page) = (self.name, self.page);
        let row = page.heads * page.head_dim;
        let tokens = self.rows.len() as u32 / row;
        let what = if name == "k" { "new keys" } else { "new values" };
        let (kind, words) = float_words(&self.rows, choice.rows);
        case.data(
            name,
            kind,
            &[tokens, page.heads, page.head_dim],
            "[token, head, channel]",
            what,
            words,
        );
        let strides = [
            ("row_offset", Param::U32(0)),
            ("row_stride", Param::U32(row)),
            ("head_stride", Param::U32(page.head_dim)),
        ];
        if self.side.layout == ScaleLayout::PerTensor {
            let largest = self.buffer("largest");
            let what = "bits of the largest magnitudes of K and V; tensor_scale takes them and leaves 0";
            case.filled(&largest, NumberType::U32, &[4], "[side]", what, 0);
            let shape = [
                ("tokens", Param::U32(tokens)),
                ("heads", Param::U32(page.heads)),
                ("head_dim", Param::U32(page.head_dim)),
                ("slot", Param::U32(self.place())),
            ];
            let params = [&shape[..], &strides].concat();
            case.step(
                &choice.amax(),
                &params,
                &[("source", name), ("largest", &largest)],
            )?;
            let params = [("first", Param::U32(self.place())), ("slots", Param::U32(1))];
            let bindings = [("largest", largest.as_str()), ("tensor_scales", "tensor_scales")];
            case.step(&choice.tensor_scale(self.side), &params, &bindings)?;
        }
        let all = |i: usize| [0, sequences[i].tokens];
        let packed: Vec<u32> = self.places.iter().map(|place| place.2).collect();

        // New rows into the pages where they stay or wait.
        let (first_page, first_pool) = match self.waiting {
            Some(waiting) => (waiting, self.buffer("waiting")),
            None => (page, self.buffer("pages")),
        };
        let runs = self.runs(sequences, self.waiting.is_some(), all);
        self.pages_buffer(case, &first_pool, &first_page);
        let list_name = self.buffer("runs");
        list(
            case,
            &list_name,
            &runs,
            RUN,
            "runs of up to four slots of a page, with the row of the first",
        );
        let place = [("side_tensor", Param::U32(self.place()))];
        let params = [&strides[..], &place, &[("runs", Param::U32(runs.len() as u32))]].concat();
        let bindings = [
            ("source", name),
            ("runs", list_name.as_str()),
            ("tensor_scales", "tensor_scales"),
            ("pages", first_pool.as_str()),
            ("status", "status"),
        ];
        case.step(&choice.quantize(&first_page), &params, &bindings)?;
        let rows = self.rows.clone();
        let number = move |run: &SlotRun, i: u32, head: u32, channel: u32| {
            rows[((run.source + i) * row + head * page.head_dim + channel) as usize]
        };
        let pool = match self.waiting {
            Some(_) => &mut self.waiting_pool,
            None => &mut self.pool,
        };
        reference::quantize(&first_page, &runs, number, self.tensor_scale, pool, status);

        // Whole groups from there.
        if let Some(waiting) = self.waiting {
            let groups = self.groups();
            let (list_name, pages) = (self.buffer("groups"), self.buffer("pages"));
            self.pages_buffer(case, &pages, &page);
            if !groups.is_empty() {
                let what = "groups of slots of a page, with the page in which their rows wait";
                list(case, &list_name, &groups, RUN, what);
                let zeros =
                    ["row_offset", "row_stride", "head_stride", "side_tensor"].map(|f| (f, Param::U32(0)));
                let params = [&zeros[..], &[("runs", Param::U32(groups.len() as u32))]].concat();
                let bindings = [
                    ("source", first_pool.as_str()),
                    ("runs", list_name.as_str()),
                    ("pages", pages.as_str()),
                    ("status", "status"),
                ];
                case.step(&choice.quantize_group(&page, &waiting), &params, &bindings)?;
            }
            let from = &self.waiting_pool;
            let number = |run: &SlotRun, i: u32, head: u32, channel: u32| {
                waiting.number(&from[waiting.range(run.source)], run.slot + i, head, channel, 1.0)
            };
            reference::quantize_group(&page, &groups, number, &mut self.pool, status);
        }

        // And back into rows.
        let rows_out = self.buffer("rows");
        let what = "rows read back from the pages";
        case.filled(
            &rows_out,
            NumberType::F32,
            &[tokens, page.heads, page.head_dim],
            "[token, head, channel]",
            what,
            POISON,
        );
        let mut parts = vec![(
            page,
            false,
            self.buffer("pages"),
            self.runs(sequences, false, |i| [0, packed[i]]),
        )];
        if let Some(waiting) = self.waiting {
            let runs = self.runs(sequences, true, |i| [packed[i], sequences[i].tokens]);
            parts.push((waiting, true, first_pool.clone(), runs));
        }
        for (layout, waits, pool, runs) in parts {
            if runs.is_empty() {
                continue;
            }
            let list_name = self.buffer(if waits { "waiting_out" } else { "packed_out" });
            list(
                case,
                &list_name,
                &runs,
                RUN,
                "runs of up to four slots to read back, with the row of the first",
            );
            let params = [&place[..], &[("runs", Param::U32(runs.len() as u32))]].concat();
            let bindings = [
                ("side_pages", pool.as_str()),
                ("runs", list_name.as_str()),
                ("tensor_scales", "tensor_scales"),
                ("rows", rows_out.as_str()),
            ];
            case.step(&choice.dequantize(&layout), &params, &bindings)?;
            let words = if waits { &self.waiting_pool } else { &self.pool };
            reference::dequantize(&layout, &runs, self.tensor_scale, words, &mut self.dequantised);
        }
        let what = format!(
            "{} as packing leaves them: dead slots untouched",
            self.buffer("pages")
        );
        let masks = self.counted(&page, false, sequences);
        case.bits(
            &self.buffer("pages"),
            &[self.packer()],
            &what,
            self.pool.clone(),
            masks,
        );
        if let Some(waiting) = self.waiting {
            let masks = self.counted(&waiting, true, sequences);
            case.bits(
                &first_pool,
                &["quantize"],
                "rows that wait, in f16",
                self.waiting_pool.clone(),
                masks,
            );
        }
        let bits = self.dequantised.iter().map(|x| x.to_bits()).collect();
        case.bits(
            &rows_out,
            &["dequantize"],
            "code x scale, one f32 multiply",
            bits,
            Vec::new(),
        );
        Ok(())
    }

    fn pages_buffer(&self, case: &mut Case, name: &str, page: &PageLayout) {
        let count = (self.pool.len() as u32) / self.page.words;
        let what = format!("pages of {}, one of them unused", page.side);
        case.filled(
            name,
            NumberType::U32,
            &[count, page.words],
            "[page, word]",
            &what,
            POISON,
        );
        if let Some(buffer) = case.buffers.last_mut() {
            buffer.geometry = Some(Geometry::from(page));
        }
    }

    /// The bits of a pool that count: all but the padding of live slots, which a kernel may write.
    fn counted(&self, page: &PageLayout, waiting: bool, sequences: &[Sequence]) -> Vec<u32> {
        let count = (self.pool.len() as u32) / self.page.words;
        let mut counted = vec![u32::MAX; (page.words * count) as usize];
        for (sequence, (own, waits, packed)) in sequences.iter().zip(&self.places) {
            let (ids, live) = if waiting {
                (waits, sequence.tokens)
            } else {
                (own, *packed)
            };
            for (place, &id) in (0..).zip(ids) {
                let live = live.saturating_sub(place * page.tokens).min(page.tokens);
                mask_padding(page, live, &mut counted[page.range(id)]);
            }
        }
        counted
    }
}

/// Takes the padding of the code words of slots below `live` out of a page's mask.
pub(super) fn mask_padding(page: &PageLayout, live: u32, mask: &mut [u32]) {
    let used = page.live_words(&vec![u32::MAX; page.words as usize], 0, live);
    for word in 0..page.heads * page.head_words {
        for slot in 0..live {
            let at = (word * page.tokens + slot) as usize;
            mask[at] = used[at];
        }
    }
}

/// What a run is, as an axis.
pub(super) const RUN: &str = "[run, (page, first slot, slots, source)]";

/// Adds a work list.
pub(super) fn list<T: bytemuck::Pod>(case: &mut Case, name: &str, entries: &[T], axes: &str, what: &str) {
    let words: Vec<u32> = bytemuck::cast_slice(entries).to_vec();
    let width = (size_of::<T>() / 4) as u32;
    case.data(
        name,
        NumberType::U32,
        &[entries.len() as u32, width],
        axes,
        what,
        words,
    );
}

/// Numbers as words of a type.
pub(super) fn float_words(numbers: &[f32], float: FloatType) -> (NumberType, Vec<u32>) {
    match float {
        FloatType::F32 => (NumberType::F32, numbers.iter().map(|x| x.to_bits()).collect()),
        FloatType::F16 => {
            let half = |x: &f32| u32::from(half::f16::from_f32(*x).to_bits());
            let words = numbers
                .chunks(2)
                .map(|two| half(&two[0]) | two.get(1).map_or(0, half) << 16);
            (NumberType::F16, words.collect())
        }
    }
}

/// Adds attention over the ranges of each kind, and the merge.
fn attend(
    choice: &Choice,
    case: &mut Case,
    [k, v]: [&SideRows; 2],
    sequences: &[Sequence],
    phase: Phase,
    random: &mut Random,
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
    let (merges, partials) = plan(&mut kinds, [k, v], sequences, tile.unwrap_or(1), q_heads)?;
    kinds.retain(|kind| !kind.items.is_empty());

    let arithmetic = kinds
        .iter()
        .filter_map(|kind| kind.module.variant)
        .map(|v| v.arithmetic);
    let arithmetic = arithmetic.fold(
        Arithmetic::F32,
        |known, a| if a == Arithmetic::F32 { known } else { a },
    );
    let q: Vec<f32> = (0..rows * q_heads * q_dim).map(|_| random.normal()).collect();
    let (kind, words) = float_words(&q, choice.queries);
    case.data(
        "q",
        kind,
        &[rows, q_heads, q_dim],
        "[query token, query head, channel]",
        "queries",
        words,
    );
    let q: Vec<f32> = q
        .iter()
        .map(|&x| match choice.queries {
            FloatType::F32 => x,
            FloatType::F16 => half::f16::from_f32(x).to_f32(),
        })
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
    case.filled(
        "sinks",
        NumberType::F32,
        &[q_heads],
        "[query head]",
        "not read: there are no sinks",
        0,
    );
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

    let options = AttentionOptions::<&[f32]>::default();
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
            ("k_tensor", Param::U32(0)),
            ("v_tensor", Param::U32(1)),
            ("back", Param::U32(reach.back)),
            ("ahead", Param::U32(reach.ahead)),
            ("softcap", Param::F32(0.0)),
            ("q_offset", Param::U32(0)),
            ("q_row", Param::U32(q_heads * q_dim / 4)),
            ("q_head", Param::U32(q_dim / 4)),
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
        ("sinks", Param::U32(0)),
        ("lse", Param::U32(1)),
    ];
    let bindings = ["merges", "partial_o", "partial_ml", "output", "lse", "sinks"].map(|name| (name, name));
    case.step(&choice.attention_merge(), &params, &bindings)?;

    let mut outputs = vec![0.0; (rows * q_heads * v_dim) as usize];
    let mut lse = vec![0.0; (rows * q_heads) as usize];
    reference::attention_merge(
        &merges,
        q_heads,
        v_dim,
        None,
        &reference_partials,
        &mut outputs,
        &mut lse,
    );
    let (mut judged, mut judged_lse) = (Vec::new(), Vec::new());
    for sequence in sequences {
        for query in 0..sequence.queries {
            let seen = sequence.tokens - sequence.queries + query + 1;
            for head in 0..q_heads {
                let row = ((sequence.first_query + query) * q_heads + head) as usize;
                let plain = {
                    let kv_head = head / (q_heads / shape.kv_heads);
                    let pairs: Vec<_> = (sequence.first_row..sequence.first_row + seen)
                        .map(|token| (k.head(token, kv_head), v.head(token, kv_head)))
                        .collect();
                    let q = &q[row * q_dim as usize..][..q_dim as usize];
                    Plain::new(q, &pairs, (&options, None), (arithmetic, v_dim))
                };
                let wanted = &outputs[row * v_dim as usize..][..v_dim as usize];
                let bound = plain.bound(wanted);
                judged.extend(
                    wanted
                        .iter()
                        .map(|&w| [w, bound + output_rounding(choice.outputs, w)]),
                );
                judged_lse.push([lse[row], plain.lse_bound(lse[row])]);
            }
        }
    }
    let kernels = ["attention_split", "attention_merge"];
    let what = "attention in f64 over the same pages; bound: twice the error of plain f32 attention + 4e-6 x the largest value";
    case.bound("output", &kernels, what, &judged);
    case.bound(
        "lse",
        &kernels,
        "log of the sum of exp(score), in f64",
        &judged_lse,
    );
    Ok(())
}

impl SideRows {
    /// What the pages hold of one token and head.
    fn head(&self, token: u32, head: u32) -> Vec<f32> {
        let at = (token * self.page.heads + head) * self.page.head_dim;
        self.dequantised[at as usize..][..self.page.head_dim as usize].to_vec()
    }
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
    tile: u32,
    q_heads: u32,
) -> Result<(Vec<Merge>, u32)> {
    let (mut merges, mut partials) = (Vec::new(), 0);
    let page = k.page.tokens;
    for (i, sequence) in sequences.iter().enumerate() {
        let packed = [k.places[i].2, v.places[i].2];
        let first_position = sequence.tokens - sequence.queries;
        for first in (0..sequence.queries).step_by(tile as usize) {
            let queries = tile.min(sequence.queries - first);
            let (base, stride) = (partials, queries * q_heads);
            let mut count = 0;
            let mut start = 0;
            while start < sequence.tokens {
                let ends = [packed[0], packed[1], (start / page + 1) * page];
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
                    true => side.places[i].1[place],
                    false => side.places[i].0[place],
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
                row: sequence.first_query + first + t,
            }));
        }
    }
    Ok((merges, partials))
}
