//! What a cache is asked to be, and what follows from it in integers: page geometries, how many pages the budget
//! buys, what tokens and sequences cost. No GPU.

use super::pool::PoolId;
use crate::error::{Error, Result};
use crate::pages::{PageLayout, heads_ratio};
use crate::rope::RopeTable;
use crate::scales::{GIVEN_SCALE, ScaleLayout};
use crate::spec::{Pair, Side};

/// Index of K in pairs of sides.
pub const K: usize = 0;
/// Index of V in pairs of sides.
pub const V: usize = 1;

/// New tokens that are packed at a time, where tokens wait before: a longer step recycles the pages they wait in.
const ROUND_TOKENS: u32 = 512;

/// The most layers of a cache.
pub const MAX_LAYERS: u32 = 1024;
/// The most sequences for which a budget provides.
pub const MAX_SEQUENCES: u32 = 1 << 16;
/// The most tokens of a sequence, and of a step.
pub const MAX_TOKENS: u32 = 1 << 31;
/// The most tokens of a recent window, or of sinks.
pub const MAX_WAITING: u32 = 1 << 16;

/// The most pages of a pool; sequences end at [`MAX_TOKENS`] before.
const MAX_PAGES: u64 = 1 << 28;

/// Buffers are cut to multiples of this, which satisfies every offset alignment of WebGPU.
const BUFFER_ALIGNMENT: u64 = 256;

/// Where per-tensor scales come from.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum TensorScales {
    /// Fixed when the cache is made: `[layer][K, V]`, given or from [`KvCache::calibrated`](super::KvCache::calibrated).
    Given(Vec<[f32; 2]>),
    /// From the rows of each step, before they are packed. A step is refused while the cache holds tokens, since they
    /// would be read under the new scale.
    FromRows,
}

/// How one layer is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSpec {
    /// How K and V are stored.
    pub pair: Pair,
    /// Recent tokens R of K and of V that stay in full precision, at most [`MAX_WAITING`]. They can always be truncated. Not
    /// what attention sees: that is [`AttentionOptions::window`](crate::options::AttentionOptions::window).
    pub window: [u32; 2],
    /// First tokens S of a sequence whose K and V stay in full precision, at most [`MAX_WAITING`]. Not the learned
    /// [`AttentionOptions::sinks`](crate::options::AttentionOptions::sinks).
    pub sink_tokens: [u32; 2],
}

impl LayerSpec {
    /// A pair without recent window and sink tokens.
    pub fn new(pair: Pair) -> LayerSpec {
        LayerSpec {
            pair,
            window: [0; 2],
            sink_tokens: [0; 2],
        }
    }
}

/// The shape, formats and budget of a cache.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheSpec {
    /// Query heads: a whole multiple of `kv_heads`, from 1 to 16 times as many.
    pub q_heads: u32,
    /// KV heads, 1 to 1024.
    pub kv_heads: u32,
    /// Channels of a key head, and of a query head: a multiple of 8 up to 256.
    pub k_head_dim: u32,
    /// Channels of a value head, and of an output head: a multiple of 8 up to 256.
    pub v_head_dim: u32,
    /// How each layer is stored, 1 to [`MAX_LAYERS`] of them. Layers with equal entries share plans: few different ones
    /// make steps cheaper to plan.
    pub layers: Vec<LayerSpec>,
    /// Tokens of a page: a multiple of 8 and of every group G, at most 4096.
    pub page_tokens: u32,
    /// The format in which tokens wait to be packed: f16; f32 only for the published convention.
    pub waiting: Side,
    /// Sequences whose waiting tokens the budget provides for, 1 to [`MAX_SEQUENCES`]. More can be open where others leave
    /// pages free; forks are sequences too. Without waiting and sink tokens (`f16`, or `int8` with no window) it costs nothing.
    pub sequences: u32,
    /// Bytes that all pages together may take.
    pub budget: u64,
    /// Bytes by which the pages grow at a time, about. Smaller steps take less memory while the cache is not full;
    /// each pool then lies in more buffers, and attention takes a dispatch for each of them.
    /// Any number will do: each pool grows by one page at least, and by no more than the budget buys.
    pub growth: u64,
    /// Per-tensor scales, an entry for every layer; those of sides without such scales may be any numbers. `Given` and empty
    /// where no side has one.
    pub tensor_scales: TensorScales,
    /// For keys that are stored before RoPE: the turns by which attention rotates them as it reads them. A sequence is then
    /// no longer than the table, and cannot be saved. None: keys are stored as they come, which is how engines store them.
    pub key_rotation: Option<RopeTable>,
}

