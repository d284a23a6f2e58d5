//! One side of one layer of one prompt: rows, and what the pages hold of them.

use crate::cache::HeldPage;
use crate::pages::PageLayout;
use crate::scales::{BLOCK_CHANNELS, ScaleLayout};

/// Of a token that is not packed by the end of the prompt.
pub const NEVER: u32 = 0;

/// What one side of one layer had of the shown tokens and heads.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredSide {
    /// The packed pages.
    pub packed: PageLayout,
    /// The pages in which tokens wait, where they do.
    pub waits: Option<PageLayout>,
    /// Rows as computed, `[token][head][channel]`.
    pub rows: Vec<f32>,
    /// Words of codes from the packed pages, `[token][head][head word]`; 0 for tokens that are not packed.
    pub words: Vec<u32>,
    /// Stored scales as bits, from the packed pages; 0 for tokens that are not packed. By layout: per token
    /// `[token][head]`; per block `[token][block of the whole row]`; per channel `[token group][head][channel]`, the groups in
    /// which shown tokens lie, in their order; none otherwise.
    pub scales: Vec<u32>,
    /// The token groups of `scales`, where scales are per channel.
    pub groups: Vec<u32>,
    /// Words of the rows while they wait in full precision, `[token][head][word]`; 0 for tokens that were packed in the same
    /// step as they came. Empty where the side does not wait.
    pub waiting: Vec<u32>,
    /// Tokens in the cache when each shown token was packed, appended one by one; [`NEVER`] where it was not.
    pub packed_at: Vec<u32>,
    /// What packing did to the shown numbers, by shown head.
    pub losses: Vec<Loss>,
}

/// What packing did to some numbers.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loss {
    /// Packed numbers.
    pub numbers: u64,
    /// Of these, those that were not 0 before.
    pub nonzero: u64,
    /// Of these, those that read back as 0.
    pub zeroed: u64,
    /// Sum of (read back - computed)^2.
    pub error: f64,
    /// Sum of computed^2.
    pub power: f64,
}

impl Loss {
    /// Both together.
    pub fn plus(self, other: Loss) -> Loss {
        Loss {
            numbers: self.numbers + other.numbers,
            nonzero: self.nonzero + other.nonzero,
            zeroed: self.zeroed + other.zeroed,
            error: self.error + other.error,
            power: self.power + other.power,
        }
    }

    /// Share of numbers that were not 0 and read back as 0.
    pub fn zeroed_share(&self) -> f64 {
        match self.nonzero {
            0 => 0.0,
            nonzero => self.zeroed as f64 / nonzero as f64,
        }
    }

    /// Relative L2 error.
    pub fn relative_error(&self) -> f64 {
        match self.error == 0.0 {
            true => 0.0,
            false => (self.error / self.power).sqrt(),
        }
    }
}

impl StoredSide {
    /// Rows of all heads and tokens, cut to the shown ones; nothing stored yet.
    pub(super) fn new(
        packed: PageLayout,
        waits: Option<PageLayout>,
        rows: &[f32],
        heads: &[u32],
        tokens: &[u32],
    ) -> StoredSide {
        let (d, row) = (
            packed.head_dim as usize,
            (packed.heads * packed.head_dim) as usize,
        );
        let of = |token: u32, head: u32| &rows[token as usize * row + head as usize * d..][..d];
        let shown = tokens.len() * heads.len();
        let mut groups: Vec<u32> = Vec::new();
        if let ScaleLayout::PerChannel { group } = packed.side.layout {
            groups.extend(tokens.iter().map(|token| token / group));
            groups.dedup();
        }
        let scales = match packed.side.layout {
            ScaleLayout::None | ScaleLayout::PerTensor => 0,
            ScaleLayout::PerToken => shown,
            ScaleLayout::PerBlock => tokens.len() * row / BLOCK_CHANNELS as usize,
            ScaleLayout::PerChannel { .. } => groups.len() * heads.len() * d,
        };
        StoredSide {
            packed,
            waits,
            rows: tokens
                .iter()
                .flat_map(|&token| heads.iter().flat_map(move |&head| of(token, head)))
                .copied()
                .collect(),
            words: vec![0; shown * packed.head_words as usize],
            scales: vec![0; scales],
            groups,
            waiting: vec![0; waits.map_or(0, |page| shown * page.head_words as usize)],
            packed_at: vec![NEVER; tokens.len()],
            losses: vec![Loss::default(); heads.len()],
        }
    }

