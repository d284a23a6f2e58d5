//! Every kernel on one adapter against the CPU reference.

/// One line of the validation report: a kernel with a format.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct ValidateRow {
    /// The kernel.
    pub kernel: String,
    /// The side or pair, or the shape for kernels without one.
    pub format: String,
    /// Inputs compared.
    pub cases: u64,
    /// Words or values whose bits differ; only 0 passes.
    pub bit_mismatches: u64,
    /// Largest error of a sum as a share of its bound; at most 1 passes. None where bits are compared.
    pub worst_share_of_bound: Option<f64>,
    /// Largest absolute error of a sum.
    pub max_error: Option<f64>,
    /// Its bound at that place.
    pub bound: Option<f64>,
    /// Wall time in milliseconds.
    pub milliseconds: f64,
    /// Whether everything held.
    pub passed: bool,
    /// What failed first, in words; empty where all passed.
    pub detail: String,
    /// The adapter's name and driver.
    pub adapter: String,
}
