//! The one error type of the library.

/// Everything that can go wrong. Messages say what was asked, what is possible and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A side or pair name that does not parse.
    #[error(
        "unknown cache format `{name}`: {reason}; sides are {known}; a pair is one side for both or K/V, for example int4c/int4"
    )]
    UnknownFormat {
        /// The text that was given.
        name: String,
        /// What is wrong with it.
        reason: String,
        /// The names that exist.
        known: String,
    },
    /// A shape that a format, a page or a kernel cannot hold.
    #[error("{what} = {value} does not fit: {limit}; {advice}")]
    Shape {
        /// The quantity that was given.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The rule or limit it breaks.
        limit: String,
        /// What to do instead.
        advice: String,
    },
    /// A per-tensor scale outside what the codes allow.
    #[error(
        "per-tensor scale {value:e} ({what}) cannot be used: it must be finite and lie in [2^-90, 2^118]; \
         calibrate it as amax / 448 on your data"
    )]
    TensorScale {
        /// Which scale (layer and side).
        what: String,
        /// The value that was given.
        value: f64,
    },
    /// The cache or one of its pools is full; nothing was changed.
    #[error(
        "the cache is full: {what}: {} pages are needed, {free} are free, {missing} are missing; {advice}",
        missing + free
    )]
    CacheFull {
        /// Which pool.
        what: String,
        /// Pages, in each of the pool's layers, that would have been needed beyond the free ones.
        missing: u64,
        /// Pages that are free.
        free: u64,
        /// What to do.
        advice: &'static str,
    },
    /// A budget that buys no page.
    #[error(
        "a cache of {budget} bytes holds no page: beside the waiting tokens of {sequences} sequences one takes {needed} \
         bytes; raise the budget, or lower the sequences, the windows or the page length"
    )]
    Budget {
        /// Bytes of the smallest cache of this spec.
        needed: u64,
        /// Bytes that were given.
        budget: u64,
        /// Sequences that the budget must provide for.
        sequences: u32,
    },
    /// Bytes that are no sequence of this cache; nothing was changed.
    #[error(
        "these bytes cannot be restored: {reason}; save the sequence again, from a cache of the same spec"
    )]
    Restore {
        /// What is wrong with them.
        reason: String,
    },
    /// A sequence id that was never opened, has been freed or is of another cache.
    #[error(
        "sequence {0} is not open in this cache (freed, never opened, or of another cache); open one first"
    )]
    UnknownSequence(u64),
    /// A request that contradicts the state or the settings.
    #[error("{asked}: {reason}; {advice}")]
    Usage {
        /// What was asked.
        asked: String,
        /// Why it cannot be done.
        reason: String,
        /// What to do instead.
        advice: String,
    },
    /// No adapter, or none of that name.
    #[error("no usable GPU adapter: {reason}; {advice}")]
    NoAdapter {
        /// What was looked for and what was found.
        reason: String,
        /// The command or flag that helps.
        advice: String,
    },
    /// The adapter allows less than a kernel needs.
    #[error("{what} needs {needed} but this adapter allows {allowed}; {advice}")]
    Limit {
        /// The buffer, binding or kernel.
        what: String,
        /// The amount needed.
        needed: u64,
        /// The amount allowed.
        allowed: u64,
        /// What to do instead.
        advice: String,
    },
    /// A shader that does not compose or compile. A fault of this crate or of the driver, not of the caller.
    #[error("shader `{kernel}` was refused: {message}")]
    Shader {
        /// The kernel.
        kernel: String,
        /// The composer's or compiler's words.
        message: String,
    },
    /// A manifest that is foreign, wrong, or does not fit its folder.
    #[error("{file}: {reason}; `kvpack shaders export` writes manifests")]
    Manifest {
        /// The file, with line and column where the text itself is at fault.
        file: String,
        /// What is wrong, and where in the document.
        reason: String,
    },
    /// The device failed: lost, out of memory, or a validation error.
    #[error("the GPU device failed during {during}: {message}")]
    Device {
        /// What was being done.
        during: String,
        /// The words of the driver or of wgpu.
        message: String,
    },
    /// Keys or values that are not numbers, met while they were packed.
    #[error(
        "{count} NaN or infinite keys and values on their way into `{pair}`; no figure is computed from them"
    )]
    NonFiniteRows {
        /// The pair.
        pair: String,
        /// How many.
        count: u64,
    },
    /// A result that is not a number where numbers are compared.
    #[error("{what}: {nan} NaN and {infinite} infinite values; no figure is computed from them")]
    NonFinite {
        /// Where they were found.
        what: String,
        /// How many NaN.
        nan: u64,
        /// How many infinities.
        infinite: u64,
    },
    /// Numbers of the device that are not those of the reference, met before anything was timed.
    #[error(
        "{what}: off by {error:.3e}, the bound is {bound:.3e}; nothing was timed; `kvpack validate` checks this adapter"
    )]
    Mismatch {
        /// What was compared.
        what: String,
        /// The largest error.
        error: f64,
        /// Its bound.
        bound: f64,
    },
}

/// The library's result.
pub type Result<T> = std::result::Result<T, Error>;
