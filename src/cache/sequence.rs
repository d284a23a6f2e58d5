//! Sequences: which pages hold their tokens, and where they may be cut.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use super::pool::PoolId;
use super::spec::{Class, K, V};
use crate::pages::PageLayout;

/// A sequence of a cache. Never used again, nor by another cache of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    /// The number by which errors name it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One side of a sequence in layers of one class: tokens below the boundary are packed, the rest wait.
#[derive(Debug, Clone, Default)]
pub(super) struct SideState {
    pub boundary: u32,
    /// Packed pages, by their place in the sequence.
    pub packed: Vec<u32>,
    /// Pages in full precision, by their place in the sequence: sink tokens, and those that wait.
    pub waiting: BTreeMap<u32, u32>,
}

#[derive(Debug, Clone)]
pub(super) struct Sequence {
    pub len: u32,
    /// By class.
    pub sides: Vec<[SideState; 2]>,
}

/// A page that a sequence holds in one layer.
#[derive(Debug, Clone)]
pub struct HeldPage {
    /// The layer.
    pub layer: u32,
    /// Its pool.
    pub pool: PoolId,
    /// Its number in the pool.
    pub page: u32,
    /// Its geometry.
    pub layout: PageLayout,
    /// The slots of the sequence's tokens: sink tokens, then others.
    pub live: [Range<u32>; 2],
}

impl HeldPage {
    /// The page's words with everything that belongs to no live token read as zero.
    pub fn live_words(&self, page: &[u32]) -> Vec<u32> {
        let [first, second] = self.live.clone();
        let mut words = self.layout.live_words(page, first.start, first.end);
        if second.start < second.end {
            let more = self.layout.live_words(page, second.start, second.end);
            words.iter_mut().zip(more).for_each(|(word, more)| *word |= more);
        }
        words
    }
}

/// Cuts the words of some pages, one after the other, page by page.
pub(crate) fn by_page(pages: Vec<HeldPage>, words: &[u32]) -> Vec<(HeldPage, Vec<u32>)> {
    let mut rest = words;
    let mut cut = Vec::new();
    for page in pages {
        let (words, after) = rest.split_at(rest.len().min(page.layout.words as usize));
        cut.push((page, words.to_vec()));
        rest = after;
    }
    cut
}

/// The pages that a sequence holds.
pub(super) fn held(sequence: &Sequence) -> impl Iterator<Item = (PoolId, u32)> + '_ {
    let classes = sequence.sides.iter().enumerate();
    let sides = classes.flat_map(|(class, sides)| [K, V].map(|side| (class, side, &sides[side])));
    sides.flat_map(|(class, side, state)| {
        let id = move |waiting| PoolId { class, side, waiting };
        let packed = state.packed.iter().map(move |&page| (id(false), page));
        packed.chain(state.waiting.values().map(move |&page| (id(true), page)))
    })
}

/// The boundary after a truncation to `len` tokens, where the side allows it.
pub(super) fn cut(class: &Class, side: usize, state: &SideState, len: u32) -> Option<u32> {
    let group = class.packed[side].side.layout.token_group();
    if !class.waits[side] {
        Some(len)
    } else if len >= state.boundary {
        Some(state.boundary)
    } else if len.is_multiple_of(group) || len <= class.sink_tokens[side] {
        // What is left of a group of sink tokens is in full precision still.
        Some(len / group * group)
    } else {
        None
    }
}

/// Whether any token of a page in full precision is still read there: sink tokens, and those from the boundary on.
pub(super) fn is_waiting(place: u32, page_tokens: u32, sinks: u32, boundary: u32, len: u32) -> bool {
    let (start, end) = (place * page_tokens, ((place + 1) * page_tokens).min(len));
    start < sinks.min(len) || (start < end && end > boundary)
}

/// How many pages of a sequence [`is_waiting`] tells of.
pub(super) fn waiting_places(page_tokens: u32, sinks: u32, boundary: u32, len: u32) -> u64 {
    let pages = len.div_ceil(page_tokens);
    let sinks = sinks.min(len).div_ceil(page_tokens);
    let waiting = if boundary < len {
        boundary / page_tokens
    } else {
        pages
    };
    u64::from(sinks.min(waiting)) + u64::from(pages - waiting)
}
