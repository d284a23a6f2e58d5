//! Page geometry, in integers: where each word of a page is. No GPU.
//!
//! A page holds P tokens of one layer and one side, all KV heads, as a run of planes of 32-bit words:
//!
//! ```text
//! code plane   word w of slot t at   w * P + t        w = head * head_words + word of the head
//! scale plane  per token, per block: element g * P + t
//!              per channel:          element (j * H * d) + c        j = token group in the page, c = h * d + channel
//! ```
//!
//! Element i of a word sits at bits [i b, (i + 1) b): the lowest channel in the lowest bits. Each head starts on a
//! word. Scale elements are 8, 16 or 32 bits wide, the lowest element in the lowest bits. Each plane is padded to 16
//! bytes at its end. Token t of a sequence sits in page t / P at slot t mod P, in every format.

use crate::error::{Error, Result};
use crate::scales::{BLOCK_CHANNELS, GROUPS, ScaleLayout};
use crate::spec::Side;

/// The largest head_dim that kernels serve.
pub const MAX_HEAD_DIM: u32 = 256;

/// The most words of a page: 64 MiB.
const MAX_PAGE_WORDS: u64 = 1 << 24;

/// The geometry of one side's pages. All counts are in words of 32 bits unless named otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageLayout {
    /// How the numbers are stored.
    pub side: Side,
    /// KV heads H.
    pub heads: u32,
    /// Channels of a head, d.
    pub head_dim: u32,
    /// Tokens of a page, P.
    pub tokens: u32,
    /// Words of one head of one token.
    pub head_words: u32,
    /// Where the scale plane begins.
    pub scale_offset: u32,
    /// Scales in the plane.
    pub scale_elements: u32,
    /// Words of a whole page: a multiple of 4.
    pub words: u32,
}

impl PageLayout {
    /// Checks a shape and computes its geometry.
    ///
    /// # Errors
    /// [`Error::Shape`] names the value, the rule and what to do: `head_dim` a multiple of 8 up to [`MAX_HEAD_DIM`],
    /// `tokens` a multiple of 8 and of the side's group, up to 4096, heads x head_dim a multiple of 16 for block scales.
    /// [`Error::Usage`] for f32 or f16 with a scale, or another element without one.
    pub fn new(side: Side, heads: u32, head_dim: u32, tokens: u32) -> Result<PageLayout> {
        let refuse = |what, value: u32, limit: String, advice: &str| {
            Err(Error::Shape {
                what,
                value: u64::from(value),
                limit,
                advice: advice.to_owned(),
            })
        };
        let plain = side.element.info().plain;
        if plain != (side.layout == ScaleLayout::None) {
            return Err(Error::Usage {
                asked: format!("a side `{side}`"),
                reason: format!(
                    "{} {}",
                    side.element.info().name,
                    if plain {
                        "is stored without a scale"
                    } else {
                        "needs a scale"
                    }
                ),
                advice: format!("use a named side: {}", crate::spec::known_names()),
            });
        }
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM {
            let limit = format!("head_dim is a multiple of 8 from 8 to {MAX_HEAD_DIM}");
            return refuse(
                "head_dim",
                head_dim,
                limit,
                "pad the heads or choose another model shape",
            );
        }
        if heads == 0 || heads > 1024 {
            return refuse(
                "kv_heads",
                heads,
                "1 to 1024 KV heads".to_owned(),
                "check the model's configuration",
            );
        }
        if tokens == 0 || !tokens.is_multiple_of(8) || tokens > 4096 {
            let limit = "a page holds a multiple of 8 tokens, at most 4096".to_owned();
            return refuse(
                "page_tokens",
                tokens,
                limit,
                "use 64 unless a longer group asks for more",
            );
        }
        let group = side.layout.token_group();
        if matches!(side.layout, ScaleLayout::PerChannel { group } if !GROUPS.contains(&group)) {
            let limit = "a group is 8, 16, 32, 64 or 128 tokens".to_owned();
            return refuse(
                "group",
                group,
                limit,
                "name the side with one of these, for example int4c(32)",
            );
        }
        if !tokens.is_multiple_of(group) {
            let limit = format!("the group G = {group} of `{side}` must divide the page");
            return refuse(
                "page_tokens",
                tokens,
                limit,
                "choose a page that is a multiple of G, or a smaller G",
            );
        }
        let blocks_fit = (heads * head_dim).is_multiple_of(BLOCK_CHANNELS);
        if side.layout == ScaleLayout::PerBlock && !blocks_fit {
            let limit = format!(
                "`{side}` shares scales over blocks of {BLOCK_CHANNELS} channels, so kv_heads x head_dim must be a \
                 multiple of {BLOCK_CHANNELS}; here it is {heads} x {head_dim} = {}",
                heads * head_dim
            );
            return refuse(
                "head_dim",
                head_dim,
                limit,
                "choose a per-token or per-channel side",
            );
        }
        if side.layout == ScaleLayout::PerBlock && !(head_dim * side.element.bits()).is_multiple_of(32) {
            let limit =
                format!("blocks of `{side}` may span heads, so the codes of a head must fill whole words");
            return refuse(
                "head_dim",
                head_dim,
                limit,
                "choose a head_dim that is a multiple of 16, or another side",
            );
        }
        let head_words = (head_dim * side.element.bits()).div_ceil(32);
        let [wide_heads, wide_tokens] = [heads, tokens].map(u64::from);
        let row = wide_heads * u64::from(head_dim);
        let scale_elements = match side.layout {
            ScaleLayout::None | ScaleLayout::PerTensor => 0,
            ScaleLayout::PerToken => wide_heads * wide_tokens,
            ScaleLayout::PerBlock => row / u64::from(BLOCK_CHANNELS) * wide_tokens,
            ScaleLayout::PerChannel { group } => row * (wide_tokens / u64::from(group)),
        };
        let scale_words = (scale_elements * u64::from(side.scale.bits())).div_ceil(32);
        let scale_offset = (wide_heads * u64::from(head_words) * wide_tokens).next_multiple_of(4);
        let words = scale_offset + scale_words.next_multiple_of(4);
        if words > MAX_PAGE_WORDS {
            let limit = format!(
                "a page of {heads} heads of {head_dim} may take {MAX_PAGE_WORDS} words; this takes {words}"
            );
            return refuse("page_tokens", tokens, limit, "use shorter pages");
        }
        // Below 2^24: the casts keep every bit.
        let [scale_elements, scale_offset, words] = [scale_elements, scale_offset, words].map(|n| n as u32);
        Ok(PageLayout {
            side,
            heads,
            head_dim,
            tokens,
            head_words,
            scale_offset,
            scale_elements,
            words,
        })
    }

