//! What attention may be asked for besides its shape. Kernels, cache and reference take the same options.

use crate::error::{Error, Result};

/// The options of one attention. The default: causal, no window, no soft cap, scale 1 / sqrt(k_head_dim), no sinks.
///
/// `S` is what holds the sinks: a `&wgpu::Buffer` for the GPU, a `&[f32]` for the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOptions<S> {
    /// A query sees no position after its own.
    pub causal: bool,
    /// A query sees no position before its last so many, its own among them. Not causal, it still sees all later ones.
    pub window: Option<u32>,
    /// Scores become cap x tanh(score / cap), before they are masked.
    pub softcap: Option<f32>,
    /// Factor of the scores, in place of 1 / sqrt(k_head_dim).
    pub scale: Option<f32>,
    /// Learned sinks, one f32 for each query head: exp(sink) joins the denominator of every query once, neither scaled
    /// nor capped. The LSE includes it; a query that sees no position gives zeros and its sink as the LSE.
    pub sinks: Option<S>,
}

impl<S> Default for AttentionOptions<S> {
    fn default() -> AttentionOptions<S> {
        AttentionOptions {
            causal: true,
            window: None,
            softcap: None,
            scale: None,
            sinks: None,
        }
    }
}

/// Soft caps outside this range would overflow f32, or be flushed to zero.
const SOFTCAP: std::ops::RangeInclusive<f32> = 1e-30..=1e30;

impl<S> AttentionOptions<S> {
    /// The same options with the sinks held by something else.
    pub fn map_sinks<'a, T>(&'a self, with: impl FnOnce(&'a S) -> T) -> AttentionOptions<T> {
        AttentionOptions {
            causal: self.causal,
            window: self.window,
            softcap: self.softcap,
            scale: self.scale,
            sinks: self.sinks.as_ref().map(with),
        }
    }

    /// Refuses options that make no sense.
    ///
    /// # Errors
    /// [`Error::Usage`] for a window of 0, a soft cap outside [1e-30, 1e30], and a scale that is not finite.
    pub fn check(&self) -> Result<()> {
        let refuse = |asked: String, reason: &str, advice: &str| {
            Err(Error::Usage {
                asked,
                reason: reason.to_owned(),
                advice: advice.to_owned(),
            })
        };
        if self.window == Some(0) {
            return refuse(
                "attention with a window of 0 tokens".to_owned(),
                "the window counts the query itself",
                "give at least 1, or no window",
            );
        }
        if let Some(cap) = self.softcap.filter(|cap| !SOFTCAP.contains(cap)) {
            return refuse(
                format!("attention with a soft cap of {cap:e}"),
                "a soft cap lies in [1e-30, 1e30]",
                "give no soft cap where scores are not capped",
            );
        }
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            return refuse(
                format!("attention with a scale of {scale}"),
                "scores are multiplied by it",
                "give a finite scale, or none for 1 / sqrt(k_head_dim)",
            );
        }
        Ok(())
    }

    /// The factor of the scores for keys of `k_head_dim` channels.
    pub fn score_scale(&self, k_head_dim: u32) -> f64 {
        self.scale
            .map_or_else(|| 1.0 / f64::from(k_head_dim).sqrt(), f64::from)
    }

    /// How far a query sees.
    pub fn reach(&self) -> Reach {
        Reach {
            back: self.window.map_or(u32::MAX, |window| window.saturating_sub(1)),
            ahead: if self.causal { 0 } else { u32::MAX },
        }
    }
}

/// How far a query sees from its own position: what decides which work attention has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reach {
    /// Positions before its own.
    pub back: u32,
    /// Positions after its own.
    pub ahead: u32,
}

impl Default for Reach {
    /// Causal without a window.
    fn default() -> Reach {
        AttentionOptions::<()>::default().reach()
    }
}

impl Reach {
    /// Whether any query at positions [first, last] sees any of the positions [start, end).
    pub fn meets(self, [first, last]: [u32; 2], [start, end]: [u32; 2]) -> bool {
        start <= last.saturating_add(self.ahead) && end > first.saturating_sub(self.back)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_make_no_sense_are_refused() {
        let good = AttentionOptions::<()> {
            window: Some(1),
            softcap: Some(50.0),
            scale: Some(-0.5),
            ..Default::default()
        };
        good.check().unwrap();
        AttentionOptions::<()>::default().check().unwrap();
        let refused = |bad: AttentionOptions<()>| bad.check().unwrap_err().to_string();
        assert!(
            refused(AttentionOptions {
                window: Some(0),
                ..good
            })
            .contains("window of 0")
        );
        for cap in [0.0, -0.0, -50.0, f32::NAN, f32::INFINITY, 1e-40, f32::MAX] {
            let softcap = Some(cap);
            assert!(refused(AttentionOptions { softcap, ..good }).contains("soft cap of"));
        }
        for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let scale = Some(scale);
            assert!(refused(AttentionOptions { scale, ..good }).contains("scale of"));
        }
    }

    #[test]
    fn a_reach_meets_what_one_of_its_queries_sees() {
        for (causal, window) in [
            (true, None),
            (true, Some(1)),
            (true, Some(4)),
            (false, Some(4)),
            (false, None),
        ] {
            let options = AttentionOptions::<()> {
                causal,
                window,
                ..Default::default()
            };
            let sees = |query: u32, position: u32| {
                (position <= query || !causal) && window.is_none_or(|w| position + w > query)
            };
            for [first, last] in [[0, 0], [0, 3], [7, 7], [6, 9]] {
                for start in 0..12 {
                    for end in start + 1..13 {
                        let any =
                            (first..=last).any(|query| (start..end).any(|position| sees(query, position)));
                        assert_eq!(
                            options.reach().meets([first, last], [start, end]),
                            any,
                            "{options:?}: queries {first} to {last}, positions {start} to {end}"
                        );
                    }
                }
            }
        }
        assert!(Reach::default().meets([u32::MAX; 2], [0, 1]));
    }
}
