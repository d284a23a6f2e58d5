//! The geometry of pages as manifests and cases carry it, and where a word of a page belongs.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::pages::PageLayout;
use crate::scales::{BLOCK_CHANNELS, ScaleLayout};

/// A [`PageLayout`] in JSON. Counts are in words of 32 bits unless named otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Geometry {
    /// The side's name, for example `int4c`.
    pub side: String,
    /// What a number is: the name of a file in `shaders/formats`.
    pub element: String,
    /// Bits of a code.
    pub bits: u32,
    /// KV heads.
    pub heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Words of one head of one token.
    pub head_words: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Words of a page.
    pub page_words: u32,
    /// Which numbers share a scale: the name of a file in `shaders/scales`.
    pub scale_layout: String,
    /// Where the plane of scales begins.
    pub scale_offset: u32,
    /// Bits of a scale.
    pub scale_bits: u32,
    /// Tokens that share a scale.
    pub token_group: u32,
}

impl From<&PageLayout> for Geometry {
    fn from(page: &PageLayout) -> Geometry {
        Geometry {
            side: page.side.to_string(),
            element: page.side.element.info().name.to_owned(),
            bits: page.side.element.bits(),
            heads: page.heads,
            head_dim: page.head_dim,
            head_words: page.head_words,
            page_tokens: page.tokens,
            page_words: page.words,
            scale_layout: page.side.layout.name().to_owned(),
            scale_offset: page.scale_offset,
            scale_bits: page.side.scale.bits(),
            token_group: page.side.layout.token_group(),
        }
    }
}

impl Geometry {
    /// The layout of the side's name and shape.
    ///
    /// # Errors
    /// [`Error::UnknownFormat`], those of [`PageLayout::new`], and [`Error::Usage`] where the other numbers are not those of
    /// this layout.
    pub fn layout(&self) -> Result<PageLayout> {
        let page = PageLayout::new(self.side.parse()?, self.heads, self.head_dim, self.page_tokens)?;
        // Compared as JSON, so that the words name the field.
        let fields = |geometry: &Geometry| serde_json::to_value(geometry).unwrap_or_default();
        let (found, right) = (fields(self), fields(&Geometry::from(&page)));
        let differs = right.as_object().and_then(|all| {
            all.iter()
                .find(|(name, value)| found.get(name.as_str()) != Some(*value))
        });
        match differs {
            None => Ok(page),
            Some((name, value)) => Err(Error::Usage {
                asked: format!("pages of {} with another {name}", self.side),
                reason: format!("at this shape it is {value}"),
                advice: "export again with this version".to_owned(),
            }),
        }
    }
}

/// What the lowest bit of `bits` in word `word` of a page holds, for example `slot 17, head 1, channel 5, code`; with the
/// number of a sequence and its first token in the page `token 81 of sequence 0, ...`.
pub fn place(page: &PageLayout, of: Option<(usize, u32)>, word: u32, bits: u32) -> String {
    let slots = |first: u32, count: u32| {
        let (what, start, end) = match of {
            None => ("slot", first, String::new()),
            Some((sequence, token)) => ("token", token + first, format!(" of sequence {sequence}")),
        };
        match count {
            1 => format!("{what} {start}{end}"),
            _ => format!("{what}s {start} to {}{end}", start + count - 1),
        }
    };
    let bit = bits.trailing_zeros().min(31);
    if word < page.heads * page.head_words * page.tokens {
        let (row_word, slot) = (word / page.tokens, word % page.tokens);
        let (head, head_word) = (row_word / page.head_words, row_word % page.head_words);
        let channel = head_word * page.side.element.per_word() + bit / page.side.element.bits();
        if channel < page.head_dim {
            return format!("{}, head {head}, channel {channel}, code", slots(slot, 1));
        }
        return format!("{}, head {head}, padding", slots(slot, 1));
    }
    if word < page.scale_offset || !page.side.layout.has_plane() {
        return "padding".to_owned();
    }
    let element = ((word - page.scale_offset) * 32 + bit) / page.side.scale.bits();
    if element >= page.scale_elements {
        return "padding".to_owned();
    }
    let row = page.heads * page.head_dim;
    match page.side.layout {
        ScaleLayout::PerChannel { group } => {
            let (first, c) = (element / row * group, element % row);
            format!(
                "{}, head {}, channel {}, scale",
                slots(first, group),
                c / page.head_dim,
                c % page.head_dim
            )
        }
        ScaleLayout::PerBlock => {
            let (block, slot) = (element / page.tokens, element % page.tokens);
            let first = block * BLOCK_CHANNELS;
            format!(
                "{}, block {block} (from head {}, channel {}), scale",
                slots(slot, 1),
                first / page.head_dim,
                first % page.head_dim
            )
        }
        _ => format!(
            "{}, head {}, scale",
            slots(element % page.tokens, 1),
            element / page.tokens
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Side;

    #[test]
    fn every_code_and_scale_is_found_at_its_place() {
        for side in Side::all() {
            let page = PageLayout::new(side, 2, 40, 128);
            let page = page.unwrap_or_else(|_| PageLayout::new(side, 2, 48, 128).unwrap());
            for (slot, head, channel) in [(0, 0, 0), (5, 1, 7), (127, 1, page.head_dim - 1)] {
                let (word, bit) = page.code_at(slot, head, channel);
                assert_eq!(
                    place(&page, None, word, 1 << bit),
                    format!("slot {slot}, head {head}, channel {channel}, code")
                );
                let Some((word, bit)) = page.scale_at(slot, head, channel) else {
                    continue;
                };
                let said = place(&page, None, word, 1 << bit);
                let slots = match side.layout {
                    ScaleLayout::PerChannel { group } => {
                        format!(
                            "slots {} to {}",
                            slot / group * group,
                            slot / group * group + group - 1
                        )
                    }
                    _ => format!("slot {slot},"),
                };
                assert!(
                    said.starts_with(&slots) && said.ends_with("scale"),
                    "{side}: {said}"
                );
            }
            let json = serde_json::to_string(&Geometry::from(&page)).unwrap();
            let read: Geometry = serde_json::from_str(&json).unwrap();
            assert_eq!(read.layout().unwrap(), page);
        }
        // 24 channels of 2 bits take a word and a half.
        let page = PageLayout::new("int2".parse().unwrap(), 1, 24, 8).unwrap();
        assert_eq!(place(&page, None, 8, 1 << 15), "slot 0, head 0, channel 23, code");
        assert_eq!(place(&page, None, 8, 1 << 16), "slot 0, head 0, padding");
        let said = place(&page, Some((3, 40)), 9, 1);
        assert_eq!(said, "token 41 of sequence 3, head 0, channel 16, code");
        let mut other = Geometry::from(&page);
        other.scale_offset += 4;
        assert!(other.layout().is_err());
    }
}
