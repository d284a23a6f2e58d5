// ======== quantize
// New rows into packed pages, for sides whose scale belongs to one token (or to none): one invocation packs one unit
// (a head, or a block of 16 channels) of up to four slots that share their scale words, and owns every word it writes.
const WG_SIZE: u32 = 64u; // invocations of a workgroup
const UNITS: u32 = 2u; // units of a row
const UNIT_CHANNELS: u32 = 64u; // channels of a unit
const UNIT_WORDS: u32 = 4u; // words of a unit's codes
const OWN_SCALE: bool = true; // each unit of each token has a scale in the page; else the scale is given, or 1
const LARGEST_ODD: u32 = 1u; // the largest code is LARGEST_ODD * 2^LARGEST_POWER
const LARGEST_POWER: i32 = 0;

struct Params {
    runs: u32, // runs in the list
    row_offset: u32, // first element of row 0
    row_stride: u32, // elements from a token to the next
    head_stride: u32, // elements from a head to the next
    side_tensor: u32, // place of this side's per-tensor scale
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<u32>; // [token, head, channel] new rows, or [page, word] where rows wait
@group(0) @binding(2) var<storage, read> runs: array<vec4<u32>>; // [run] (page, first slot, slots, first row or source page)
@group(0) @binding(3) var<storage, read> tensor_scales: array<f32>; // [layer, side]
@group(0) @binding(4) var<storage, read_write> pages: array<u32>; // [page, word]
@group(0) @binding(5) var<storage, read_write> status: array<atomic<u32>>; // [2] (not finite, saturated)

@compute @workgroup_size(WG_SIZE)
fn quantize(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = (group.y * grid.x + group.x) * WG_SIZE + local;
    if (index >= params.runs * UNITS) {
        return;
    }
    let run = runs[index / UNITS];
    let unit = index % UNITS;
    let base = run.x * SIDE_PAGE_WORDS;
    var counted = vec2<u32>();
    var scale_bits = vec4<u32>();
    for (var i = 0u; i < run.z; i++) {
        var s = 1.0;
        if (OWN_SCALE) {
            var amax = 0u;
            for (var c = 0u; c < UNIT_CHANNELS; c++) {
                let channel = unit * UNIT_CHANNELS + c;
                let x = source_bits(run, i, channel / SIDE_HEAD_DIM, channel % SIDE_HEAD_DIM);
                amax = max(amax, finite_magnitude(x));
            }
            let stored = side_scale_from(amax, LARGEST_ODD, LARGEST_POWER);
            counted.y += stored.y;
            scale_bits[i] = stored.x;
            s = side_scale_values(vec4<u32>(stored.x)).x;
        } else {
            s = given_scale();
        }
        for (var w = 0u; w < UNIT_WORDS; w++) {
            var word = 0u;
            for (var e = 0u; e < 32u / SIDE_BITS; e++) {
                let c = w * (32u / SIDE_BITS) + e;
                if (c < UNIT_CHANNELS) {
                    let channel = unit * UNIT_CHANNELS + c;
                    let x = source_bits(run, i, channel / SIDE_HEAD_DIM, channel % SIDE_HEAD_DIM);
                    let coded = encode_any(x, s);
                    word |= coded.x << (e * SIDE_BITS);
                    counted += coded.yz;
                }
            }
            pages[base + (unit * UNIT_WORDS + w) * SIDE_PAGE_TOKENS + run.y + i] = word;
        }
    }
    if (OWN_SCALE) {
        // Slots beside the run keep what they have: their scales share these words.
        for (var i = 0u; i < run.z; i++) {
            put_scale(base, unit * SIDE_PAGE_TOKENS + run.y + i, scale_bits[i]);
        }
    }
    report_counts(counted);
}

// ======== parts/rows_f32
// New rows as f32, [token][head][channel] with the strides of `params`; run.w is the first slot's row.
fn source_bits(run: vec4<u32>, i: u32, head: u32, channel: u32) -> u32 {
    return source[params.row_offset + (run.w + i) * params.row_stride + head * params.head_stride + channel];
}

// ======== parts/side for side
// The geometry of one side's pages. Written once with names that begin with side_; the composer makes the copies for
// K (k_) and V (v_). A page is a code plane, word w of slot t at w * SIDE_PAGE_TOKENS + t, then a plane of scales.
const SIDE_BITS: u32 = 2u; // of a code
const SIDE_HEADS: u32 = 2u; // KV heads
const SIDE_HEAD_DIM: u32 = 64u; // channels of a head
const SIDE_HEAD_WORDS: u32 = 4u; // words of a head of one token
const SIDE_PAGE_TOKENS: u32 = 64u; // slots
const SIDE_PAGE_WORDS: u32 = 576u; // words of a whole page
const SIDE_SCALE_OFFSET: u32 = 512u; // word at which the scales begin
const SIDE_SCALE_BITS: u32 = 16u; // of a stored scale
const SIDE_GROUP: u32 = 1u; // tokens that share a per-channel scale
const_assert SIDE_HEAD_DIM % 8u == 0u;
const_assert SIDE_PAGE_TOKENS % 8u == 0u;
const_assert SIDE_PAGE_TOKENS % SIDE_GROUP == 0u;
const_assert SIDE_PAGE_WORDS % 4u == 0u;

// ======== parts/encode
// What every encoder does before its own format: input classes by bit pattern, since compilers may assume no NaN or
// infinity.

// The bits of a number as the formats see it: subnormals count as zero, the sign stays.
fn flushed(x: u32) -> u32 {
    return select(x, x & 0x80000000u, (x & 0x7f800000u) == 0u);
}

// The bits of |x| if x is finite, else of 0: what enters a group's amax.
fn finite_magnitude(x: u32) -> u32 {
    let magnitude = flushed(x) & 0x7fffffffu;
    return select(magnitude, 0u, magnitude >= 0x7f800000u);
}

// (code, not finite, saturated) of any f32 bits under a stored scale. NaN gives the code of +0, an infinity the largest
// finite code of its sign.
fn encode_any(x: u32, s: f32) -> vec3<u32> {
    let magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return vec3<u32>(0u, 1u, 0u);
    }
    if (magnitude == 0x7f800000u) {
        return vec3<u32>(side_encode((x & 0x80000000u) | 0x7f7fffffu, s).x, 1u, 0u);
    }
    let coded = side_encode(flushed(x), s);
    return vec3<u32>(coded.x, 0u, coded.y);
}