    /// Bytes of a page.
    pub fn bytes(&self) -> u64 {
        u64::from(self.words) * 4
    }

    /// Where a page's words lie in its pool.
    pub fn range(&self, page: u32) -> std::ops::Range<usize> {
        let words = self.words as usize;
        page as usize * words..(page as usize + 1) * words
    }

    /// Bytes of a page that hold codes, padding inside head words included.
    pub fn code_bytes(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.head_words) * u64::from(self.tokens) * 4
    }

    /// Bytes of a page that hold scales.
    pub fn scale_bytes(&self) -> u64 {
        u64::from(self.scale_elements) * u64::from(self.side.scale.bits()) / 8
    }

    /// Bytes of a page that hold nothing: the ends of head words and of planes.
    pub fn padding_bytes(&self) -> u64 {
        let numbers = u64::from(self.heads) * u64::from(self.head_dim) * u64::from(self.tokens);
        self.bytes() - self.scale_bytes() - numbers * u64::from(self.side.element.bits()) / 8
    }

    /// The word that holds a number's code, and the code's first bit in it.
    pub fn code_at(&self, slot: u32, head: u32, channel: u32) -> (u32, u32) {
        let per_word = self.side.element.per_word();
        let word = head * self.head_words + channel / per_word;
        (
            word * self.tokens + slot,
            channel % per_word * self.side.element.bits(),
        )
    }

    /// The word that holds a number's scale, and the scale's first bit in it; none where pages carry no scales.
    pub fn scale_at(&self, slot: u32, head: u32, channel: u32) -> Option<(u32, u32)> {
        let row_channel = head * self.head_dim + channel;
        let element = match self.side.layout {
            ScaleLayout::None | ScaleLayout::PerTensor => return None,
            ScaleLayout::PerToken => head * self.tokens + slot,
            ScaleLayout::PerBlock => row_channel / BLOCK_CHANNELS * self.tokens + slot,
            ScaleLayout::PerChannel { group } => slot / group * self.heads * self.head_dim + row_channel,
        };
        let bit = element * self.side.scale.bits();
        Some((self.scale_offset + bit / 32, bit % 32))
    }

    /// The dequantised number: one f32 multiply of code and scale. `page` is the page's words.
    pub fn number(&self, page: &[u32], slot: u32, head: u32, channel: u32, tensor_scale: f32) -> f32 {
        let (word, bit) = self.code_at(slot, head, channel);
        let code = self.side.element.decode(page[word as usize] >> bit);
        match (self.scale_at(slot, head, channel), self.side.layout) {
            (Some((word, bit)), _) => {
                let mask = u32::MAX >> (32 - self.side.scale.bits());
                code * self.side.scale.decode((page[word as usize] >> bit) & mask)
            }
            (None, ScaleLayout::PerTensor) => code * tensor_scale,
            (None, _) => code,
        }
    }

    /// A page's words with everything that belongs to no token in [`first`, `last`) read as zero: dead slots, scales
    /// of dead slots and padding. This is the form in which pages are compared, saved and summed.
    pub fn live_words(&self, page: &[u32], first: u32, last: u32) -> Vec<u32> {
        let mut live = vec![0; self.words as usize];
        let mut keep = |(word, bit): (u32, u32), bits: u32| {
            live[word as usize] |= page[word as usize] & ((u32::MAX >> (32 - bits)) << bit);
        };
        for slot in first..last.min(self.tokens) {
            for head in 0..self.heads {
                for channel in 0..self.head_dim {
                    keep(self.code_at(slot, head, channel), self.side.element.bits());
                    if let Some(at) = self.scale_at(slot, head, channel) {
                        keep(at, self.side.scale.bits());
                    }
                }
            }
        }
        live
    }
}

