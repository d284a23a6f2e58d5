//! How a case of attention departs from the simplest one, so that a kernel that only works on that is found.

use super::super::modules::Phase;
use crate::options::AttentionOptions;

/// What is asked beyond plain causal attention over rows that lie close together.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Twist {
    /// What the case's name ends with, in place of the phase; empty for the plain case.
    pub name: &'static str,
    /// Mask, soft cap, scale and sinks.
    pub options: AttentionOptions<Vec<f32>>,
    /// New rows and queries begin later and have gaps, which hold NaN.
    pub gaps: bool,
    /// What queries are multiplied by, where that is not 1: scores beyond what exp can take.
    pub factor: Option<f32>,
    /// A last sequence without a token.
    pub empty: bool,
    /// Ranges of half a page.
    pub halves: bool,
    /// Output rows in reverse order.
    pub reverse: bool,
    /// No LSE is asked for.
    pub no_lse: bool,
    /// Place of K's per-tensor scale; V's is the next.
    pub place: u32,
}

impl Twist {
    /// Every option at once, and rows with gaps; prefill.
    pub fn options(q_heads: u32, page_tokens: u32) -> Twist {
        Twist {
            name: "options",
            options: AttentionOptions {
                causal: true,
                window: Some(page_tokens / 2 + 3),
                softcap: Some(20.0),
                scale: Some(0.3),
                sinks: Some((0..q_heads).map(|head| head as f32 - 2.0).collect()),
            },
            gaps: true,
            halves: true,
            reverse: true,
            no_lse: true,
            place: 2,
            ..Twist::default()
        }
    }

    /// Large scores and an empty sequence; decode.
    pub fn edges() -> Twist {
        Twist {
            name: "edges",
            factor: Some(60.0),
            empty: true,
            halves: true,
            reverse: true,
            ..Twist::default()
        }
    }

    /// The phase whose modules run it.
    pub fn phase(&self) -> Phase {
        if self.empty { Phase::Decode } else { Phase::Prefill }
    }
}

/// Where rows of heads lie in their buffer, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lie {
    pub offset: u32,
    pub row: u32,
    pub head: u32,
    pub heads: u32,
    pub dim: u32,
}

impl Lie {
    /// Rows of `heads` x `dim` that lie close together, or with gaps: multiples of 4 numbers.
    pub fn new(heads: u32, dim: u32, gaps: bool) -> Lie {
        let gap = if gaps { 4 } else { 0 };
        Lie {
            offset: 2 * gap,
            row: heads * (dim + gap) + gap,
            head: dim + gap,
            heads,
            dim,
        }
    }

    /// Rows `[row][head][number]` spread out, what is between them NaN.
    pub fn spread(&self, rows: &[f32]) -> Vec<f32> {
        let count = rows.len() as u32 / (self.heads * self.dim);
        let mut all = vec![f32::NAN; (self.offset + count * self.row) as usize];
        for (i, numbers) in (0..).zip(rows.chunks(self.dim as usize)) {
            let at = self.offset + i / self.heads * self.row + i % self.heads * self.head;
            all[at as usize..][..numbers.len()].copy_from_slice(numbers);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_where_offset_and_strides_say() {
        let rows: Vec<f32> = (0..2 * 3 * 8).map(|x| x as f32).collect();
        assert_eq!(Lie::new(3, 8, false).spread(&rows), rows);
        let lie = Lie::new(3, 8, true);
        let spread = lie.spread(&rows);
        for (i, &x) in (0..).zip(&rows) {
            let at = lie.offset + i / 24 * lie.row + i / 8 % 3 * lie.head + i % 8;
            assert_eq!(spread[at as usize], x);
        }
        assert_eq!(spread.iter().filter(|x| !x.is_nan()).count(), rows.len());
    }
}