// ======== parts/write_side
// What both packing kernels write besides code words: scales and the append status.

// Writes one stored scale; `element` is its place in the plane. The word's other scales stay: they may be of tokens or
// channels that another dispatch packed. No other invocation writes this word.
fn put_scale(base: u32, element: u32, stored: u32) {
    let bit = element * SIDE_SCALE_BITS;
    let at = base + SIDE_SCALE_OFFSET + bit / 32u;
    let mask = (0xffffffffu >> (32u - SIDE_SCALE_BITS)) << (bit & 31u);
    pages[at] = (pages[at] & ~mask) | (stored << (bit & 31u));
}

// Adds what an invocation counted: numbers that are not finite, and saturations.
fn report_counts(counted: vec2<u32>) {
    if (counted.x > 0u) {
        atomicAdd(&status[0], counted.x);
    }
    if (counted.y > 0u) {
        atomicAdd(&status[1], counted.y);
    }
}

// ======== formats/int2 encoder

// (code, saturated) of a finite number given as its bits, under scale s: ties to even, 1 at most.
fn int2_encode(x: u32, s: f32) -> vec2<u32> {
    let rounded = integer_quotient(bitcast<f32>(x & 0x7fffffffu), s, 1.0);
    let code = select(rounded.x, 0u - rounded.x, (x >> 31u) == 1u);
    return vec2<u32>(code & 3u, rounded.y);
}

// ======== parts/quotient
// Deciding which side of a midpoint an exact quotient x / s lies on, without dividing.

