//! A side says how K or V is stored; a pair names both. Names, parsing, true cost in bits.
//!
//! | side | a number | its scale |
//! |---|---|---|
//! | `f32`, `f16` | binary32, binary16 | none |
//! | `fp8` | E4M3 | one f32 a layer and side, given from outside ([`TensorScales`](crate::cache::TensorScales)) |
//! | `int8`, `int4`, `int2` | integer | an f16 a token and KV head |
//! | `fp4` | E2M1 | an E4M3 a token and block of 16 channels |
//! | `int8c`, `int4c`, `int2c` | integer | an f16 a channel and group of G tokens: `int4c(16)` has G = 16, `int4c` has 32 |
//!
//! G is 8, 16, 32, 64 or 128. A pair is `K/V`, or one side for both: `int4c/int4`, `f16`. Names are in lower case and hold
//! no spaces; [`Pair`] and [`Side`] read them with [`str::parse`] and print them.

use std::{fmt, str::FromStr};

use crate::error::{Error, Result};
use crate::formats::Element;
use crate::scales::{DEFAULT_GROUP, GROUPS, ScaleLayout, ScaleType};

/// How one side (K or V) of the cache is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Side {
    /// What one number is.
    pub element: Element,
    /// Which numbers share a scale.
    pub layout: ScaleLayout,
    /// How that scale is stored. Without meaning where there is no scale; per-tensor scales are always f32.
    pub scale: ScaleType,
}

const NAMED: [(&str, Element, ScaleLayout, ScaleType); 10] = {
    use Element::*;
    use ScaleLayout::*;
    let channels = PerChannel { group: DEFAULT_GROUP };
    [
        ("f32", F32, None, ScaleType::F32),
        ("f16", F16, None, ScaleType::F32),
        ("fp8", E4m3, PerTensor, ScaleType::F32),
        ("int8", Int8, PerToken, ScaleType::F16),
        ("int4", Int4, PerToken, ScaleType::F16),
        ("int2", Int2, PerToken, ScaleType::F16),
        ("fp4", E2m1, PerBlock, ScaleType::E4m3),
        ("int8c", Int8, channels, ScaleType::F16),
        ("int4c", Int4, channels, ScaleType::F16),
        ("int2c", Int2, channels, ScaleType::F16),
    ]
};

impl Side {
    /// binary32, the reference side.
    pub const F32: Side = Side {
        element: Element::F32,
        layout: ScaleLayout::None,
        scale: ScaleType::F32,
    };
    /// binary16: also the format of open and recent tokens.
    pub const F16: Side = Side {
        element: Element::F16,
        layout: ScaleLayout::None,
        scale: ScaleType::F32,
    };

    /// Every named side; per-channel sides once for each group length.
    pub fn all() -> Vec<Side> {
        named()
            .flat_map(|(_, side)| match side.layout {
                ScaleLayout::PerChannel { .. } => GROUPS
                    .iter()
                    .map(|&group| Side {
                        layout: ScaleLayout::PerChannel { group },
                        ..side
                    })
                    .collect(),
                _ => vec![side],
            })
            .collect()
    }

    /// The same side with its scales stored otherwise. Sides without a plane of scales stay as they are.
    pub fn with_scale_type(self, scale: ScaleType) -> Side {
        if self.layout.has_plane() {
            Side { scale, ..self }
        } else {
            self
        }
    }

    /// The true cost of one number in bits, scales included; a per-tensor scale is not counted.
    pub fn bits_per_number(self, head_dim: u32) -> f64 {
        let sharing = match self.layout {
            ScaleLayout::None | ScaleLayout::PerTensor => f64::INFINITY,
            ScaleLayout::PerToken => f64::from(head_dim),
            ScaleLayout::PerChannel { group } => f64::from(group),
            ScaleLayout::PerBlock => f64::from(crate::scales::BLOCK_CHANNELS),
        };
        f64::from(self.element.bits()) + f64::from(self.scale.bits()) / sharing
    }

    /// Whether new rows wait in full-precision pages before they are packed: per-channel sides until their group is
    /// full, any quantised side while its recent window covers them.
    pub fn waits(self, window: u32) -> bool {
        !self.element.info().plain && (window > 0 || self.layout.token_group() > 1)
    }
}

fn named() -> impl Iterator<Item = (&'static str, Side)> {
    NAMED.iter().map(|&(name, element, layout, scale)| {
        (
            name,
            Side {
                element,
                layout,
                scale,
            },
        )
    })
}

/// Names for error messages and help.
pub fn known_names() -> String {
    let names: Vec<_> = named()
        .map(|(name, side)| match side.layout {
            ScaleLayout::PerChannel { .. } => format!("{name}(G)"),
            _ => name.to_owned(),
        })
        .collect();
    format!(
        "{} with G = 8, 16, 32, 64 or 128 (default {DEFAULT_GROUP})",
        names.join(" ")
    )
}