/// Layers that are stored alike: they share page tables and plans.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Class {
    /// How they are stored.
    pub spec: LayerSpec,
    /// Their numbers.
    pub layers: Vec<u32>,
    /// Packed pages of K and V.
    pub packed: [PageLayout; 2],
    /// Pages of K and V in full precision, for tokens that wait to be packed and for sink tokens, where there are.
    pub waiting: [Option<PageLayout>; 2],
    /// Sink tokens of K and V; 0 where the side is full precision anyway.
    pub sink_tokens: [u32; 2],
    /// Whether new rows of K and V go through full precision before they are packed.
    pub waits: [bool; 2],
}

impl Class {
    /// The pages of a side's tokens, packed or in full precision.
    pub fn page(&self, side: usize, waits: bool) -> PageLayout {
        match (waits, self.waiting[side]) {
            (true, Some(page)) => page,
            _ => self.packed[side],
        }
    }

    /// Tokens below which a side is packed when a step commits at `len` tokens: the largest multiple of the group not
    /// above `len` - R, and never less than `before`; all of them where none wait.
    pub fn boundary(&self, side: usize, before: u32, len: u32) -> u32 {
        let group = self.packed[side].side.layout.token_group();
        match self.waits[side] {
            true => before.max(len.saturating_sub(self.spec.window[side]) / group * group),
            false => len,
        }
    }

    /// Pages in full precision that a sequence holds at most, on a side: sinks, and waiting tokens before and after a
    /// step, since those from before are free only when the step is committed.
    fn waiting_pages(&self, side: usize) -> u32 {
        let Some(page) = &self.waiting[side] else { return 0 };
        let sinks = self.sink_tokens[side].div_ceil(page.tokens);
        // Waiting tokens begin at a multiple of the group, which divides the page, and are fewer than R + G.
        let waiting = match self.waits[side] {
            true => (self.spec.window[side] + page.tokens - 1).div_ceil(page.tokens),
            false => 0,
        };
        sinks + 2 * waiting
    }
}

/// What a cache of some spec looks like.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// Layers stored alike, in the order of their first layer.
    pub classes: Vec<Class>,
    /// The class of each layer.
    pub class_of: Vec<usize>,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Sequences whose waiting tokens the budget provides for.
    pub sequences: u32,
}

/// What tokens and sequences of a cache take, in bytes of all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Costs {
    /// One packed page of K and of V in every layer.
    pub page: u64,
    /// Scales in it.
    pub page_scales: u64,
    /// Ends of head words and of planes in it, which hold nothing.
    pub page_padding: u64,
    /// Pages in full precision that one sequence is provided with, at most.
    pub sequence: u64,
    /// Pages in full precision through which long steps go, once for all sequences, at most.
    pub staging: u64,
}

impl Geometry {
    /// The class of a layer.
    ///
    /// # Errors
    /// [`Error::Shape`] for a layer that the cache lacks.
    pub fn class(&self, layer: u32) -> Result<&Class> {
        self.class_index(layer).map(|c| &self.classes[c])
    }

    pub(crate) fn class_index(&self, layer: u32) -> Result<usize> {
        let layers = self.class_of.len();
        self.class_of
            .get(layer as usize)
            .copied()
            .ok_or_else(|| Error::Shape {
                what: "layer",
                value: u64::from(layer),
                limit: format!("the cache has {layers} layers, counted from 0"),
                advice: "check the model's configuration".to_owned(),
            })
    }

    /// Tokens that are packed at a time, where tokens wait before.
    pub(super) fn round_tokens(&self) -> u32 {
        ROUND_TOKENS.max(self.page_tokens) / self.page_tokens * self.page_tokens
    }

    /// Pages through which the tokens of a round go; two sequences may straddle its ends.
    fn staging_pages(&self) -> u32 {
        self.round_tokens() / self.page_tokens + 2
    }

