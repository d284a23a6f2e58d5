//! K or V of the sequences of a case: its rows, the pages that they are packed into, and what these hold.

use super::super::modules::Choice;
use super::twist::{Lie, Twist};
use super::{Case, NumberType, POISON, Param, Sequence};
use crate::error::Result;
use crate::kernels::FloatType;
use crate::pages::PageLayout;
use crate::reference;
use crate::scales::ScaleLayout;
use crate::spec::Side;
use crate::validate::{Random, formulas};
use crate::work::{SlotRun, Status, slot_runs};

/// Where the rows of one sequence are.
#[derive(Clone)]
pub(super) struct Places {
    /// Its pages.
    pub pages: Vec<u32>,
    /// The pages in which its rows wait.
    pub waiting: Vec<u32>,
    /// How many of its tokens are packed.
    pub packed: u32,
}

/// K or V of all sequences.
pub(super) struct SideRows {
    pub side: Side,
    /// `k` or `v`.
    pub name: &'static str,
    pub page: PageLayout,
    /// Pages in which rows wait, for sides whose rows do.
    pub waiting: Option<PageLayout>,
    /// `[token][head][channel]`, as the type of rows holds them.
    pub rows: Vec<f32>,
    /// Where the rows of each sequence are.
    pub places: Vec<Places>,
    pub tensor_scale: f32,
    pub pool: Vec<u32>,
    pub waiting_pool: Vec<u32>,
    /// What the pages hold.
    pub dequantised: Vec<f32>,
    /// Place of its per-tensor scale.
    pub place: u32,
    /// How the rows lie in their buffer.
    lie: Lie,
}

