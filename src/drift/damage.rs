//! The figures that compare the logits of two runs.

/// The figures that compare two runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Damage {
    /// sqrt(sum (ref - q)^2 / sum ref^2).
    pub drift: f64,
    /// The same after each row's mean is taken off both.
    pub centred: f64,
    /// Rows whose argmax is unchanged.
    pub top1: u64,
    /// Rows.
    pub predictions: u64,
    /// Mean of KL(softmax ref || softmax q), nats.
    pub mean_kl: f64,
    /// Largest |ref - q|.
    pub max_abs_diff: f64,
}

/// A comparison in the making, row by row.
#[derive(Debug, Clone, Copy, Default)]
pub struct Comparison {
    error: f64,
    power: f64,
    centred_error: f64,
    centred_power: f64,
    kl: f64,
    max_abs_diff: f64,
    top1: u64,
    predictions: u64,
}

impl Comparison {
    /// Adds one row of logits of the reference and of the run.
    pub fn add(&mut self, r: &[f64], q: &[f64]) {
        let mean = |row: &[f64]| row.iter().sum::<f64>() / row.len() as f64;
        let (r_mean, q_mean) = (mean(r), mean(q));
        let (r_log, q_log) = (log_sum_exp(r), log_sum_exp(q));
        for (&a, &b) in r.iter().zip(q) {
            self.error += (a - b).powi(2);
            self.power += a.powi(2);
            self.centred_error += ((a - r_mean) - (b - q_mean)).powi(2);
            self.centred_power += (a - r_mean).powi(2);
            self.kl += (a - r_log).exp() * ((a - r_log) - (b - q_log));
            // Not f64::max, which would drop a NaN.
            let difference = (a - b).abs();
            if difference > self.max_abs_diff || difference.is_nan() {
                self.max_abs_diff = difference;
            }
        }
        self.predictions += 1;
        self.top1 += u64::from(argmax(r) == argmax(q));
    }

    /// The figures, pooled over all rows.
    pub fn damage(&self) -> Damage {
        Damage {
            drift: (self.error / self.power).sqrt(),
            centred: (self.centred_error / self.centred_power).sqrt(),
            top1: self.top1,
            predictions: self.predictions,
            mean_kl: self.kl / self.predictions as f64,
            max_abs_diff: self.max_abs_diff,
        }
    }
}

/// Compares logits `[row][vocabulary]` with those of the reference, pooled over all rows. NaN on either side gives NaN.
pub fn damage(reference: &[f64], run: &[f64], vocabulary: usize) -> Damage {
    let mut comparison = Comparison::default();
    let rows = reference
        .chunks(vocabulary.max(1))
        .zip(run.chunks(vocabulary.max(1)));
    rows.for_each(|(r, q)| comparison.add(r, q));
    comparison.damage()
}

/// ln of the sum of exp.
pub(crate) fn log_sum_exp(row: &[f64]) -> f64 {
    let m = row.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(v));
    m + row.iter().map(|v| (v - m).exp()).sum::<f64>().ln()
}

/// The first of the largest.
fn argmax(row: &[f64]) -> usize {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best })
}
