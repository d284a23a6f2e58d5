use super::finite_magnitude;

/// The largest finite magnitude of `rows`, or of `so_far` if that is larger.
pub fn amax(rows: impl IntoIterator<Item = f32>, so_far: f32) -> f32 {
    rows.into_iter().map(finite_magnitude).fold(so_far, f32::max)
}