impl fmt::Display for Side {
    /// The short name; the group is printed where it is not the default, the scale type where it is not the name's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let same_axis =
            |a: ScaleLayout, b: ScaleLayout| std::mem::discriminant(&a) == std::mem::discriminant(&b);
        let entry =
            named().find(|(_, side)| side.element == self.element && same_axis(side.layout, self.layout));
        match entry {
            Some((name, side)) => {
                f.write_str(name)?;
                match self.layout {
                    ScaleLayout::PerChannel { group } if group != DEFAULT_GROUP => write!(f, "({group})")?,
                    _ => {}
                }
                if self.scale != side.scale {
                    write!(f, "+{}scale", self.scale.name())
                } else {
                    Ok(())
                }
            }
            None => write!(
                f,
                "{}:{}:{}",
                self.element.info().name,
                self.layout.name(),
                self.scale.name()
            ),
        }
    }
}

impl FromStr for Side {
    type Err = Error;

    /// A name of the table of [this module](self), such as `int4` or `int4c(16)`.
    ///
    /// # Errors
    /// [`Error::UnknownFormat`] names the sides that exist.
    fn from_str(text: &str) -> Result<Side> {
        let unknown = |reason: String| Error::UnknownFormat {
            name: text.to_owned(),
            reason,
            known: known_names(),
        };
        let (name, group) = match text.split_once('(') {
            None => (text, None),
            Some((name, rest)) => match rest.strip_suffix(')').map(str::parse::<u32>) {
                Some(Ok(group)) => (name, Some(group)),
                _ => return Err(unknown("the group is not a number in parentheses".to_owned())),
            },
        };
        let (_, mut side) = named()
            .find(|(known, _)| *known == name)
            .ok_or_else(|| unknown("no side has this name".to_owned()))?;
        match (&mut side.layout, group) {
            (_, None) => {}
            (ScaleLayout::PerChannel { group }, Some(asked)) if GROUPS.contains(&asked) => *group = asked,
            (ScaleLayout::PerChannel { .. }, Some(asked)) => {
                return Err(unknown(format!(
                    "a group of {asked} tokens is not one of 8, 16, 32, 64, 128"
                )));
            }
            (_, Some(_)) => return Err(unknown(format!("`{name}` has no token groups"))),
        }
        Ok(side)
    }
}

/// The two sides of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    /// How keys are stored.
    pub k: Side,
    /// How values are stored.
    pub v: Side,
}

/// The eight pairs of the drift table, in its order.
pub const TABLE: [&str; 8] = [
    "f16",
    "fp8",
    "int8",
    "fp4",
    "int4",
    "int4c/int4",
    "int2",
    "int2c/int2",
];

impl Pair {
    /// The same side for both.
    pub const fn same(side: Side) -> Pair {
        Pair { k: side, v: side }
    }

    /// The mean cost of one number in bits, scales included.
    pub fn bits_per_number(self, k_head_dim: u32, v_head_dim: u32) -> f64 {
        let (k, v) = (f64::from(k_head_dim), f64::from(v_head_dim));
        (self.k.bits_per_number(k_head_dim) * k + self.v.bits_per_number(v_head_dim) * v) / (k + v)
    }

    /// The default page length: 64 tokens, or the longest group of both sides.
    pub fn default_page_tokens(self) -> u32 {
        64.max(self.k.layout.token_group())
            .max(self.v.layout.token_group())
    }
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.k == self.v {
            write!(f, "{}", self.k)
        } else {
            write!(f, "{}/{}", self.k, self.v)
        }
    }
}

impl FromStr for Pair {
    type Err = Error;

    /// Two sides, `K/V`, or one for both.
    ///
    /// # Errors
    /// As for a [`Side`].
    fn from_str(text: &str) -> Result<Pair> {
        match text.split_once('/') {
            None => Ok(Pair::same(text.parse()?)),
            Some((k, v)) => Ok(Pair {
                k: k.parse()?,
                v: v.parse()?,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_side_prints_a_name_that_parses_back() {
        for side in Side::all() {
            assert_eq!(side.to_string().parse::<Side>().unwrap(), side);
        }
        for name in TABLE {
            assert_eq!(name.parse::<Pair>().unwrap().to_string(), name);
        }
        assert_eq!(
            "int4c(32)/int4".parse::<Pair>().unwrap().to_string(),
            "int4c/int4"
        );
    }

    #[test]
    fn bad_names_are_refused_with_the_name_and_the_choices() {
        for name in [
            "",
            "int3",
            "int4c(",
            "int4c(7)",
            "int4(32)",
            "f16/",
            "a/b/c",
            "INT4",
            "int4c(32)x",
            "int4c(-8)",
        ] {
            let message = name.parse::<Pair>().unwrap_err().to_string();
            assert!(
                message.contains("fp8") && message.contains("int4c(G)"),
                "{name}: {message}"
            );
        }
    }

    #[test]
    fn ben_09_bits_count_the_scales() {
        let bits = |name: &str, d| name.parse::<Pair>().unwrap().bits_per_number(d, d);
        assert_eq!(bits("int4", 8), 6.0);
        assert_eq!(bits("int4", 128), 4.125);
        assert_eq!(bits("fp4", 128), 4.5);
        assert_eq!(bits("int4c/int4", 8), 5.25);
        assert_eq!(bits("int2c/int2", 8), 3.25);
        assert_eq!(bits("fp8", 8), 8.0);
    }
}
