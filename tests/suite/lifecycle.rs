//! Random lives of caches against a model that knows the rules of the boundary and nothing of pages: rows, and the
//! numbers they should have become. What a page holds beside live tokens is overwritten with ones at random times.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvpack::cache::{Book, CacheSpec, K, KvCache, LayerSpec, PoolId, SequenceId, TensorScales, V};
use kvpack::gpu::Gpu;
use kvpack::options::AttentionOptions;
use kvpack::reference::ReferenceCache;
use kvpack::scales::{BLOCK_CHANNELS, ScaleLayout};
use kvpack::spec::{Pair, Side};
use kvpack::validate::Random;
use kvpack::{Error, Result};

use crate::common::{gpu, say};

const KV_HEADS: u32 = 2;
const Q_HEADS: u32 = 4;
/// 8 channels: 2-bit heads have padding, and blocks of 16 span heads.
const HEAD_DIMS: [u32; 2] = [16, 8];
const SCALES: [f32; 2] = [0.01, 0.02];
/// A step's tokens go through the pages in rounds of 512: the largest steps take two.
const MOST_NEW: u32 = 150;

/// How one side of one layer treats the tokens of a sequence.
#[derive(Debug, Clone, Copy)]
struct Rule {
    side: Side,
    dim: u32,
    group: u32,
    window: u32,
    sinks: u32,
    waits: bool,
    tensor_scale: f32,
}

impl Rule {
    fn new(layer: &LayerSpec, s: usize) -> Rule {
        let side = [layer.pair.k, layer.pair.v][s];
        let quantised = side != Side::F16;
        let group = match side.layout {
            ScaleLayout::PerChannel { group } => group,
            _ => 1,
        };
        Rule {
            side,
            dim: HEAD_DIMS[s],
            group,
            window: layer.window[s],
            sinks: if quantised { layer.sink_tokens[s] } else { 0 },
            waits: quantised && (group > 1 || layer.window[s] > 0),
            tensor_scale: SCALES[s],
        }
    }

    fn boundary_after_append(&self, boundary: u32, len: u32) -> u32 {
        match self.waits {
            true => boundary.max(len.saturating_sub(self.window) / self.group * self.group),
            false => len,
        }
    }

    fn may_end_at(&self, boundary: u32, len: u32) -> bool {
        !self.waits || len >= boundary || len.is_multiple_of(self.group) || len <= self.sinks
    }

    fn boundary_after_cut(&self, boundary: u32, len: u32) -> u32 {
        match (self.waits, len >= boundary) {
            (false, _) => len,
            (true, true) => boundary,
            (true, false) => len / self.group * self.group,
        }
    }

    /// Whether attention reads the token in full precision.
    fn full(&self, boundary: u32, token: u32) -> bool {
        token < self.sinks || token >= boundary
    }

    fn halves(&self, row: &[f32]) -> Vec<f32> {
        row.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect()
    }

    /// What a row becomes when it is packed; `rows` are all rows of the sequence.
    fn packed(&self, rows: &[Rc<Vec<f32>>], token: u32) -> Vec<f32> {
        let element = self.side.element;
        let row = |token: u32| match self.waits || element == Side::F16.element {
            true => self.halves(&rows[token as usize]),
            false => rows[token as usize].to_vec(),
        };
        let one = |x: f32, scale: f32| element.decode(element.encode(x, scale).code) * scale;
        let scaled = |x: f32, amax: f32| one(x, self.side.scale.from_amax(amax, element.info().max).value);
        let largest = |row: &[f32]| row.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let own = row(token);
        let chunks = |channels: u32| {
            let chunks = own.chunks(channels as usize);
            chunks.flat_map(|chunk| {
                chunk
                    .iter()
                    .map(|&x| scaled(x, largest(chunk)))
                    .collect::<Vec<_>>()
            })
        };
        match self.side.layout {
            ScaleLayout::None => own,
            ScaleLayout::PerTensor => own.iter().map(|&x| one(x, self.tensor_scale)).collect(),
            ScaleLayout::PerToken => chunks(self.dim).collect(),
            ScaleLayout::PerBlock => chunks(BLOCK_CHANNELS).collect(),
            ScaleLayout::PerChannel { group } => {
                let first = token / group * group;
                let rows: Vec<_> = (first.max(self.sinks)..first + group).map(row).collect();
                let amax = |c: usize| rows.iter().fold(0.0_f32, |m, row| m.max(row[c].abs()));
                (0..).zip(&own).map(|(c, &x)| scaled(x, amax(c))).collect()
            }
            other => panic!("no rule for {other:?}"),
        }
    }