// The sign of x - mid * s, exactly: s is split into two halves of 12 bits, so that both products with a midpoint of at
// most 8 bits are exact in f32; the three terms are never summed. Right for s >= 2^-93, flushed subnormals or not.
// Very large s would overflow the products, so both sides shrink by the same power of two.
fn compare_product(x: f32, mid: f32, s: f32) -> i32 {
    let shrink = select(1.0, 2.3283064365386963e-10, s > 1.0e30);
    let high = bitcast<f32>(bitcast<u32>(s) & 0xfffff000u) * shrink;
    let rest = x * shrink - mid * high;
    let low = mid * (s * shrink - high);
    return i32(rest > low) - i32(rest < low);
}

// Whether x / s rounds to the code above `code`, `mid` being the midpoint between the two: ties go to the even code.
fn rounds_up(x: f32, mid: f32, s: f32, code: u32) -> bool {
    return compare_product(x, mid, s) >= 1 - i32(code & 1u);
}

// (|x| / s rounded to an integer, ties to even, at most `limit`; 1 where it rounds beyond `limit`). `limit` is odd.
fn integer_quotient(magnitude: f32, s: f32, limit: f32) -> vec2<u32> {
    if (s == 0.0) {
        return vec2<u32>(0u, 0u);
    }
    if (compare_product(magnitude, limit + 0.5, s) >= 0) {
        return vec2<u32>(u32(limit), 1u);
    }
    // A first guess from a division that may be a few ulp off, then the exact decision on either side of it.
    let guess = clamp(floor(magnitude / s + 0.5), 0.0, limit);
    var code = u32(guess);
    if (rounds_up(magnitude, guess + 0.5, s, code)) {
        code += 1u;
    } else if (code > 0u) {
        if (!rounds_up(magnitude, guess - 0.5, s, code - 1u)) {
            code -= 1u;
        }
    }
    return vec2<u32>(code, 0u);
}

// ======== formats/f16
// binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits; two numbers a word, two words a quad, no scale.
//   bits   31..16     15..0
//   channel  1          0
// Integer arithmetic throughout: WGSL leaves rounding and subnormals of its own conversions open.
const F16_BITS: u32 = 16u;

// The f32 bits of four binary16 patterns; infinities and NaN stay what they are.
fn f16_widen(codes: vec4<u32>) -> vec4<u32> {
    let shifted = (codes & vec4<u32>(0x7fffu)) << vec4<u32>(13u);
    let normal = select(shifted + vec4<u32>(0x38000000u), shifted | vec4<u32>(0x7f800000u), shifted >= vec4<u32>(0x0f800000u));
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(codes & vec4<u32>(0x3ffu)) * 5.9604644775390625e-8);
    let magnitude = select(normal, subnormal, shifted < vec4<u32>(0x00800000u));
    return magnitude | ((codes & vec4<u32>(0x8000u)) << vec4<u32>(16u));
}

// The values of four codes.
fn f16_values(codes: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(f16_widen(codes));
}

// Channels 4 quad .. 4 quad + 3 of one slot; `words` are the head's words from that quad on.
fn f16_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {
    return f16_values(vec4<u32>(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u));
}

// ======== scales/stored_f16
// Scales stored as binary16: above 65504 clamped.

// (stored bits, clamped) of the exact amax / (odd * 2^power).
fn stored_f16_from(amax: u32, odd: u32, power: i32) -> vec2<u32> {
    let pattern = small_quotient(amax, odd, power, 10, -24);
    return vec2<u32>(min(pattern, 0x7bffu), u32(pattern > 0x7bffu));
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

// ======== the names that the kernel calls
fn side_encode(x: u32, s: f32) -> vec2<u32> { return int2_encode(x, s); }
fn side_scale_values(bits: vec4<u32>) -> vec4<f32> { return f16_values(bits); }
fn side_scale_from(amax: u32, odd: u32, power: i32) -> vec2<u32> { return stored_f16_from(amax, odd, power); }
fn given_scale() -> f32 { return 1.0; }