    /// What tokens and sequences take.
    pub fn costs(&self) -> Costs {
        let pages = |of: &dyn Fn(&PageLayout) -> u64| {
            let packed = self.classes.iter();
            packed
                .map(|class| class.packed.iter().map(of).sum::<u64>() * class.layers.len() as u64)
                .sum()
        };
        let waiting = |of: &dyn Fn(&Class, usize) -> u32| {
            let pools = self.classes.iter().flat_map(|class| [(class, K), (class, V)]);
            let bytes = pools.map(|(class, s)| {
                let page = class.waiting[s].map_or(0, |page| page.bytes());
                page * u64::from(of(class, s)) * class.layers.len() as u64
            });
            bytes.sum()
        };
        Costs {
            page: pages(&PageLayout::bytes),
            page_scales: pages(&PageLayout::scale_bytes),
            page_padding: pages(&PageLayout::padding_bytes),
            sequence: waiting(&Class::waiting_pages),
            staging: waiting(&|class, s| if class.waits[s] { self.staging_pages() } else { 0 }),
        }
    }

    /// Pages in full precision with which a pool serves one sequence, however long its steps.
    pub(super) fn waiting_pages(&self, id: PoolId) -> u32 {
        let class = &self.classes[id.class];
        let staging = if class.waits[id.side] {
            self.staging_pages()
        } else {
            0
        };
        class.waiting_pages(id.side) + staging
    }

    /// Pages of a pool where packed pools have `pages`. A sequence has no more pages in full precision than packed ones
    /// when it has used up its pool: long steps of a small cache take fewer.
    pub(super) fn capacity(&self, class: &Class, side: usize, waiting: bool, pages: u64) -> u64 {
        match (waiting, class.waiting[side]) {
            (false, _) => pages,
            (true, None) => 0,
            (true, Some(_)) => {
                let sequences = u64::from(self.sequences);
                let staging = if class.waits[side] {
                    self.staging_pages()
                } else {
                    0
                };
                let provided =
                    u64::from(class.waiting_pages(side)) * sequences + u64::from(staging).min(pages);
                provided.min(pages.saturating_mul(sequences))
            }
        }
    }

    /// Bytes of a cache with so many packed pages a pool.
    pub fn bytes(&self, pages: u64) -> u64 {
        let pools = self.classes.iter().flat_map(|class| {
            [(K, false), (K, true), (V, false), (V, true)].map(|(s, waits)| (class, s, waits))
        });
        let bytes = pools.map(|(class, s, waits)| {
            let page = class.page(s, waits).bytes() * class.layers.len() as u64;
            self.capacity(class, s, waits, pages).saturating_mul(page)
        });
        bytes.fold(0, u64::saturating_add)
    }

    /// The most packed pages a pool whose cache fits a budget, up to 2^28.
    pub fn pages_within(&self, budget: u64) -> u64 {
        let (mut fits, mut beyond) = (0, MAX_PAGES + 1);
        while beyond - fits > 1 {
            let middle = (fits + beyond) / 2;
            match self.bytes(middle) <= budget {
                true => fits = middle,
                false => beyond = middle,
            }
        }
        fits
    }
}

/// Pages of one buffer of a pool: at most what a binding of `limit` bytes can hold.
pub(super) fn buffer_pages(limit: u64, page: &PageLayout) -> u64 {
    // Kernels number the words of a buffer in 32 bits.
    let words = u64::from(u32::MAX) / u64::from(page.words);
    (limit / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT / page.bytes()).min(words)
}

impl CacheSpec {
    /// A cache whose layers are all stored alike, without recent windows and sink tokens, for 16 sequences, in pages of
    /// [`Pair::default_page_tokens`]; it grows by a quarter of its budget at a time. It has no per-tensor scales: a pair with
    /// `fp8` needs [`CacheSpec::tensor_scales`] besides.
    pub fn new(
        layers: u32,
        q_heads: u32,
        kv_heads: u32,
        head_dim: u32,
        pair: Pair,
        budget: u64,
    ) -> CacheSpec {
        CacheSpec {
            q_heads,
            kv_heads,
            k_head_dim: head_dim,
            v_head_dim: head_dim,
            // One more than is allowed is refused like any larger number, and takes no memory.
            layers: vec![LayerSpec::new(pair); layers.min(MAX_LAYERS + 1) as usize],
            page_tokens: pair.default_page_tokens(),
            waiting: Side::F16,
            sequences: 16,
            budget,
            growth: budget / 4,
            tensor_scales: TensorScales::Given(Vec::new()),
            key_rotation: None,
        }
    }

    /// The same cache with the budget of exactly `pages` packed pages a pool, made at once.
    ///
    /// # Errors
    /// As [`CacheSpec::geometry`].
    pub fn with_pages(self, pages: u32) -> Result<CacheSpec> {
        let budget = self.geometry()?.bytes(u64::from(pages));
        Ok(CacheSpec {
            budget,
            growth: budget,
            ..self
        })
    }