    /// Places of the pages that hold packed tokens and tokens in full precision.
    fn places(&self, boundary: u32, len: u32, page_tokens: u32) -> [Vec<u32>; 2] {
        let packed = (0..boundary.div_ceil(page_tokens)).collect();
        let full = (0..len).filter(|&token| self.full(boundary, token));
        let full: BTreeSet<_> = full.map(|token| token / page_tokens).collect();
        [packed, full.into_iter().collect()]
    }
}

/// One side of one layer of a sequence.
#[derive(Debug, Clone, Default)]
struct Life {
    boundary: u32,
    /// Rows as they came, `[head][channel]`.
    rows: Vec<Rc<Vec<f32>>>,
    /// The numbers that they are read as; those of packed tokens never change.
    numbers: Vec<Rc<Vec<f32>>>,
}

#[derive(Debug, Clone)]
struct Sequence {
    id: SequenceId,
    on_gpu: Option<SequenceId>,
    /// A name for each token that no other has.
    tokens: Vec<u64>,
    /// `[layer][K, V]`
    sides: Vec<[Life; 2]>,
}

impl Sequence {
    fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    fn grow(&mut self, rules: &[[Rule; 2]], names: std::ops::Range<u64>) {
        self.tokens.extend(names.clone());
        let len = self.len();
        for (layer, (sides, rules)) in self.sides.iter_mut().zip(rules).enumerate() {
            for (s, (life, rule)) in sides.iter_mut().zip(rules).enumerate() {
                for name in names.clone() {
                    let row = row(name, layer, s);
                    life.numbers.push(Rc::new(rule.halves(&row)));
                    life.rows.push(Rc::new(row));
                }
                let before = life.boundary;
                life.boundary = rule.boundary_after_append(before, len);
                for token in before.max(rule.sinks)..life.boundary {
                    life.numbers[token as usize] = Rc::new(rule.packed(&life.rows, token));
                }
            }
        }
    }

    fn may_end_at(&self, rules: &[[Rule; 2]], len: u32) -> bool {
        let mut sides = self.sides.iter().flatten().zip(rules.iter().flatten());
        len <= self.len() && sides.all(|(life, rule)| rule.may_end_at(life.boundary, len))
    }

    fn cut(&mut self, rules: &[[Rule; 2]], len: u32) {
        self.tokens.truncate(len as usize);
        for (life, rule) in self.sides.iter_mut().flatten().zip(rules.iter().flatten()) {
            life.rows.truncate(len as usize);
            life.numbers.truncate(len as usize);
            life.boundary = rule.boundary_after_cut(life.boundary, len);
        }
    }

    /// Attention of the query at a position over the `window` tokens up to it, and max |V|.
    fn attention(&self, layer: usize, kv_head: u32, q: &[f64], at: usize, window: usize) -> (Vec<f64>, f64) {
        let head = |s: usize, token: usize| {
            let dim = HEAD_DIMS[s] as usize;
            let row = &self.sides[layer][s].numbers[token][kv_head as usize * dim..][..dim];
            row.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
        };
        let seen = (at + 1).saturating_sub(window)..at + 1;
        let dot = |k: Vec<f64>| k.iter().zip(q).map(|(k, q)| k * q).sum::<f64>();
        let scores = seen.clone().map(|t| dot(head(K, t)) / (q.len() as f64).sqrt());
        let scores: Vec<f64> = scores.collect();
        let most = scores.iter().fold(f64::MIN, |m, &x| m.max(x));
        let sum: f64 = scores.iter().map(|x| (x - most).exp()).sum();
        let mut output = vec![0.0; HEAD_DIMS[V] as usize];
        let mut largest = 0.0_f64;
        for (token, score) in seen.zip(scores) {
            for (o, v) in output.iter_mut().zip(head(V, token)) {
                *o += (score - most).exp() / sum * v;
                largest = largest.max(v.abs());
            }
        }
        (output, largest)
    }
}

/// The row of a token: magnitudes up to 4, one in 16 is zero.
fn row(name: u64, layer: usize, side: usize) -> Vec<f32> {
    let mut random = Random::new(name.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ (layer * 2 + side) as u64);
    let scale = [0.0, 0.25, 1.0, 2.0][random.below(16).min(3) as usize];
    let numbers = 0..KV_HEADS * HEAD_DIMS[side];
    numbers
        .map(|_| scale * ((random.bits() >> 40) as f32 / (1 << 22) as f32 - 2.0))
        .collect()
}

/// A step's rows on one side of a layer.
fn step_rows(names: &[std::ops::Range<u64>], layer: usize, side: usize) -> Vec<f32> {
    let names = names.iter().flat_map(Clone::clone);
    names.flat_map(|name| row(name, layer, side)).collect()
}

/// Who holds a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Holder {
    sequence: usize,
    /// The page's place in it.
    place: u32,
    /// The end of its tokens that are read there.
    end: u32,
}