    /// Takes over what the pages hold of packed tokens.
    pub(super) fn take_packed(
        &mut self,
        pages: &[(HeldPage, Vec<u32>)],
        heads: &[u32],
        tokens: &[u32],
        tensor_scale: f32,
    ) {
        for_each(pages, tokens, |page, words, slot, index, token| {
            if page.pool.waiting {
                return;
            }
            let layout = &page.layout;
            for (h, &head) in heads.iter().enumerate() {
                let place = index * heads.len() + h;
                let n = layout.head_words as usize;
                for (w, word) in self.words[place * n..][..n].iter_mut().enumerate() {
                    *word = words[layout
                        .code_at(slot, head, w as u32 * layout.side.element.per_word())
                        .0 as usize];
                }
                let d = layout.head_dim as usize;
                let rows = &self.rows[place * d..][..d];
                for (channel, &x) in (0..).zip(rows) {
                    let y = layout.number(words, slot, head, channel, tensor_scale);
                    let (x, y) = (f64::from(x), f64::from(y));
                    let loss = &mut self.losses[h];
                    loss.numbers += 1;
                    loss.nonzero += u64::from(x != 0.0);
                    loss.zeroed += u64::from(x != 0.0 && y == 0.0);
                    loss.error += (y - x).powi(2);
                    loss.power += x.powi(2);
                }
            }
            let mut scale = |at: usize, head: u32, channel: u32| {
                if let Some((word, bit)) = layout.scale_at(slot, head, channel) {
                    self.scales[at] =
                        (words[word as usize] >> bit) & (u32::MAX >> (32 - layout.side.scale.bits()));
                }
            };
            let d = layout.head_dim;
            match layout.side.layout {
                ScaleLayout::None | ScaleLayout::PerTensor => {}
                ScaleLayout::PerToken => {
                    for (h, &head) in heads.iter().enumerate() {
                        scale(index * heads.len() + h, head, 0);
                    }
                }
                ScaleLayout::PerBlock => {
                    let blocks = layout.heads * d / BLOCK_CHANNELS;
                    for block in 0..blocks {
                        let first = block * BLOCK_CHANNELS;
                        scale(index * blocks as usize + block as usize, first / d, first % d);
                    }
                }
                ScaleLayout::PerChannel { group } => {
                    let g = self.groups.iter().position(|&g| g == token / group).unwrap_or(0);
                    for (h, &head) in heads.iter().enumerate() {
                        for channel in 0..d {
                            scale(
                                (g * heads.len() + h) * d as usize + channel as usize,
                                head,
                                channel,
                            );
                        }
                    }
                }
            }
        });
    }

    /// Takes over what the pages hold of waiting tokens.
    pub(super) fn take_waiting(&mut self, pages: &[(HeldPage, Vec<u32>)], heads: &[u32], tokens: &[u32]) {
        for_each(pages, tokens, |page, words, slot, index, _| {
            if !page.pool.waiting {
                return;
            }
            let layout = &page.layout;
            let n = layout.head_words as usize;
            for (h, &head) in heads.iter().enumerate() {
                let to = &mut self.waiting[(index * heads.len() + h) * n..][..n];
                for (w, word) in to.iter_mut().enumerate() {
                    *word = words[layout
                        .code_at(slot, head, w as u32 * layout.side.element.per_word())
                        .0 as usize];
                }
            }
        });
    }
}

/// Calls `each` with page, words, slot, place among the shown tokens and token, for every shown token that a page has.
fn for_each(
    pages: &[(HeldPage, Vec<u32>)],
    shown: &[u32],
    mut each: impl FnMut(&HeldPage, &[u32], u32, usize, u32),
) {
    // Packed pages come first, then those of waiting tokens: the order of the tokens, as there are no sinks.
    let mut token = 0;
    for (page, words) in pages {
        for slot in page.live.iter().cloned().flatten() {
            if let Ok(index) = shown.binary_search(&token) {
                each(page, words, slot, index, token);
            }
            token += 1;
        }
    }
}