    /// Checks all but the budget.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::TensorScale`], each naming the value and the rule.
    pub fn geometry(&self) -> Result<Geometry> {
        let shape = |what, value: u64, limit: &str| {
            Err(Error::Shape {
                what,
                value,
                limit: limit.to_owned(),
                advice: "check the cache's spec".to_owned(),
            })
        };
        let layers = self.layers.len() as u64;
        if layers == 0 || layers > u64::from(MAX_LAYERS) {
            return shape("layers", layers, "1 to 1024 layers");
        }
        if self.sequences == 0 || self.sequences > MAX_SEQUENCES {
            return shape("sequences", u64::from(self.sequences), "1 to 65536 sequences");
        }
        if ![Side::F16, Side::F32].contains(&self.waiting) {
            return Err(Error::Usage {
                asked: format!("tokens that wait as `{}`", self.waiting),
                reason: "they wait in full precision".to_owned(),
                advice: "let them wait as f16 (or f32)".to_owned(),
            });
        }
        heads_ratio(self.q_heads, self.kv_heads.max(1))?;
        if let TensorScales::Given(scales) = &self.tensor_scales {
            self.check_scales(scales)?;
        }
        if let Some(table) = &self.key_rotation
            && (table.head_dim != self.k_head_dim || table.turns.is_empty())
        {
            let limit = format!("keys have {} channels", self.k_head_dim);
            return shape("channels of the key rotation", u64::from(table.head_dim), &limit);
        }
        let mut classes: Vec<Class> = Vec::new();
        let mut class_of = Vec::new();
        for (number, spec) in (0..).zip(&self.layers) {
            let known = classes.iter().position(|class| class.spec == *spec);
            class_of.push(known.unwrap_or(classes.len()));
            match known {
                Some(known) => classes[known].layers.push(number),
                None => classes.push(self.class(number, spec)?),
            }
        }
        Ok(Geometry {
            classes,
            class_of,
            page_tokens: self.page_tokens,
            sequences: self.sequences,
        })
    }

    fn class(&self, layer: u32, spec: &LayerSpec) -> Result<Class> {
        let dims = [self.k_head_dim, self.v_head_dim];
        let sides = [spec.pair.k, spec.pair.v];
        let plain = |s: usize| sides[s].element.info().plain;
        for (what, tokens) in [("window", spec.window), ("sink_tokens", spec.sink_tokens)] {
            if let Some(&long) = tokens.iter().find(|&&tokens| tokens > MAX_WAITING) {
                return Err(Error::Shape {
                    what,
                    value: u64::from(long),
                    limit: format!("at most {MAX_WAITING} tokens of a sequence stay in full precision so"),
                    advice: "store the layer as f16 instead".to_owned(),
                });
            }
        }
        let sink_tokens = [K, V].map(|s| if plain(s) { 0 } else { spec.sink_tokens[s] });
        let waits = [K, V].map(|s| sides[s].waits(spec.window[s]));
        let page = |side, s: usize| PageLayout::new(side, self.kv_heads, dims[s], self.page_tokens);
        let waiting = |s: usize| {
            (waits[s] || sink_tokens[s] > 0)
                .then(|| page(self.waiting, s))
                .transpose()
        };
        Ok(Class {
            spec: *spec,
            layers: vec![layer],
            packed: [page(sides[K], K)?, page(sides[V], V)?],
            waiting: [waiting(K)?, waiting(V)?],
            sink_tokens,
            waits,
        })
    }

    /// Packed pages a pool that the budget buys.
    ///
    /// # Errors
    /// [`Error::Budget`] for a budget below one page.
    pub fn pages(&self, geometry: &Geometry) -> Result<u32> {
        match geometry.pages_within(self.budget) {
            0 => Err(Error::Budget {
                needed: geometry.bytes(1),
                budget: self.budget,
                sequences: self.sequences,
            }),
            pages => Ok(pages as u32),
        }
    }