/// Query heads for each KV head.
///
/// # Errors
/// [`Error::Shape`] where it is not a whole number from 1 to 16.
pub fn heads_ratio(q_heads: u32, kv_heads: u32) -> Result<u32> {
    if kv_heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(kv_heads) || q_heads / kv_heads > 16 {
        return Err(Error::Shape {
            what: "q_heads",
            value: u64::from(q_heads),
            limit: format!("query heads are a whole multiple, 1 to 16, of the {kv_heads} KV heads"),
            advice: "check the model's configuration".to_owned(),
        });
    }
    Ok(q_heads / kv_heads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::Element;
    use crate::scales::ScaleType;

    fn layout(name: &str, heads: u32, head_dim: u32, tokens: u32) -> Result<PageLayout> {
        PageLayout::new(name.parse()?, heads, head_dim, tokens)
    }

    #[test]
    fn planes_do_not_overlap_and_fill_the_page() {
        for side in Side::all() {
            for (heads, head_dim) in [(2, 8), (2, 40), (1, 80), (8, 128), (1, 256)] {
                let page = PageLayout::new(side, heads, head_dim, 128).unwrap();
                let mut codes = vec![0_u32; page.words as usize];
                for slot in 0..page.tokens {
                    for head in 0..heads {
                        for channel in 0..head_dim {
                            let (word, bit) = page.code_at(slot, head, channel);
                            let mask = (u32::MAX >> (32 - side.element.bits())) << bit;
                            assert_eq!(codes[word as usize] & mask, 0, "{side}: two numbers share bits");
                            assert!(word < page.scale_offset, "{side}: code in the scale plane");
                            codes[word as usize] |= mask;
                            if let Some((word, _)) = page.scale_at(slot, head, channel) {
                                assert!(word >= page.scale_offset && word < page.words, "{side}");
                            }
                        }
                    }
                }
                assert_eq!(page.words % 4, 0);
                assert_eq!(page.scale_offset % 4, 0);
            }
        }
    }

    #[test]
    fn ben_03_bytes_per_token_of_8_heads_of_128() {
        for (name, bytes) in [
            ("f16", 4096),
            ("fp8", 2048),
            ("int8", 2080),
            ("int4", 1056),
            ("int2", 544),
            ("fp4", 1152),
        ] {
            let page = layout(name, 8, 128, 64).unwrap();
            assert_eq!(2 * page.bytes(), 64 * bytes, "{name}");
            assert_eq!(page.padding_bytes(), 0, "{name}");
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused_by_name() {
        let cases = [
            (layout("int4", 2, 12, 64), "head_dim = 12"),
            (layout("int4", 2, 0, 64), "head_dim = 0"),
            (layout("int4", 2, 264, 64), "head_dim = 264"),
            (layout("int4", 0, 8, 64), "kv_heads = 0"),
            (layout("int4", 2, 8, 60), "page_tokens = 60"),
            (layout("int4c(128)", 2, 8, 64), "page_tokens = 64"),
            (layout("fp4", 3, 8, 64), "head_dim = 8"),
        ];
        let odd = |element, layout| {
            PageLayout::new(
                Side {
                    element,
                    layout,
                    scale: ScaleType::F16,
                },
                2,
                8,
                64,
            )
        };
        let more = [
            (odd(Element::Int2, ScaleLayout::PerBlock), "head_dim = 8"),
            (odd(Element::F16, ScaleLayout::PerToken), "without a scale"),
            (odd(Element::Int4, ScaleLayout::None), "needs a scale"),
        ];
        for (result, part) in cases.into_iter().chain(more) {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn padding_of_two_bit_heads_is_reported() {
        // 40 channels of 2 bits are 80 bits: 3 words hold 96.
        let page = layout("int2", 2, 40, 64).unwrap();
        assert_eq!(page.head_words, 3);
        assert_eq!(page.padding_bytes(), 2 * 2 * 64);
    }
}