struct World<'a> {
    reference: ReferenceCache,
    gpu: Option<(&'a Gpu, KvCache)>,
    /// Without kernels of attention tests are fast on any driver.
    attends: bool,
    /// `[layer][K, V]`
    rules: Vec<[Rule; 2]>,
    capacity: BTreeMap<PoolId, u32>,
    sequences: Vec<Sequence>,
    saved: Vec<(Vec<u8>, Sequence)>,
    random: Random,
    names: u64,
    happened: BTreeMap<&'static str, u64>,
}

/// The pages of every sequence, in order.
fn pages(book: &Book) -> Vec<Vec<(u32, PoolId, u32)>> {
    let held = book.sequences().map(|id| book.held_pages(id).unwrap());
    held.map(|held| {
        held.iter()
            .map(|page| (page.layer, page.pool, page.page))
            .collect()
    })
    .collect()
}

fn pool(book: &Book, id: PoolId) -> kvpack::cache::PoolState {
    book.pools().find(|pool| pool.id == id).unwrap()
}

impl<'a> World<'a> {
    fn new(spec: CacheSpec, gpu: Option<&'a Gpu>, attends: bool, seed: u64) -> World<'a> {
        let reference = ReferenceCache::new(spec.clone()).unwrap();
        World {
            gpu: gpu.map(|gpu| (gpu, KvCache::new(gpu, spec.clone()).unwrap())),
            attends,
            rules: spec
                .layers
                .iter()
                .map(|layer| [K, V].map(|s| Rule::new(layer, s)))
                .collect(),
            capacity: reference
                .book()
                .pools()
                .map(|pool| (pool.id, pool.free))
                .collect(),
            reference,
            sequences: Vec::new(),
            saved: Vec::new(),
            random: Random::new(seed),
            names: 0,
            happened: BTreeMap::new(),
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.happened.entry(what).or_default() += 1;
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.random.below(one_in) == 0
    }

    fn pick(&mut self) -> usize {
        self.random.below(self.sequences.len() as u32) as usize
    }

    /// One random step; afterwards everything must be as the model says.
    fn step(&mut self, number: u64) {
        let most = self.reference.book().spec().sequences as usize + 2;
        let before = pages(self.reference.book());
        let choice = self.random.below(100);
        let changed = if self.sequences.is_empty() || choice < 6 && self.sequences.len() < most {
            self.open()
        } else if choice < 55 {
            self.append()
        } else if choice < 67 && self.sequences.len() < most {
            self.cut(true)
        } else if choice < 79 {
            self.cut(false)
        } else if choice < 84 {
            self.free()
        } else if choice < 88 {
            self.save()
        } else if choice < 93 && self.sequences.len() < most {
            self.restore()
        } else {
            self.check(true);
            self.poison();
            false
        };
        if !changed {
            assert_eq!(pages(self.reference.book()), before);
        }
        self.check(number.is_multiple_of(16));
    }

    fn open(&mut self) -> bool {
        let on_gpu = self.gpu.as_mut().map(|(_, cache)| cache.open());
        let id = self.reference.book_mut().open();
        self.sequences.push(Sequence {
            id,
            on_gpu,
            tokens: Vec::new(),
            sides: vec![Default::default(); self.rules.len()],
        });
        self.count("open");
        // What is sure to find room does.
        let room = self.reference.book().room();
        if room > 0 && self.chance(2) {
            let new = room.min(u64::from(MOST_NEW)) as u32;
            let book = self.reference.book_mut();
            let plan = book.plan(&[(id, new)], 1).unwrap();
            book.abandon(plan);
        }
        true
    }

    fn append(&mut self) -> bool {
        let count = 1 + self.random.below(self.sequences.len() as u32);
        let mut places = self.random.permutation(self.sequences.len() as u32);
        places.truncate(count as usize);
        let style = self.random.below(10);
        let new: Vec<u32> = places
            .iter()
            .map(|_| match style {
                0..4 => 1,
                4..8 => self.random.below(12),
                _ => self.random.below(MOST_NEW + 1),
            })
            .collect();
        let requests: Vec<_> = places
            .iter()
            .zip(new)
            .map(|(&place, new)| (place as usize, new))
            .collect();
        if self.try_append(&requests) {
            return true;
        }
        self.count("full");
        if self.chance(2) {
            return false;
        }
        // Room that others give back is there at once.
        let ids: Vec<_> = requests
            .iter()
            .map(|&(place, _)| self.sequences[place].id)
            .collect();
        while let Some(other) = self.sequences.iter().position(|other| !ids.contains(&other.id)) {
            self.free_at(other);
            let place = |id: SequenceId| self.sequences.iter().position(|s| s.id == id).unwrap();
            let again = ids
                .iter()
                .zip(&requests)
                .map(|(&id, request)| (place(id), request.1));
            let again: Vec<_> = again.collect();
            if self.try_append(&again) {
                self.count("full, then freed");
                break;
            }
        }
        true
    }

    /// Whether the step had room.
    fn try_append(&mut self, requests: &[(usize, u32)]) -> bool {
        let mut names = Vec::new();
        let mut after = Vec::new();
        for &(place, new) in requests {
            let end = self.names + u64::from(new);
            names.push(self.names..end);
            self.names = end;
            let mut sequence = self.sequences[place].clone();
            sequence.grow(&self.rules, names[names.len() - 1].clone());
            after.push(sequence);
        }
        let tokens: u32 = requests.iter().map(|request| request.1).sum();
        let ids = requests
            .iter()
            .map(|&(place, new)| (self.sequences[place].id, new));
        let ids: Vec<_> = ids.collect();
        let tile = 1 + self.random.below(9);
        let plan = match self.reference.book_mut().plan(&ids, tile) {
            Ok(plan) => plan,
            Err(error) => {
                assert!(matches!(error, Error::CacheFull { .. }), "{error}");
                self.is_short(requests, &after);
                let on_gpu = requests
                    .iter()
                    .map(|&(place, new)| (self.sequences[place].on_gpu, new));
                let on_gpu: Vec<_> = on_gpu.filter_map(|(id, new)| Some((id?, new))).collect();
                if let Some((_, cache)) = &mut self.gpu {
                    assert!(matches!(cache.step(&on_gpu), Err(Error::CacheFull { .. })));
                }
                return false;
            }
        };
        let layers = self.rules.len();
        let rows = (0..layers).map(|layer| [K, V].map(|s| step_rows(&names, layer, s)));
        let rows: Vec<_> = rows.collect();
        let dropped = self.chance(10);
        let attends = self.attends && tokens > 0 && self.chance(if tokens < 40 { 4 } else { 30 });
        let window = self.chance(3).then(|| 1 + self.random.below(40));
        let options = AttentionOptions {
            window,
            ..AttentionOptions::default()
        };
        let q = (0..tokens * Q_HEADS * HEAD_DIMS[K]).map(|_| self.random.normal());
        let q: Vec<f32> = if attends { q.collect() } else { Vec::new() };
        let on_gpu = self.step_on_gpu(requests, &rows, &q, window, dropped);
        let wide: Vec<f64> = q.iter().map(|&x| f64::from(x)).collect();
        for (layer, [k, v]) in rows.iter().enumerate() {
            self.reference.append(&plan, layer as u32, k, v).unwrap();
            if !attends {
                continue;
            }
            let (output, _) = self
                .reference
                .attend(&plan, layer as u32, &wide, &options)
                .unwrap();
            for _ in 0..4 {
                let sample = self.random.below(tokens * Q_HEADS);
                let (row, head) = (sample / Q_HEADS, sample % Q_HEADS);
                let mut first = 0;
                let of = requests.iter().position(|&(_, new)| {
                    first += new;
                    row < first
                });
                let sequence = &after[of.unwrap()];
                let at = sequence.len() - (first - row);
                let q = &wide[(sample * HEAD_DIMS[K]) as usize..][..HEAD_DIMS[K] as usize];
                let window = window.unwrap_or(u32::MAX) as usize;
                let kv_head = head / (Q_HEADS / KV_HEADS);
                let (wanted, largest) = sequence.attention(layer, kv_head, q, at as usize, window);
                let of_row = (sample * HEAD_DIMS[V]) as usize..((sample + 1) * HEAD_DIMS[V]) as usize;
                let close = |a: f64, b: f64, relative: f64| {
                    let off = (a - b).abs();
                    assert!(
                        off <= relative * largest.max(1.0),
                        "{a} for {b} of token {at}, layer {layer}"
                    );
                };
                for (&a, &b) in output[of_row.clone()].iter().zip(&wanted) {
                    close(a, b, 1e-9);
                }
                for (&a, &b) in on_gpu
                    .get(layer)
                    .map_or(&[][..], |o| &o[of_row])
                    .iter()
                    .zip(&wanted)
                {
                    // exp of a software driver, and scores in f32.
                    close(f64::from(a), b, 1e-5);
                }
            }
            self.count("attend");
        }
        if dropped {
            let taken_back_by_another = self.chance(2);
            let book = self.reference.book_mut();
            if taken_back_by_another {
                let other = book.plan(&[], 1).unwrap();
                assert!(matches!(book.commit(plan), Err(Error::Usage { .. })));
                book.abandon(other);
            } else {
                book.abandon(plan);
            }
            self.count("drop");
            return true;
        }
        self.reference.book_mut().commit(plan).unwrap();
        for (&(place, _), after) in requests.iter().zip(after) {
            self.sequences[place] = after;
        }
        self.count("append");
        true
    }

    /// A step without room needs more packed or waiting pages of some pool than there are, even where every open page
    /// that is shared is copied and none of its own comes back before the commit.
    fn is_short(&self, requests: &[(usize, u32)], after: &[Sequence]) {
        let book = self.reference.book();
        let page_tokens = book.spec().page_tokens;
        let short = book.pools().any(|pool| {
            let layer = book.geometry().classes[pool.id.class].layers[0] as usize;
            let rule = &self.rules[layer][pool.id.side];
            let needed = requests.iter().zip(after).map(|(&(place, _), after)| {
                let before = &self.sequences[place];
                let side = |sequence: &Sequence| sequence.sides[layer][pool.id.side].boundary;
                match pool.id.waiting {
                    false => side(after).div_ceil(page_tokens) - side(before) / page_tokens,
                    true if rule.waits || before.len() < rule.sinks => {
                        after.len().div_ceil(page_tokens) - before.len() / page_tokens
                    }
                    true => 0,
                }
            });
            needed.sum::<u32>() > pool.free
        });
        assert!(short, "refused, but there is room");
    }

    /// The outputs, by layer, where the step attends.
    fn step_on_gpu(
        &mut self,
        requests: &[(usize, u32)],
        rows: &[[Vec<f32>; 2]],
        q: &[f32],
        window: Option<u32>,
        dropped: bool,
    ) -> Vec<Vec<f32>> {
        let Some((gpu, cache)) = &mut self.gpu else {
            return Vec::new();
        };
        let requests = requests
            .iter()
            .map(|&(place, new)| (self.sequences[place].on_gpu.unwrap(), new));
        let requests: Vec<_> = requests.collect();
        let upload = |numbers: &[f32]| gpu.upload("rows", numbers).unwrap();
        let rows: Vec<_> = rows
            .iter()
            .map(|sides| [K, V].map(|s| upload(&sides[s])))
            .collect();
        let numbers = q.len() / HEAD_DIMS[K] as usize * HEAD_DIMS[V] as usize;
        let outputs = rows
            .iter()
            .map(|_| gpu.upload("output", &vec![f32::NAN; numbers]).unwrap());
        let (queries, outputs): (_, Vec<_>) = (upload(q), outputs.collect());
        let options = AttentionOptions {
            window,
            ..AttentionOptions::default()
        };
        let step = cache.step(&requests).unwrap();
        gpu.submit("step", |encoder| {
            for (layer, ([k, v], output)) in (0..).zip(rows.iter().zip(&outputs)) {
                step.append(encoder, layer, k, v)?;
                if !q.is_empty() {
                    step.attend(encoder, layer, &queries, output, &options)?;
                }
            }
            Ok(())
        })
        .unwrap();
        match dropped {
            true => drop(step),
            false => step.commit().unwrap(),
        }
        if q.is_empty() {
            return Vec::new();
        }
        outputs
            .iter()
            .map(|output| gpu.read("output", output, numbers).unwrap())
            .collect()
    }

    /// Forks or truncates a sequence at a length that may not work; then at the one that the error names.
    fn cut(&mut self, fork: bool) -> bool {
        let place = self.pick();
        let len = self.sequences[place].len();
        let asked = match self.random.below(5) {
            0 => len,
            1 => len.saturating_sub(self.random.below(8)),
            2 => self.random.below(len + 1) / 8 * 8,
            _ => self.random.below(len + 4),
        };
        let Err(error) = self.cut_to(fork, place, asked) else {
            return true;
        };
        let said = error.to_string();
        assert!(matches!(error, Error::Usage { .. }), "{said}");
        self.count("cut refused");
        if asked > len {
            assert!(said.contains(&format!("it has {len}")), "{said}");
            return false;
        }
        let (_, named) = said.split_once("the nearest length that works is ").unwrap();
        let named: u32 = named.split(' ').next().unwrap().parse().unwrap();
        let works = |&n: &u32| self.sequences[place].may_end_at(&self.rules, n);
        let nearest = (0..=len).filter(works).map(|n| n.abs_diff(asked)).min();
        assert_eq!(nearest, Some(named.abs_diff(asked)), "{said}");
        if self.chance(2) {
            return false;
        }
        self.cut_to(fork, place, named).unwrap();
        true
    }

    fn cut_to(&mut self, fork: bool, place: usize, len: u32) -> Result<()> {
        let works = self.sequences[place].may_end_at(&self.rules, len);
        let mut shorter = self.sequences[place].clone();
        let book = self.reference.book_mut();
        let result = match fork {
            true => book.fork(shorter.id, len).map(|id| shorter.id = id),
            false => book.truncate(shorter.id, len),
        };
        assert_eq!(result.is_ok(), works, "{result:?}");
        if let (Some((_, cache)), Some(id)) = (&mut self.gpu, shorter.on_gpu) {
            let result = match fork {
                true => cache.fork(id, len).map(|id| shorter.on_gpu = Some(id)),
                false => cache.truncate(id, len),
            };
            assert_eq!(result.is_ok(), works, "{result:?}");
        }
        result?;
        shorter.cut(&self.rules, len);
        match fork {
            true => self.sequences.push(shorter),
            false => self.sequences[place] = shorter,
        }
        self.count(if fork { "fork" } else { "truncate" });
        Ok(())
    }

    fn free(&mut self) -> bool {
        let place = self.pick();
        self.free_at(place);
        true
    }

    fn free_at(&mut self, place: usize) {
        let sequence = self.sequences.remove(place);
        self.reference.book_mut().free(sequence.id).unwrap();
        if let (Some((_, cache)), Some(id)) = (&mut self.gpu, sequence.on_gpu) {
            cache.free(id).unwrap();
        }
        self.count("free");
    }

    fn save(&mut self) -> bool {
        let place = self.pick();
        let bytes = self.reference.save(self.sequences[place].id).unwrap();
        let saved = (bytes, self.sequences[place].clone());
        match self.random.below(4) as usize {
            slot if slot < self.saved.len() => self.saved[slot] = saved,
            _ => self.saved.push(saved),
        }
        self.count("save");
        false
    }

    fn restore(&mut self) -> bool {
        if self.saved.is_empty() {
            return false;
        }
        let chosen = self.random.below(self.saved.len() as u32) as usize;
        let (mut bytes, mut sequence) = self.saved[chosen].clone();
        let damaged = self.chance(4);
        if damaged {
            let at = self.random.below(bytes.len() as u32) as usize;
            bytes[at] ^= 1 << self.random.below(8);
        }
        let book = self.reference.book();
        let page_tokens = book.spec().page_tokens;
        let fits = book.pools().all(|pool| {
            let layer = book.geometry().classes[pool.id.class].layers[0] as usize;
            let boundary = sequence.sides[layer][pool.id.side].boundary;
            let places = self.rules[layer][pool.id.side].places(boundary, sequence.len(), page_tokens);
            places[usize::from(pool.id.waiting)].len() as u32 <= pool.free
        });
        let result = self.reference.restore(&bytes);
        let on_gpu = self.gpu.as_mut().map(|(_, cache)| cache.restore(&bytes));
        for result in [Some(&result), on_gpu.as_ref()].into_iter().flatten() {
            match result {
                Err(Error::Restore { .. }) => assert!(damaged),
                Err(Error::CacheFull { .. }) => assert!(!damaged && !fits),
                result => assert!(!damaged && fits, "{result:?}"),
            }
        }
        let Ok(id) = result else {
            self.count(if damaged {
                "damaged"
            } else {
                "restore without room"
            });
            return false;
        };
        sequence.id = id;
        sequence.on_gpu = on_gpu.map(Result::unwrap);
        self.sequences.push(sequence);
        self.count("restore");
        true
    }

    /// Overwrites with ones whatever belongs to no live token of any sequence.
    fn poison(&mut self) {
        let mut live: BTreeMap<(u32, PoolId, u32), Vec<u32>> = BTreeMap::new();
        for sequence in &self.sequences {
            for page in self.reference.book().held_pages(sequence.id).unwrap() {
                let mask = page.live_words(&vec![u32::MAX; page.layout.words as usize]);
                let all = live
                    .entry((page.layer, page.pool, page.page))
                    .or_insert_with(|| vec![0; mask.len()]);
                all.iter_mut().zip(mask).for_each(|(all, one)| *all |= one);
            }
        }
        let pools: Vec<_> = self.reference.book().pools().collect();
        let class_of = self.reference.book().geometry().class_of.clone();
        for (layer, class) in (0..).zip(class_of) {
            for state in pools.iter().filter(|pool| pool.id.class == class) {
                let (id, page_words) = (state.id, state.layout.words as usize);
                let words = self.reference.pool_mut(layer, id.side, id.waiting).unwrap();
                for (page, words) in (0..).zip(words.chunks_mut(page_words)) {
                    let mask = live.get(&(layer, id, page));
                    for (i, word) in words.iter_mut().enumerate() {
                        *word |= !mask.map_or(0, |mask| mask[i]);
                    }
                }
                let Some((gpu, cache)) = &self.gpu else { continue };
                // The live words on both sides have just been found equal, page by page.
                let state = pool(cache.book(), id);
                let per_buffer = state.per_buffer as usize * page_words;
                let made = &words[..state.made as usize * page_words];
                for (number, words) in (0..).zip(made.chunks(per_buffer)) {
                    let buffer = cache.buffer(layer, id.side, id.waiting, number).unwrap();
                    gpu.queue().write_buffer(buffer, 0, bytemuck::cast_slice(words));
                }
            }
        }
        self.count("poison");
    }

    fn check(&mut self, all: bool) {
        let sample = self.random.below(self.sequences.len().max(1) as u32) as usize;
        let book = self.reference.book();
        let page_tokens = book.spec().page_tokens;
        let mut holders: BTreeMap<(PoolId, u32), BTreeSet<Holder>> = BTreeMap::new();
        for (number, sequence) in self.sequences.iter().enumerate() {
            let len = sequence.len();
            assert_eq!(book.len(sequence.id).unwrap(), len);
            let mut held = book.held_pages(sequence.id).unwrap().into_iter();
            for (layer, (sides, rules)) in (0..).zip(sequence.sides.iter().zip(&self.rules)) {
                let boundaries = [sides[K].boundary, sides[V].boundary];
                assert_eq!(book.boundaries(sequence.id, layer).unwrap(), boundaries);
                for (s, (life, rule)) in sides.iter().zip(rules).enumerate() {
                    let words = (all || number == sample || number + 1 == self.sequences.len())
                        .then(|| self.reference.live_words(sequence.id, layer, s).unwrap());
                    let mut rest = words.as_deref();
                    let places = rule.places(life.boundary, len, page_tokens);
                    for (waiting, place) in
                        (0..2).flat_map(|w| places[w].iter().map(move |&place| (w == 1, place)))
                    {
                        let page = held.next().unwrap();
                        assert_eq!(
                            (page.layer, page.pool.side, page.pool.waiting),
                            (layer, s, waiting)
                        );
                        let read = page.live.iter().filter(|live| !live.is_empty());
                        let end = place * page_tokens + read.map(|live| live.end).max().unwrap_or(0);
                        holders.entry((page.pool, page.page)).or_default().insert(Holder {
                            sequence: number,
                            place,
                            end,
                        });
                        let Some(words) = rest else { continue };
                        let (words, after) = words.split_at(page.layout.words as usize);
                        rest = Some(after);
                        let tokens = place * page_tokens..len.min((place + 1) * page_tokens);
                        for token in tokens.filter(|&token| rule.full(life.boundary, token) == waiting) {
                            let slot = token % page_tokens;
                            assert!(
                                page.live.iter().any(|live| live.contains(&slot)),
                                "token {token} is not live"
                            );
                            for (i, &wanted) in (0..).zip(&life.numbers[token as usize][..]) {
                                let (head, channel) = (i / rule.dim, i % rule.dim);
                                let is = page.layout.number(words, slot, head, channel, rule.tensor_scale);
                                assert!(
                                    is == wanted,
                                    "{is} for {wanted}: sequence {number}, layer {layer}, side {s}, token {token} of \
                                     {len}, boundary {}, {rule:?}",
                                    life.boundary
                                );
                            }
                        }
                    }
                }
            }
            assert!(held.next().is_none());
            if let (Some((gpu, cache)), Some(id)) = (&self.gpu, sequence.on_gpu) {
                let saved = gpu.block_on(cache.save(id).unwrap()).unwrap();
                assert!(
                    saved == self.reference.save(sequence.id).unwrap(),
                    "the GPU's sequence {number} differs"
                );
            }
        }
        let books = [Some(book), self.gpu.as_ref().map(|(_, cache)| cache.book())];
        for book in books.into_iter().flatten() {
            for pool in book.pools() {
                let used = holders.keys().filter(|(id, _)| *id == pool.id).count() as u32;
                assert_eq!(
                    (pool.used, pool.used + pool.free),
                    (used, self.capacity[&pool.id]),
                    "{:?}",
                    pool.id
                );
            }
        }
        if let Some((_, cache)) = &self.gpu {
            assert_eq!(pages(cache.book()), pages(book));
            assert!(cache.allocated_bytes() <= book.spec().budget);
        }
        // Who shares a page has the same tokens up to the last one that both read there.
        for sharing in holders.values() {
            let of = |holder: &Holder| {
                let tokens = &self.sequences[holder.sequence].tokens;
                (holder.place, &tokens[..holder.end as usize])
            };
            let longest = sharing
                .iter()
                .map(of)
                .max_by_key(|(_, tokens)| tokens.len())
                .unwrap();
            for (place, tokens) in sharing.iter().map(of) {
                assert!(
                    place == longest.0 && longest.1.starts_with(tokens),
                    "others' pages are shared"
                );
            }
        }
    }

    /// Frees everything: no page stays in use.
    fn end(&mut self) {
        while !self.sequences.is_empty() {
            self.free();
            self.check(false);
        }
        assert!(self.reference.book().pools().all(|pool| pool.used == 0));
        if let Some((gpu, cache)) = &self.gpu {
            assert!(cache.book().pools().all(|pool| pool.used == 0));
            let status = gpu.block_on(cache.status().unwrap()).unwrap();
            assert_eq!(status, self.reference.status());
        }
    }
}

const PAIRS: [&str; 9] = [
    "int4c(8)/int8",
    "int2c(32)/fp4",
    "f16",
    "int8c(16)/int4",
    "fp8",
    "int4/int2",
    "int8/int4c(8)",
    "fp4/int8c(16)",
    "int2/fp8",
];

/// A small cache of one to three layers that are stored in one or two ways.
fn random_spec(random: &mut Random, pairs: &[&str], page_tokens: &[u32]) -> CacheSpec {
    let pick = |from: &[u32], random: &mut Random| from[random.below(from.len() as u32) as usize];
    let mut ways = Vec::new();
    for _ in 0..1 + random.below(2) {
        let pair: Pair = pairs[random.below(pairs.len() as u32) as usize].parse().unwrap();
        ways.push(LayerSpec {
            window: [0; 2].map(|_| pick(&[0, 5, 8, 40], random)),
            sink_tokens: [0; 2].map(|_| pick(&[0, 3, 16, 70], random)),
            ..LayerSpec::new(pair)
        });
    }
    let layers = (0..1 + random.below(3)).map(|_| ways[random.below(ways.len() as u32) as usize]);
    let layers: Vec<_> = layers.collect();
    let groups = layers.iter().flat_map(|layer| [layer.pair.k, layer.pair.v]);
    let longest = groups.map(|side| side.layout.token_group()).max().unwrap();
    let fitting: Vec<_> = page_tokens
        .iter()
        .copied()
        .filter(|tokens| tokens.is_multiple_of(longest))
        .collect();
    let spec = CacheSpec {
        v_head_dim: HEAD_DIMS[V],
        page_tokens: pick(&fitting, random),
        sequences: 2 + random.below(5),
        tensor_scales: TensorScales::Given(vec![SCALES; layers.len()]),
        layers,
        ..CacheSpec::new(1, Q_HEADS, KV_HEADS, HEAD_DIMS[K], Pair::same(Side::F16), 0)
    };
    let spec = spec.with_pages(6 + random.below(15)).unwrap();
    CacheSpec {
        growth: spec.budget / 5,
        ..spec
    }
}

/// Lives of `steps` steps each, one for each seed; how often what happened.
fn live(
    seeds: std::ops::Range<u64>,
    steps: u64,
    gpu: Option<&Gpu>,
    attends: bool,
    spec: impl Fn(&mut Random) -> CacheSpec,
) -> BTreeMap<&'static str, u64> {
    let mut happened = BTreeMap::new();
    for seed in seeds {
        let spec = spec(&mut Random::new(seed));
        let what = format!("seed {seed}: {spec:?}");
        let mut world = World::new(spec, gpu, attends, seed);
        // Named only where it fails: assertions within know nothing of it.
        let run = std::panic::AssertUnwindSafe(|| {
            (0..steps).for_each(|number| world.step(number));
            world.end();
        });
        if let Err(panic) = std::panic::catch_unwind(run) {
            say(&format!("{what}, {:?}", world.happened));
            std::panic::resume_unwind(panic);
        }
        for (what, count) in world.happened {
            *happened.entry(what).or_default() += count;
        }
    }
    happened
}

fn on_the_reference(seeds: std::ops::Range<u64>, steps: u64) {
    let lives = seeds.end - seeds.start;
    let happened = live(seeds, steps, None, true, |random| {
        random_spec(random, &PAIRS, &[16, 32, 48, 64])
    });
    say(&format!("kvpack: {lives} lives of {steps} steps: {happened:?}"));
    for what in [
        "append",
        "attend",
        "cut refused",
        "damaged",
        "drop",
        "fork",
        "full, then freed",
        "poison",
        "restore",
        "restore without room",
        "truncate",
    ] {
        assert!(
            happened.get(what).is_some_and(|&count| count > 5),
            "{what}: {happened:?}"
        );
    }
}

#[test]
fn random_lives_on_the_reference_are_the_models() {
    on_the_reference(0..25, 100);
}

/// Minutes: `cargo test --release --test suite long_random_lives -- --ignored`.
#[test]
#[ignore]
fn long_random_lives_on_the_reference_are_the_models() {
    on_the_reference(1000..1500, 200);
}

#[test]
fn random_lives_on_the_gpu_are_the_references() {
    let Some(gpu) = gpu("random_lives_on_the_gpu_are_the_references") else {
        return;
    };
    // Few formats and one page length: each kernel of attention takes a driver a second.
    let few = |random: &mut Random| random_spec(random, &["int4c(8)/int8", "f16"], &[16]);
    live(0..4, 40, Some(gpu), true, few);
    let others = |random: &mut Random| random_spec(random, &["int2c(32)/fp4", "fp8/int8c(16)"], &[32]);
    live(4..8, 40, Some(gpu), false, others);
}