    fn check_scales(&self, scales: &[[f32; 2]]) -> Result<()> {
        let per_tensor = |layer: usize, s: usize| {
            let pair = self.layers[layer].pair;
            [pair.k, pair.v][s].layout == ScaleLayout::PerTensor
        };
        let layers = self.layers.len();
        let any = (0..layers).any(|layer| per_tensor(layer, K) || per_tensor(layer, V));
        if (any || !scales.is_empty()) && scales.len() != layers {
            return Err(Error::Shape {
                what: "per-tensor scales (layers)",
                value: scales.len() as u64,
                limit: format!("one pair of scales for each of the {layers} layers"),
                advice:
                    "set CacheSpec::tensor_scales: calibrate with Step::calibrate and KvCache::calibrated"
                        .to_owned(),
            });
        }
        for (layer, pair) in scales.iter().enumerate() {
            for (s, &value) in pair.iter().enumerate() {
                // Written so that NaN is refused.
                if per_tensor(layer, s) && !GIVEN_SCALE.contains(&f64::from(value)) {
                    return Err(Error::TensorScale {
                        what: format!("layer {layer}, {}", ["K", "V"][s]),
                        value: f64::from(value),
                    });
                }
            }
        }
        Ok(())
    }

    /// The most tokens of a sequence.
    pub(super) fn most_tokens(&self) -> u32 {
        let turns = self.key_rotation.as_ref().map(RopeTable::positions);
        turns.unwrap_or(MAX_TOKENS).min(MAX_TOKENS)
    }

    /// Whether a side's per-tensor scale changes with each step.
    pub(super) fn scales_from_rows(&self) -> bool {
        let per_tensor = |side: Side| side.layout == ScaleLayout::PerTensor;
        let used = |layer: &LayerSpec| per_tensor(layer.pair.k) || per_tensor(layer.pair.v);
        self.tensor_scales == TensorScales::FromRows && self.layers.iter().any(used)
    }

    /// Tokens of one split: pages of one work item at most. A function of the shape alone, so that a sequence whose pages
    /// lie in one buffer gives the same bits in every batch; where they lie in several, splits end there too.
    pub fn split_tokens(&self) -> u32 {
        (512 / self.page_tokens).max(1) * self.page_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lng_05_buffers_are_cut_to_whole_pages_at_an_aligned_limit() {
        let page = PageLayout::new(Side::F16, 1, 8, 8).unwrap();
        assert_eq!(page.bytes(), 128);
        // 2^31 - 1 bytes: the last multiple of 256 is 2147483392.
        assert_eq!(buffer_pages(2_147_483_647, &page) * 128, 2_147_483_392);
        // Word numbers of a buffer fit 32 bits however much can be bound.
        assert!(buffer_pages(1 << 40, &page) * u64::from(page.words) <= u64::from(u32::MAX));
        assert_eq!(buffer_pages(127, &page), 0);
    }

    #[test]
    fn layers_stored_alike_form_a_class() {
        let mut spec = CacheSpec::new(6, 4, 2, 16, "int4c/int4".parse().unwrap(), 1 << 30);
        let f16 = LayerSpec::new("f16".parse().unwrap());
        spec.layers[0] = f16;
        spec.layers[5] = f16;
        let geometry = spec.geometry().unwrap();
        assert_eq!(geometry.class_of, [0, 1, 1, 1, 1, 0]);
        assert_eq!(geometry.classes[0].layers, [0, 5]);
        assert_eq!(geometry.classes[1].layers, [1, 2, 3, 4]);
        let costs = geometry.costs();
        let [f16, quantised] = [0, 1].map(|c| &geometry.classes[c]);
        let page =
            2 * 2 * f16.packed[K].bytes() + 4 * (quantised.packed[K].bytes() + quantised.packed[V].bytes());
        assert_eq!(costs.page, page);
        // int4c waits for its group; one page before a step and one after it, in four layers.
        assert_eq!(costs.sequence, 4 * 2 * f16.packed[K].bytes());
        // The budget buys as many pages as fit, and not one more.
        let pages = u64::from(spec.pages(&geometry).unwrap());
        assert!(geometry.bytes(pages) <= 1 << 30 && geometry.bytes(pages + 1) > 1 << 30);
        assert_eq!(geometry.bytes(pages + 1) - geometry.bytes(pages), page);
        assert_eq!(
            geometry.bytes(pages),
            pages * page + 16 * costs.sequence + costs.staging
        );
    }

    #[test]
    fn a_budget_below_one_page_says_what_it_takes() {
        let spec = CacheSpec::new(1, 1, 1, 8, "int4c".parse().unwrap(), 1000);
        let geometry = spec.geometry().unwrap();
        let needed = geometry.bytes(1);
        let said = spec.pages(&geometry).unwrap_err().to_string();
        assert!(
            said.contains(&needed.to_string()) && said.contains("1000"),
            "{said}"
        );
        let enough = CacheSpec {
            budget: needed,
            ..spec
        };
        assert_eq!(enough.pages(&geometry).unwrap(), 1);
    }
}
