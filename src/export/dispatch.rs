//! How many workgroups a module takes, as a formula that manifests carry and hosts evaluate.

use std::fmt;

use crate::error::{Error, Result};

/// What a dispatch counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// Invocations, of which a workgroup has so many in x.
    Invocations,
    /// Workgroups.
    Workgroups,
}

/// A factor of a dispatch's formula: a number or a field of the uniform, divided and rounded up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Factor {
    /// The number, or the name of the field.
    pub of: std::result::Result<u32, String>,
    /// What it is divided by.
    pub divisor: u32,
}

impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = match &self.of {
            Ok(number) => number.to_string(),
            Err(field) => format!("params.{field}"),
        };
        match self.divisor {
            1 => f.write_str(&of),
            divisor => write!(f, "ceil({of} / {divisor})"),
        }
    }
}

/// How many workgroups a kernel takes: a product of factors, folded into x and y.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dispatch {
    /// What the product counts.
    pub counts: Counts,
    /// The product's factors.
    pub factors: Vec<Factor>,
    /// Workgroups in z.
    pub z: u32,
}

impl Dispatch {
    pub(super) fn new(counts: Counts, factors: impl IntoIterator<Item = Factor>) -> Dispatch {
        Dispatch {
            counts,
            factors: factors.into_iter().collect(),
            z: 1,
        }
    }

    /// The formula as manifests carry it, for example `params.runs * 8`.
    pub fn formula(&self) -> String {
        let factors: Vec<String> = self.factors.iter().map(Factor::to_string).collect();
        factors.join(" * ")
    }

    /// Reads a formula; None where it is none.
    pub fn parse(counts: Counts, formula: &str, z: u32) -> Option<Dispatch> {
        let value = |text: &str| match text.trim().strip_prefix("params.") {
            Some(field) => {
                let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                (!field.is_empty() && field.chars().all(name)).then(|| Err(field.to_owned()))
            }
            None => text.trim().parse().ok().map(Ok),
        };
        let factor = |text: &str| {
            let text = text.trim();
            let (of, divisor) = match text.strip_prefix("ceil(").map(|rest| rest.strip_suffix(')')) {
                None => (text, 1),
                Some(inside) => {
                    let (of, divisor) = inside?.split_once('/')?;
                    (of, divisor.trim().parse().ok().filter(|&d| d > 0)?)
                }
            };
            Some(Factor {
                of: value(of)?,
                divisor,
            })
        };
        let factors: Option<Vec<Factor>> = formula.split('*').map(factor).collect();
        Some(Dispatch {
            counts,
            factors: factors?,
            z,
        })
    }

    /// Workgroups for the values of a uniform's fields.
    ///
    /// # Errors
    /// [`Error::Usage`] where a field has no value; [`Error::Limit`] for more than one dispatch can hold.
    pub fn workgroups(
        &self,
        kernel: &str,
        workgroup: u32,
        field: impl Fn(&str) -> Option<u32>,
    ) -> Result<[u32; 3]> {
        let mut product = 1_u64;
        for factor in &self.factors {
            let of = match &factor.of {
                Ok(number) => *number,
                Err(name) => field(name).ok_or_else(|| Error::Usage {
                    asked: format!("the dispatch `{}` of `{kernel}`", self.formula()),
                    reason: format!("there is no value params.{name}"),
                    advice: "name fields of the uniform only".to_owned(),
                })?,
            };
            product = product.saturating_mul(u64::from(of.div_ceil(factor.divisor)));
        }
        let groups = match self.counts {
            Counts::Invocations => product.div_ceil(u64::from(workgroup.max(1))),
            Counts::Workgroups => product,
        };
        let [x, y] = crate::gpu::fold(kernel, groups)?;
        // Kernels number their invocations in 32 bits, those beyond the end of the work too.
        let numbered = u64::from(x) * u64::from(y) * u64::from(workgroup);
        if self.counts == Counts::Invocations && numbered > 1 << 32 {
            return Err(Error::Limit {
                what: format!("`{kernel}` (invocations)"),
                needed: numbered,
                allowed: 1 << 32,
                advice: "split the work into several calls".to_owned(),
            });
        }
        Ok([x, y, self.z])
    }
}

pub(super) fn field(name: &str) -> Factor {
    divided(name, 1)
}

pub(super) fn divided(name: &str, divisor: u32) -> Factor {
    Factor {
        of: Err(name.to_owned()),
        divisor,
    }
}

pub(super) fn number(number: u32) -> Factor {
    Factor {
        of: Ok(number),
        divisor: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_read_back_and_count() {
        let d = Dispatch::parse(Counts::Invocations, "params.a * ceil(params.b / 16) * 3", 2).unwrap();
        let value = |name: &str| match name {
            "a" => Some(5),
            "b" => Some(17),
            _ => None,
        };
        assert_eq!(d.workgroups("k", 8, value).unwrap(), [4, 1, 2]);
        assert!(d.workgroups("k", 8, |_| None).is_err());
        for bad in ["", "params.a +", "ceil(params.a / 0)", "ceil(params.a", "a", "-1"] {
            assert_eq!(Dispatch::parse(Counts::Workgroups, bad, 1), None, "{bad}");
        }
    }
}
