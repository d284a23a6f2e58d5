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
