//! Element formats: what one stored number is. The registry is [`ALL`].
//!
//! A file a format: its constants, `encode` (an exact quotient to a code), `decode` (a code to its value) and its
//! tests. The same format in WGSL is `shaders/formats/<name>.wgsl`. A new format is those two files and a line here.
//!
//! `encode` receives the *exact* quotient of number and scale. The quotient is formed in f64, which is exact enough to
//! decide every code: a quotient of two 24-bit numbers that is not a midpoint lies at least 2^-34 (relative) away from
//! any midpoint of these grids, and f64 division errs by 2^-53.

mod e2m1;
mod e4m3;
mod f16;
mod f32;
mod int2;
mod int4;
mod int8;
mod round;

pub use round::{Float, round_to_float};

/// The facts of one element format.
#[derive(Debug)]
pub struct ElementInfo {
    /// Its name, also the WGSL file's and the prefix of its WGSL functions.
    pub name: &'static str,
    /// Bits of one code; a divisor of 32.
    pub bits: u32,
    /// Largest finite magnitude, in units of the scale: the `L` of `scale = amax / L`.
    pub max: f32,
    /// Whether codes carry a sign bit of their own (floats: -0 exists) or are two's complement.
    pub float: bool,
    /// Whether the format is stored without any scale (f32, f16).
    pub plain: bool,
    /// The value of a code, in units of the scale.
    pub decode: fn(u32) -> f32,
    /// The code of an exact finite quotient: rounded once to the grid, ties to even, saturated.
    pub encode: fn(f64) -> u32,
    /// Whether a quotient rounds beyond the largest code on the grid continued upwards.
    pub saturates: fn(f64) -> bool,
    /// The grid of a small binary float, with the largest finite pattern; scales are rounded to the same grids.
    pub grid: Option<(Float, u64)>,
    /// The WGSL text of the format.
    pub wgsl: &'static str,
}

/// An element format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Element {
    /// binary32: the reference side, same kernels and pages.
    F32,
    /// binary16.
    F16,
    /// FP8 E4M3FN: 448 is the largest, no infinity.
    E4m3,
    /// Two's complement, -127..=127.
    Int8,
    /// Two's complement, -7..=7.
    Int4,
    /// Ternary: -1, 0, 1 in two bits.
    Int2,
    /// FP4 E2M1: 0 0.5 1 1.5 2 3 4 6.
    E2m1,
}

/// Every element format.
pub const ALL: [Element; 7] = [
    Element::F32,
    Element::F16,
    Element::E4m3,
    Element::Int8,
    Element::Int4,
    Element::Int2,
    Element::E2m1,
];

/// What encoding one number gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// The stored code, in the low bits.
    pub code: u32,
    /// The number was NaN or infinite.
    pub non_finite: bool,
    /// The number was finite and rounds beyond the largest code.
    pub saturated: bool,
}

impl Element {
    /// The facts of this format.
    pub fn info(self) -> &'static ElementInfo {
        match self {
            Element::F32 => &f32::INFO,
            Element::F16 => &f16::INFO,
            Element::E4m3 => &e4m3::INFO,
            Element::Int8 => &int8::INFO,
            Element::Int4 => &int4::INFO,
            Element::Int2 => &int2::INFO,
            Element::E2m1 => &e2m1::INFO,
        }
    }

    /// Bits of one code.
    pub fn bits(self) -> u32 {
        self.info().bits
    }

    /// Codes in one 32-bit word.
    pub fn per_word(self) -> u32 {
        32 / self.bits()
    }

    /// The value of a code, in units of the scale. Bits above the code's are ignored.
    pub fn decode(self, code: u32) -> f32 {
        let mask = u32::MAX >> (32 - self.bits());
        (self.info().decode)(code & mask)
    }

    /// The code of `x` under the stored scale `scale`: the exact quotient, rounded once to the grid, ties to even,
    /// then saturated.
    ///
    /// NaN gives the code of +0, an infinity the largest finite code of its sign. Inputs below 2^-126 in magnitude
    /// count as 0, and a scale of 0 makes every code 0; floats keep the sign of zero, integers have one zero.
    pub fn encode(self, x: f32, scale: f32) -> Encoded {
        let info = self.info();
        let non_finite = !x.is_finite();
        if x.is_nan() {
            return Encoded {
                code: 0,
                non_finite,
                saturated: false,
            };
        }
        let x = flush(x);
        let quotient = if x.is_infinite() && scale != 0.0 {
            f64::from(info.max).copysign(f64::from(x))
        } else if x == 0.0 || scale == 0.0 {
            0.0_f64.copysign(f64::from(x))
        } else {
            f64::from(x) / f64::from(scale)
        };
        Encoded {
            code: (info.encode)(quotient),
            non_finite,
            saturated: !non_finite && (info.saturates)(quotient),
        }
    }
}

/// f32 subnormals count as 0 on every path, since drivers may flush them; the sign stays.
pub fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

/// Two's complement in the low `bits` bits.
fn sign_extend(code: u32, bits: u32) -> f32 {
    let shift = 32 - bits;
    (((code << shift) as i32) >> shift) as f32
}

/// A quotient to a two's complement code in -limit..=limit.
fn integer_code(quotient: f64, limit: f64, bits: u32) -> u32 {
    let rounded = quotient.round_ties_even().clamp(-limit, limit) as i32;
    rounded as u32 & (u32::MAX >> (32 - bits))
}