impl SideRows {
    pub fn new(
        choice: &Choice,
        side: Side,
        value: bool,
        lengths: &[u32],
        (twist, random): (&Twist, &mut Random),
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
            formulas::rounded(x, choice.rows) as f32
        });
        let rows: Vec<f32> = rows.collect();
        // One page more than is needed: nothing may touch it.
        let count = lengths.iter().map(|len| len.div_ceil(page.tokens)).sum::<u32>() + 1;
        let waits = side.waits(0);
        let mut orders = [0, 1].map(|_| random.permutation(count));
        let group = side.layout.token_group();
        let places = lengths.iter().map(|&len| {
            let count = len.div_ceil(page.tokens) as usize;
            let mut take = |order: usize| {
                let left = orders[order].len() - count;
                orders[order].split_off(left)
            };
            let pages = take(0);
            let waiting = if waits { take(1) } else { Vec::new() };
            let packed = if waits { len / group * group } else { len };
            Places {
                pages,
                waiting,
                packed,
            }
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
            place: twist.place + u32::from(value),
            lie: Lie::new(page.heads, page.head_dim, twist.gaps),
        })
    }

    pub fn packer(&self) -> &'static str {
        match self.waiting {
            Some(_) => "quantize_group",
            None => "quantize",
        }
    }

    pub fn buffer(&self, what: &str) -> String {
        format!("{}_{what}", self.name)
    }

    /// Runs over the tokens [first, last) of each sequence; a run's source is its row.
    fn runs(&self, sequences: &[Sequence], waiting: bool, range: impl Fn(usize) -> [u32; 2]) -> Vec<SlotRun> {
        let mut runs = Vec::new();
        for (i, sequence) in sequences.iter().enumerate() {
            let [first, last] = range(i);
            let ids = if waiting {
                &self.places[i].waiting
            } else {
                &self.places[i].pages
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
        let of = |places: &Places| {
            let firsts = (0..places.packed).step_by(group as usize);
            let run = |first: u32| SlotRun {
                page: places.pages[(first / tokens) as usize],
                slot: first % tokens,
                count: group,
                source: places.waiting[(first / tokens) as usize],
            };
            firsts.map(run).collect::<Vec<_>>()
        };
        self.places.iter().flat_map(of).collect()
    }

    /// Adds all that brings the rows into pages and back, in the case and here.
    pub fn pack(
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
        rows_buffer(case, name, what, &self.rows, (self.lie, choice.rows));
        let strides = [
            ("row_offset", Param::U32(self.lie.offset)),
            ("row_stride", Param::U32(self.lie.row)),
            ("head_stride", Param::U32(self.lie.head)),
        ];
        if self.side.layout == ScaleLayout::PerTensor {
            let largest = self.buffer("largest");
            let what = "bits of the largest magnitudes of K and V; tensor_scale takes them and leaves 0";
            case.filled(&largest, NumberType::U32, &[4], "[side]", what, 0);
            let shape = [
                ("tokens", Param::U32(tokens)),
                ("heads", Param::U32(page.heads)),
                ("head_dim", Param::U32(page.head_dim)),
                ("slot", Param::U32(self.place)),
            ];
            let params = [&shape[..], &strides].concat();
            case.step(
                &choice.amax(),
                &params,
                &[("source", name), ("largest", &largest)],
            )?;
            let params = [("first", Param::U32(self.place)), ("slots", Param::U32(1))];
            let bindings = [("largest", largest.as_str()), ("tensor_scales", "tensor_scales")];
            case.step(&choice.tensor_scale(self.side), &params, &bindings)?;
        }
        let all = |i: usize| [0, sequences[i].tokens];
        let packed: Vec<u32> = self.places.iter().map(|places| places.packed).collect();

        // New rows into the pages where they stay or wait.
        let (first_page, first_pool) = match self.waiting {
            Some(waiting) => (waiting, self.buffer("waiting")),
            None => (page, self.buffer("pages")),
        };
        let runs = self.runs(sequences, self.waiting.is_some(), all);
        case.pages(&first_pool, &first_page, self.count());
        let list_name = self.buffer("runs");
        list(
            case,
            &list_name,
            &runs,
            RUN,
            "runs of up to four slots of a page, with the row of the first",
        );
        let place = [("side_tensor", Param::U32(self.place))];
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
            case.pages(&pages, &page, self.count());
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

    /// Pages of the pool.
    fn count(&self) -> u32 {
        self.pool.len() as u32 / self.page.words
    }

    /// The bits of a pool that count: all but the padding of live slots, which a kernel may write.
    fn counted(&self, page: &PageLayout, waiting: bool, sequences: &[Sequence]) -> Vec<u32> {
        let mut counted = vec![u32::MAX; (page.words * self.count()) as usize];
        for (sequence, places) in sequences.iter().zip(&self.places) {
            let (ids, live) = match waiting {
                true => (&places.waiting, sequence.tokens),
                false => (&places.pages, places.packed),
            };
            for (place, &id) in (0..).zip(ids) {
                let live = live.saturating_sub(place * page.tokens).min(page.tokens);
                mask_padding(page, live, &mut counted[page.range(id)]);
            }
        }
        counted
    }

    /// What the pages hold of one token and head.
    pub fn head(&self, token: u32, head: u32) -> Vec<f32> {
        let at = (token * self.page.heads + head) * self.page.head_dim;
        self.dequantised[at as usize..][..self.page.head_dim as usize].to_vec()
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

/// Adds a buffer of rows of heads as they lie.
pub(super) fn rows_buffer(
    case: &mut Case,
    name: &str,
    what: &str,
    rows: &[f32],
    (lie, float): (Lie, FloatType),
) {
    let spread = lie.spread(rows);
    let (kind, words) = float_words(&spread, float);
    let count = spread.len() as u32;
    if lie.row == lie.heads * lie.dim {
        let shape = [count / lie.row, lie.heads, lie.dim];
        let axes = match name {
            "q" => "[query token, query head, channel]",
            _ => "[token, head, channel]",
        };
        case.data(name, kind, &shape, axes, what, words);
    } else {
        let what = format!("{what}: offset and strides are in the params, NaN between them");
        case.data(name, kind, &[count], "[number]", &what, words);
    }
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
