// ======== tensor_scale
// Per-tensor scales from the largest magnitudes that amax found; the magnitudes start again from 0.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const LARGEST_ODD: u32 = 7u; // the largest code is LARGEST_ODD * 2^LARGEST_POWER
const LARGEST_POWER: i32 = 6;

struct Params {
    first: u32, // first slot
    slots: u32, // slots from it on
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> largest: array<u32>; // [layer, side], bits of f32
@group(0) @binding(2) var<storage, read_write> tensor_scales: array<u32>; // [layer, side], bits of f32

@compute @workgroup_size(WG_SIZE)
fn tensor_scale(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    if (index >= params.slots) {
        return;
    }
    let slot = params.first + index;
    tensor_scales[slot] = stored_f32_from(largest[slot], LARGEST_ODD, LARGEST_POWER).x;
    largest[slot] = 0u;
}

// ======== scales/stored_f32
// Scales stored as binary32: a computed scale below 2^-90 is stored as 0.

// (stored bits, clamped) of the exact amax / (odd * 2^power).
fn stored_f32_from(amax: u32, odd: u32, power: i32) -> vec2<u32> {
    let pattern = small_quotient(amax, odd, power, 23, -149);
    return vec2<u32>(select(pattern, 0u, pattern < 0x12800000u), 0u);
}

// ======== parts/small_float
// Rounding to a small binary float in integer arithmetic, ties to even. WGSL fixes neither division nor conversion.

// The pattern without sign of significand * 2^exponent, with a `sticky` remainder below it. Bit 31 of `significand` is
// set. The grid has `mantissa_bits`, 2^least is its least value, and it continues upwards without limit.
fn small_float(significand: u32, exponent: i32, sticky: bool, mantissa_bits: i32, least: i32) -> u32 {
    let unit = max(exponent + 31 - mantissa_bits, least);
    let drop = u32(unit - exponent); // at least 8
    let all = drop >= 32u;
    let kept = select(significand >> (drop & 31u), 0u, all);
    let rest = select(significand << ((32u - drop) & 31u), significand, all);
    let above = rest > 0x80000000u || (rest == 0x80000000u && (sticky || (kept & 1u) == 1u));
    let pattern = (u32(unit - least) << u32(mantissa_bits)) + kept + u32(above);
    return select(pattern, 0u, drop > 32u);
}

// The pattern of amax / (odd * 2^power), rounded once; `amax` is the bits of a finite f32 that is not negative.
// The quotient keeps at least 25 bits for odd <= 127, enough for 24 and a rounding bit; the remainder is sticky.
fn small_quotient(amax: u32, odd: u32, power: i32, mantissa_bits: i32, least: i32) -> u32 {
    let dividend = ((amax & 0x7fffffu) | 0x800000u) << 8u;
    let quotient = dividend / odd;
    let zeros = countLeadingZeros(quotient);
    let exponent = i32(amax >> 23u) - 158 - power - i32(zeros);
    let pattern = small_float(quotient << zeros, exponent, quotient * odd != dividend, mantissa_bits, least);
    return select(pattern, 0u, amax < 0x00800000u);
}

