//! What logits say: the most likely tokens, and where they part from those of the f32 cache.

/// Likely tokens that are kept of each prediction, fewer where the vocabulary has fewer.
pub const TOP: usize = 4;

/// The most likely next tokens after each of some tokens.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Predictions {
    /// Their ids, `[token][TOP]`, the likeliest first; of equals the lower id.
    pub ids: Vec<u32>,
    /// Their logits, `[token][TOP]`.
    pub logits: Vec<f32>,
    /// ln of the sum of exp of all logits, by token: exp(logit - this) is a probability.
    pub log_sum_exp: Vec<f64>,
    /// The logit that the f32 cache's first token has here, by token.
    pub kept_logit: Vec<f32>,
}

/// A prediction that is another than with the f32 cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flip {
    /// Position of the token after which is predicted.
    pub position: u32,
    /// What the f32 cache predicts.
    pub from: u32,
    /// What this cache predicts.
    pub to: u32,
    /// By how much the f32 cache prefers its own, in logits.
    pub reference_margin: f64,
    /// By how much this cache prefers the other.
    pub margin: f64,
}

/// The largest logits: (id, logit), the largest first, of equals the lower id.
pub(super) fn top(row: &[f64]) -> Vec<(u32, f64)> {
    let mut best: Vec<(u32, f64)> = Vec::with_capacity(TOP + 1);
    for (id, &logit) in (0..).zip(row) {
        let place = best.iter().position(|&(_, other)| logit > other);
        match place {
            Some(place) => best.insert(place, (id, logit)),
            None if best.len() < TOP => best.push((id, logit)),
            None => {}
        }
        best.truncate(TOP);
    }
    best
}

impl Predictions {
    /// Adds a token's logits, and those that the f32 cache gave.
    pub(super) fn add(&mut self, reference: &[f64], logits: &[f64]) {
        let best = top(logits);
        self.ids.extend(best.iter().map(|&(id, _)| id));
        self.logits.extend(best.iter().map(|&(_, logit)| logit as f32));
        self.log_sum_exp.push(crate::drift::log_sum_exp(logits));
        let kept = top(reference).first().map_or(0, |&(id, _)| id as usize);
        self.kept_logit
            .push(logits.get(kept).copied().unwrap_or(0.0) as f32);
    }
}

/// The flip at a position, if there is one.
pub(super) fn flip(position: u32, reference: &[f64], logits: &[f64]) -> Option<Flip> {
    let first = |row: &[f64]| top(row).first().map(|&(id, _)| id as usize);
    let (from, to) = (first(reference)?, first(logits)?);
    (from != to).then(|| Flip {
        position,
        from: from as u32,
        to: to as u32,
        reference_margin: reference[from] - reference[to],
        margin: logits[to] - logits[from],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_come_first_and_of_equals_the_lower_id() {
        let row = [1.0, 3.0, 2.0, 3.0, -1.0, 2.5];
        assert_eq!(top(&row), [(1, 3.0), (3, 3.0), (5, 2.5), (2, 2.0)]);
        assert_eq!(top(&[0.5, 0.5]), [(0, 0.5), (1, 0.5)]);
        assert_eq!(top(&[]), []);
    }

    #[test]
    fn a_flip_has_the_margins_of_both_sides() {
        let (reference, run) = ([1.0, 3.0, 2.0], [1.0, 2.5, 2.75]);
        let found = flip(7, &reference, &run).unwrap();
        assert_eq!((found.position, found.from, found.to), (7, 1, 2));
        assert_eq!((found.reference_margin, found.margin), (1.0, 0.25));
        assert_eq!(flip(7, &reference, &reference), None);
        // As the drift figures count: of equals the first.
        assert_eq!(flip(0, &[2.0, 2.0], &[2.0, 1.0]), None);
    }
}
