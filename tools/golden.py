#!/usr/bin/env python3
"""Golden bits for kvpack, computed from the written format rules alone.

    tools/golden.py            write tests/golden/
    tools/golden.py --check    regenerate and compare byte for byte; exit 1 on any difference

This program shares no code with the library, its shaders or its tests. All quantisation arithmetic is exact
(integers and fractions.Fraction, no float division anywhere); the code tables of E4M3FN, E2M1, INT4 and INT2
come from ml_dtypes, those of binary16 and INT8 from numpy, and ml_dtypes/numpy casts check every conversion at
scale 1. Known good with Python 3.11, numpy 2.4.6, ml_dtypes 0.6.0:  pip install numpy==2.4.6 ml_dtypes==0.6.0
(--check prints the versions in use; the files do not depend on them unless a table is wrong).

Conventions of the files
  Hex is lower case, without prefix or separators: 8 digits per f32 or u32 (the value, not its bytes in memory),
  4 per u16, 2 per u8. An array is one string of such items. Codes of 8, 4 and 2 bits take 2 digits, upper bits
  zero (INT4 -1 is 0f); f16 codes take 4. "flags" and "clamped" hold one digit per item.
  flags: 1 = counted as non-finite, 2 = counted as saturated, never both.

elements.json
  {e4m3, e2m1, int8, int4, int2, f16}: item c is the f32 value of code c, for every code of the element. NaN codes
  are listed as sign | 7fc00000 (check only that they decode to NaN); -128, -8 and -2 are decoded, never written.

rounding.json   x / 1 rounded to the element
  {kind: {x, code, flags}} for e4m3, e2m1, int8, int4, int2, f16: every finite code's own value, all midpoints of
  neighbouring codes with the next f32 below and above (for f16: a sample), both signs; saturation edges, zeros,
  subnormals, NaN and Inf. f16 also has {tie}: for c = 0 .. 7bfe, item c is the code of the midpoint of codes c and c + 1
  (the exact mean of their values, an f32); the f32 below it gives c, the f32 above it c + 1; no flags. The same
  holds with all signs set.

scales.json   largest magnitude -> stored scale
  [{name, divisor, scale, amax, bits, clamped}]: scale is "f16", "e4m3" or "f32" and sets the width of `bits`.
  clamped = 1 where the quotient rounds beyond the largest scale. A scale that becomes 0, or E4M3's floor 2^-9, is
  not a clamp. No computed scale ever is above the largest f32.

codes.json   (x, stored scale) -> code -> value
  [{name, element, scale, x, s, code, flags, value}]: s has the width of its scale type, value is the f32 of
  code x s rounded once. The first three cases of int8_f16 and int8_f32 are the f32-division traps of 3.0/127.
  Names ending in _large hold f32 scales above 2^118, which only a computed scale can be.

pages/NAME.json   whole pages
  side, element, scale ("f16" | "e4m3" | "f32" | "none": none in the page), group (tokens per group of a
  per-channel side, 1 otherwise), heads, head_dim, page_tokens (P), tokens (length), window (R),
  packed (the boundary b: tokens below it are packed, the others lie in f16 pages at the same slots),
  f16_first (1: rows are rounded to f16 before packing), tensor_scale (f32 hex, or ""),
  rows: f32 [token][head][channel],
  planes: [{name, offset, bytes, padding}] of a packed page, bytes include the `padding` bytes at the plane's end;
  page_bytes; pages: [{page, words}] the pages that hold a packed token, all words, dead slots and padding zero;
  open_planes, open_page_bytes, open_pages: the same for the f16 pages of tokens [packed, tokens),
  nonfinite: non-finite inputs, each counted once, when its row enters,
  saturated = saturated_rows (rounding rows to f16) + saturated_codes (packing) + saturated_scales (clamped scales).
  For the f16 side itself every token is packed and its saturations are saturated_codes.

Choices where the rules leave room
  - A zero scale wins over everything: every code is the zero code (of x's sign for float elements, +0 for NaN),
    also for Inf, and nothing is counted as saturated.
  - A scale is clamped when the quotient *rounds* beyond the largest one: f16 from 65520, E4M3 above 464.
  - A per-tensor scale takes no room in a page. Per-channel groups that are not full have scale and codes zero.
"""
import json
import sys
from bisect import bisect_left
from fractions import Fraction as F
from pathlib import Path

import ml_dtypes
import numpy as np

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden"
NONFINITE, SATURATED = 1, 2
SIGN, INF, FMAX = 0x80000000, 0x7F800000, 0x7F7FFFFF


# ---- f32 as bits and as exact numbers ------------------------------------------------------------------------

def two(e):
    return F(2) ** e


def mag(bits):
    """|x| of a finite f32, exactly."""
    e, m = bits >> 23 & 255, bits & 0x7FFFFF
    return m * two(-149) if e == 0 else (m | 0x800000) * two(e - 150)


def f32(q):
    """Bits of the f32 nearest to q >= 0, ties to even."""
    if q == 0:
        return 0
    e = q.numerator.bit_length() - q.denominator.bit_length()
    if q < two(e):
        e -= 1
    e = max(e, -126)
    t = q / two(e - 23)
    n, r = divmod(t.numerator, t.denominator)
    n += 2 * r > t.denominator or (2 * r == t.denominator and n & 1)
    return min((e + 126 << 23) + n, INF)


def bits_of(array):
    """f32 bits of a numpy array, NaN made canonical."""
    b = np.asarray(array).astype(np.float32).view(np.uint32)
    return [int(v) if v & 0x7FFFFFFF <= INF else int(v) & SIGN | 0x7FC00000 for v in b]


def floats(bits):
    return np.array(bits, np.uint32).view(np.float32)


# ---- elements ------------------------------------------------------------------------------------------------

class Element:
    """Codes of one element. Magnitudes of codes 0 .. top come from the table; one more step of the same size
    stands for everything that rounds beyond the largest code."""

    def __init__(self, name, dtype, bits, top, is_float):
        self.name, self.dtype, self.bits, self.top, self.is_float = name, dtype, bits, top, is_float
        raw = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
        self.table = bits_of(raw.view(dtype))
        mags = [mag(self.table[c]) for c in range(top + 1)]
        mags.append(2 * mags[-1] - mags[-2])
        self.max = mags[top]
        self.mids = [(a + b) / 2 for a, b in zip(mags, mags[1:])]

    def nearest(self, q):
        """Index of the nearest magnitude to q >= 0, ties to the even code; top + 1 means saturated."""
        i = bisect_left(self.mids, q)
        return i + (i <= self.top and q == self.mids[i] and i & 1)

    def signed(self, i, negative):
        if self.is_float:
            return i | negative << self.bits - 1
        return (-i if negative else i) & (1 << self.bits) - 1

    def encode(self, x, s):
        """f32 bits x, exact stored scale s -> (code, flags)."""
        negative, a = x >> 31, x & ~SIGN
        if a > INF:
            return 0, NONFINITE
        if a == INF:
            return self.signed(self.top if s else 0, negative), NONFINITE
        if a < 0x00800000 or s == 0:
            return self.signed(0, negative), 0
        i = self.nearest(mag(a) / s)
        return self.signed(min(i, self.top), negative), SATURATED if i > self.top else 0

    def value(self, code, s):
        """f32 bits of code x s, rounded once."""
        v = self.table[code]
        return v & SIGN | f32(mag(v) * s)


F16 = Element("f16", np.float16, 16, 0x7BFF, True)
E4M3 = Element("e4m3", ml_dtypes.float8_e4m3fn, 8, 0x7E, True)
E2M1 = Element("e2m1", ml_dtypes.float4_e2m1fn, 4, 7, True)
INT8 = Element("int8", np.int8, 8, 127, False)
INT4 = Element("int4", ml_dtypes.int4, 4, 7, False)
INT2 = Element("int2", ml_dtypes.int2, 2, 1, False)
ELEMENTS = [E4M3, E2M1, INT8, INT4, INT2, F16]

SCALE_BITS = {"f16": 16, "e4m3": 8, "f32": 32, "none": 0}


def scale_value(kind, bits):
    return mag({"f16": F16.table, "e4m3": E4M3.table}[kind][bits] if kind != "f32" else bits)


def scale_of(amax, divisor, kind):
    """Exact largest magnitude -> (bits of the stored scale, clamped)."""
    q = F(amax) / divisor
    if kind == "f32":
        b = f32(q)
        return (b if mag(b) >= two(-90) else 0), 0
    grid = F16 if kind == "f16" else E4M3
    i = grid.nearest(q)
    if i == 0 and kind == "e4m3":
        i = 1  # 2^-9
    return min(i, grid.top), int(i > grid.top)


# ---- hex and random numbers ----------------------------------------------------------------------------------

def hexes(items, width):
    return "".join(f"{v:0{width}x}" for v in items)


class Rng:
    """splitmix64: the same numbers on every Python."""

    def __init__(self, seed):
        self.s = seed

    def below(self, n):
        self.s = self.s + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        z = self.s
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        return (z ^ z >> 31) % n

    def pick(self, items):
        return items[self.below(len(items))]

    def real(self, lo, hi, signed=True):
        """f32 bits with 2^lo <= |x| < 2^hi, exponents uniform."""
        return self.below(2) * SIGN * signed | 127 + lo + self.below(hi - lo) << 23 | self.below(1 << 23)


def near(bits, steps):
    """f32 bits at the given distances in ulp, kept among the non-negative finite ones."""
    return [b for b in (bits + k for k in steps) if 0 <= b <= FMAX]


def f(text):
    """Bits of the f32 nearest to a decimal number."""
    return f32(abs(F(text))) | SIGN * (text[0] == "-")


# ---- elements.json, rounding.json ----------------------------------------------------------------------------

def elements_file():
    return {e.name: hexes(e.table, 8) for e in ELEMENTS}


SPECIALS = [0, 1, 0x007FFFFF, 0x00800000, 0x00800001, FMAX, INF, 0x7FC00000, 0x7F800001, 0x7FFFFFFF]


def rounding_cases(e):
    if e is F16:
        mids = {0, 1, 2, 0x3FE, 0x3FF, 0x400, 0x401, 0x3BFF, 0x3C00, 0x7BFE} | set(range(5, 0x7BFF, 997))
        own = [e.table[c] for c in range(0, 0x7C00, 499)]
        edges = "65503.996 65504 65504.004 65519.992 65519.996 65520 65520.004 65536 65537 100000 1e30"
    else:
        mids = set(range(e.top))
        own = [e.table[c] for c in range(e.top + 1)]
        edges = {E4M3: "448 448.00003 463.99997 464 464.00003 465 479 480 1000 1e30",
                 E2M1: "6 6.5 6.9999995 7 7.0000005 8 0.25000006 5.0000005 100 1e30",
                 INT8: "127.49999 127.5 127.50001 128 128.5 129 255 256 1e30",
                 INT4: "7.4999995 7.5 7.5000005 8 8.5 15 16 1e30",
                 INT2: "1.4999999 1.5 1.5000001 2 2.5 3 4 1e30"}[e]
    xs = own + [b for c in sorted(mids) for b in near(f32(e.mids[c]), (-1, 0, 1))]
    xs += [f(t) for t in edges.split()] + near(f32(e.mids[e.top]), (-1, 0, 1)) + SPECIALS
    return xs + [x | SIGN for x in xs]


def rounding_file():
    out = {}
    for e in ELEMENTS:
        xs = rounding_cases(e)
        got = [e.encode(x, F(1)) for x in xs]
        check_against_casts(e, xs, [c for c, _ in got])
        out[e.name] = {"x": hexes(xs, 8), "code": hexes([c for c, _ in got], max(2, e.bits // 4)),
                       "flags": hexes([g for _, g in got], 1)}
    mids = [f32(m) for m in F16.mids[:F16.top]]
    below, tie, above = ([F16.encode(m + k, F(1)) for m in mids] for k in (-1, 0, 1))
    assert below == [(c, 0) for c in range(F16.top)] and above == [(c + 1, 0) for c in range(F16.top)]
    for k, codes in zip((-1, 0, 1), (below, tie, above)):
        for sign in (0, 1):
            xs = [m + k | sign * SIGN for m in mids]
            check_against_casts(F16, xs, [c | sign << 15 for c, _ in codes])
    assert all(mag(m) == e for m, e in zip(mids, F16.mids))
    assert all(F16.encode(m | SIGN, F(1)) == (c | 0x8000, 0) for m, (c, _) in zip(mids, tie))
    out["f16"]["tie"] = hexes([c for c, _ in tie], 4)
    return out


def check_against_casts(e, xs, codes):
    """numpy/ml_dtypes agree wherever their casts are defined: finite, clamped to the finite range."""
    live = [(x, c) for x, c in zip(xs, codes) if x & ~SIGN < INF]
    x = np.clip(floats([x for x, _ in live]), -float(e.max), float(e.max))
    if not e.is_float:
        x = np.rint(x)
    cast = x.astype(e.dtype).view(np.uint16 if e.bits == 16 else np.uint8) & (1 << e.bits) - 1
    assert cast.tolist() == [c for _, c in live], e.name


# ---- scales.json ---------------------------------------------------------------------------------------------

def scales_file():
    out = []
    kinds = [("int8_f16", 127, "f16"), ("int4_f16", 7, "f16"), ("int2_f16", 1, "f16"), ("fp4_e4m3", 6, "e4m3"),
             ("fp8_f32", 448, "f32"), ("int8_f32", 127, "f32"), ("int4_f32", 7, "f32"), ("int2_f32", 1, "f32")]
    for n, (name, div, kind) in enumerate(kinds):
        rng = Rng(300 + n)
        xs = [0, 1, 0x007FFFFF, 0x00800000, FMAX] + [f(t) for t in (
            "1e-6 3e-6 0.7 1 3 6 127 448 2688 2784 2784.0002 3000 65504 65519.996 65520 70000 458528 500000 1e7 "
            "8318504 8321040 6.3e-38 1e-30 1e30").split()]
        xs += [rng.real(-126, 128, False) for _ in range(120)]
        if kind == "f32":
            xs += [rng.real(-20, 20, False) for _ in range(120)]
            xs += [b for t in (two(-90), two(-91), two(-89)) for b in near(f32(t * div), (-2, -1, 0, 1, 2))]
            # quotients as close to a tie as this divisor allows: the remainder is next to half the divisor
            odd = div // 64 if div == 448 else div
            while odd > 1 and len(xs) < 400:
                b = rng.real(-60, 60, False)
                m = b & 0x7FFFFF | 0x800000
                k = 0  # the quotient of 2^k m has 24 bits
                while (m << k) // odd < 1 << 23:
                    k += 1
                if (m << k) % odd in (odd // 2, odd // 2 + 1):
                    xs.append(b)
            for b in near(f32(div * two(-90)), (-1,)):
                assert f32(mag(b) / div) < f32(two(-90))  # "below 2^-90" reads the same before and after rounding
        else:
            grid = F16 if kind == "f16" else E4M3
            lo, hi = (-26, 16) if kind == "f16" else (-11, 10)
            xs += [f32(mag(rng.real(lo, hi, False)) * div) for _ in range(150)]
            cs = [0, 1, 2, grid.top - 1, grid.top] + ([rng.below(grid.top) for _ in range(60)] +
                  [rng.below(1024) for _ in range(20)] if kind == "f16" else list(range(3, grid.top - 1)))
            for c in cs:  # exact ties of the quotient (they fit an f32) and their neighbours
                tie = div * grid.mids[c]
                assert mag(f32(tie)) == tie
                xs += near(f32(tie), (-1, 0, 1))
        got = [scale_of(mag(x), div, kind) for x in xs]
        out.append({"name": name, "divisor": div, "scale": kind, "amax": hexes(xs, 8),
                    "bits": hexes([b for b, _ in got], SCALE_BITS[kind] // 4), "clamped": hexes([c for _, c in got], 1)})
    return out


# ---- codes.json ----------------------------------------------------------------------------------------------

def codes_file():
    out = []
    kinds = [(INT8, "f16"), (INT4, "f16"), (INT2, "f16"), (INT8, "f32"), (INT4, "f32"), (INT2, "f32"),
             (E4M3, "f32"), (E2M1, "e4m3"), (INT8, "f32"), (INT4, "f32"), (INT2, "f32")]
    for n, (e, kind) in enumerate(kinds):
        rng, large = Rng(700 + n), n >= 8
        one = {"f16": 0x3C00, "e4m3": 0x38, "f32": 0x3F800000}[kind]
        small, big = {"f16": (1, 0x7BFF), "e4m3": (1, 0x7E), "f32": (f32(two(-90)), f32(two(118)))}[kind]

        def random_scale():
            if large:
                return scale_of(mag(rng.real(125, 128, False)), e.max, "f32")[0]
            if kind != "f32":
                return 1 + rng.below(big)
            return rng.real(-90, 118, False) if rng.below(3) == 0 else rng.real(-12, 4, False)

        def random_x(s):
            """Somewhere in the range of the codes, or a little beyond."""
            return f32(min(mag(rng.real(-2 if e.bits < 8 else -9, 1, False)) * e.max * s, mag(FMAX)))

        cases = []
        if e is INT8 and kind != "e4m3" and not large:  # 3.0/127: the exact quotients lie beside or at halves
            s = 0x3CC18306 if kind == "f32" else scale_of(F(3), 127, "f16")[0]
            cases += [(x, s) for x in (0x3C418307, 0x3DA952A5, 0x3E7DFBF9)]
        if not large:
            cases += [(x | sign, s) for s in (0, small, one, big) for x in SPECIALS for sign in (0, SIGN)]
            cases += [(f("0.7") | sign, 0) for sign in (0, SIGN)]
        for _ in range(60 if large else 320):
            s = random_scale()
            v = scale_value(kind, s)
            i = rng.pick((0, e.top, e.top - 1)) if rng.below(8) == 0 else rng.below(e.top + 1)
            b = f32(min(e.mids[i] * v, mag(FMAX)))
            cases += [(x | rng.below(2) * SIGN, s) for x in near(b, (-2, -1, 0, 1, 2)) if x >= 0x00800000]
        for _ in range(40 if large else 320):
            s = random_scale()
            cases.append((random_x(scale_value(kind, s)) | rng.below(2) * SIGN, s))
        got = [e.encode(x, scale_value(kind, s)) for x, s in cases]
        values = [e.value(c, scale_value(kind, s)) for (c, _), (_, s) in zip(got, cases)]
        assert all(v & ~SIGN < INF for v in values)
        out.append({"name": f"{e.name}_{kind}" + "_large" * large, "element": e.name, "scale": kind,
                    "x": hexes([x for x, _ in cases], 8), "s": hexes([s for _, s in cases], SCALE_BITS[kind] // 4),
                    "code": hexes([c for c, _ in got], 2), "flags": hexes([g for _, g in got], 1),
                    "value": hexes(values, 8)})
    return out


# ---- pages ---------------------------------------------------------------------------------------------------

#        element, group of numbers, divisor, scale type
SIDES = {"f16": (F16, "none", 1, "none"), "fp8": (E4M3, "tensor", 448, "none"), "fp4": (E2M1, "block16", 6, "e4m3"),
         "int8": (INT8, "head", 127, "f16"), "int4": (INT4, "head", 7, "f16"), "int2": (INT2, "head", 1, "f16"),
         "int8c": (INT8, "channel", 127, "f16"), "int4c": (INT4, "channel", 7, "f16"),
         "int2c": (INT2, "channel", 1, "f16")}


class Page:
    """Words of one page: code plane (word-major, token-minor), then scale plane, each ending at 16 bytes."""

    def __init__(self, heads, head_dim, page_tokens, bits, scale_count, scale_bits):
        self.d, self.p, self.bits, self.scale_bits = head_dim, page_tokens, bits, scale_bits
        self.head_words = -(-head_dim * bits // 32)
        self.planes, at = [], 0
        for name, used in (("codes", heads * self.head_words * page_tokens * 4), ("scales", scale_count * scale_bits // 8)):
            size = -(-used // 16) * 16
            self.planes.append({"name": name, "offset": at, "bytes": size, "padding": size - used})
            at += size
        self.bytes = at
        self.words = [0] * (at // 4)

    def put_code(self, slot, head, channel, code):
        word, shift = divmod(channel * self.bits, 32)
        self.words[(head * self.head_words + word) * self.p + slot] |= code << shift

    def put_scale(self, index, scale):
        word, shift = divmod(index * self.scale_bits, 32)
        self.words[self.planes[1]["offset"] // 4 + word] |= scale << shift


def page_case(name, heads, d, p, tokens, rows, group=1, window=0, scale=None, tensor_scale=""):
    """rows: f32 bits, one list of heads * d per token."""
    element, axis, divisor, scale_kind = SIDES[name]
    scale_kind = scale or scale_kind
    hd = heads * d
    assert len(rows) == tokens and all(len(r) == hd for r in rows) and d % 8 == 0 and p % 8 == 0 and p % group == 0
    f16_first = axis == "channel" or window > 0
    boundary = max(0, tokens - window) // group * group
    scale_count = {"none": 0, "tensor": 0, "head": heads * p, "block16": hd // 16 * p, "channel": p // group * hd}[axis]
    count = {"nonfinite": 0, "rows": 0, "codes": 0, "scales": 0}

    # rows enter the cache
    entered, f16_rows = [], []
    for row in rows:
        count["nonfinite"] += sum(x & ~SIGN >= INF for x in row)
        if f16_first:
            got = [F16.encode(x, F(1)) for x in row]
            count["rows"] += sum(g == SATURATED for _, g in got)
            f16_rows.append([c for c, _ in got])
            entered.append([F16.table[c] for c, _ in got])
        else:
            entered.append(row)

    # the groups of the tokens below the boundary: (page, index in its scale plane, members as (token, channel))
    groups = []
    for t in range(boundary):
        slot = t % p
        if axis == "head":
            groups += [(t // p, h * p + slot, [(t, h * d + c) for c in range(d)]) for h in range(heads)]
        elif axis == "block16":
            assert hd % 16 == 0
            groups += [(t // p, g * p + slot, [(t, g * 16 + c) for c in range(16)]) for g in range(hd // 16)]
        elif axis == "channel":
            if t % group == 0:
                groups += [(t // p, slot // group * hd + c, [(t + k, c) for k in range(group)]) for c in range(hd)]
        else:
            groups.append((t // p, None, [(t, c) for c in range(hd)]))

    def new_page(bits, *scales):
        return Page(heads, d, p, bits, *scales)

    pages = {}
    for page, index, members in groups:
        out = pages.setdefault(page, new_page(element.bits, scale_count, SCALE_BITS[scale_kind]))
        if axis == "none":
            s = F(1)
        elif axis == "tensor":
            s = mag(int(tensor_scale, 16))
        else:
            finite = [x & ~SIGN for x in (entered[t][c] for t, c in members) if x & ~SIGN < INF]
            amax = max((mag(a) for a in finite if a >= 0x00800000), default=F(0))
            bits, clamped = scale_of(amax, divisor, scale_kind)
            count["scales"] += clamped
            out.put_scale(index, bits)
            s = scale_value(scale_kind, bits)
        for t, c in members:
            code, flags = element.encode(entered[t][c], s)
            count["codes"] += flags == SATURATED
            out.put_code(t % p, c // d, c % d, code)

    open_pages = {}
    for t in range(boundary, tokens):
        out = open_pages.setdefault(t // p, new_page(16, 0, 0))
        for c, code in enumerate(f16_rows[t]):
            out.put_code(t % p, c // d, c % d, code)

    packed_shape, open_shape = new_page(element.bits, scale_count, SCALE_BITS[scale_kind]), new_page(16, 0, 0)
    dump = lambda of: [{"page": k, "words": hexes(v.words, 8)} for k, v in sorted(of.items())]
    return {"side": name, "element": element.name, "scale": scale_kind, "group": group, "heads": heads, "head_dim": d,
            "page_tokens": p, "tokens": tokens, "window": window, "packed": boundary, "f16_first": int(f16_first),
            "tensor_scale": tensor_scale,
            "nonfinite": count["nonfinite"], "saturated": count["rows"] + count["codes"] + count["scales"],
            "saturated_rows": count["rows"], "saturated_codes": count["codes"], "saturated_scales": count["scales"],
            "planes": packed_shape.planes, "page_bytes": packed_shape.bytes,
            "open_planes": open_shape.planes, "open_page_bytes": open_shape.bytes,
            "rows": hexes([x for r in rows for x in r], 8), "pages": dump(pages), "open_pages": dump(open_pages)}


def make_rows(name, heads, d, tokens, seed, nonfinite=False):
    """Random rows with an outlier channel per head and planted troubles; see the comments."""
    rng, element, top = Rng(seed), SIDES[name][0], SIDES[name][2]
    hd = heads * d
    rows = [[rng.real(-4, 2) for _ in range(hd)] for _ in range(tokens)]
    for row in rows[::2]:
        for h in range(heads):
            row[h * d + 3] = row[h * d + 3] & ~(0xFF << 23) | (row[h * d + 3] >> 23 & 255) + 5 << 23

    def sign():
        return rng.below(2) * SIGN

    def half(limit):
        """A midpoint of the element below the limit, for scale 1."""
        return f32(element.mids[rng.below(bisect_left(element.mids, limit))]) | sign()

    def set_row(t, values):
        if t < tokens:
            rows[t] = values

    def set_channel(c, first, last, value):
        for t in range(first, min(last, tokens)):
            if c < hd:
                rows[t][c] = value(t)

    # along channels (for per-channel groups of up to 32 tokens)
    limit = f32(F(top if name not in ("f16", "fp8") else 8))
    set_channel(1, 32, 64, lambda t: limit | sign() if t % 8 == 0 else half(mag(limit)))  # scale 1, ties
    set_channel(2, 64, 96, lambda t: sign())  # zeros of both signs
    set_channel(5, 64, 96, lambda t: f("0.7"))  # a constant channel
    set_channel(0, 64, 96, lambda t: f32((1 + 2 * rng.below(2048)) * two(-11 - t % 3)) | sign())  # ties in f16
    tiny = max(3, 2 * int(top))
    set_channel(6, 64, 96, lambda t: f32((1 + rng.below(tiny)) * two(-24 - t % 2)) | sign())  # f16 subnormals
    over = max(1, int(top) * 149 // 100)  # scale 2^-24, rounded down: the largest saturate when packed
    set_channel(4, 32, 64, lambda t: f32((over if t % 8 == 0 else 1 + rng.below(over)) * two(-24)) | sign())
    set_channel(7, 32, 64, lambda t: f32((1 + rng.below(7)) * two(-27)) | sign())  # scale 0
    # along rows
    set_row(2, [0] * hd)
    set_row(3, [sign() for _ in range(hd)])
    set_row(5, [1 + rng.below(0x7FFFFE) | sign() for _ in range(hd)])  # f32 subnormals only
    set_row(6, [rng.pick([1 + rng.below(0x7FFFFE), rng.real(-6, 0, False), 0x00800000, 0x007FFFFF]) | sign()
                for _ in range(hd)])
    for t in (9, 67):  # every head and block reaches the divisor: scale 1, the rest are midpoints
        set_row(t, [limit | sign() if c % 8 == 4 else half(mag(limit)) for c in range(hd)])
    set_row(65, [f32((1 + rng.below(tiny)) * two(-24)) | sign() for _ in range(hd)])  # f16-subnormal scales
    set_row(66, [rng.real(-40, -26) for _ in range(hd)])  # scales that become 0, FP4's floor
    set_row(68, [f("100")] + [f("1")] * (hd - 1))
    if tokens > 14 and heads > 1:
        rows[14] = rows[14][:d] + [0] * d + rows[14][2 * d:]  # one head zero
    huge = "65504 65519.996 65520 70000 2784 3000 500000 8321040 1e7 1e30 3.4028234663852886e38".split()
    for t in (10, 64):  # f16 and scale overflow, in a few channels so that per-channel groups stay useful
        if t < tokens:
            for c in range(t % 3, hd, 5):
                rows[t][c] = f(rng.pick(huge[:6] if c % 2 else huge)) | sign()
    if tokens > 11:
        rows[11][hd - 1] = FMAX | SIGN
        rows[12][0] = f("2784.0002")  # just above 464 x 6
    if nonfinite:
        bad = [INF, INF | SIGN, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]
        for k, t in enumerate((0, 1, 9, 13, 33, 40, 63, 65, 70, tokens - 1)):
            if t < tokens:
                rows[t][(5 * k + 4) % hd] = bad[k % 6]
        set_row(3, [rng.pick([0, SIGN, INF, INF | SIGN, 0x7FC00000]) for _ in range(hd)])  # nothing finite but zeros
        set_row(16, [bad[c % 6] for c in range(hd)])
        set_row(tokens - 2, [rng.pick(bad) if c % 3 == 0 else rng.real(-2, 2) for c in range(hd)])
    return rows


def pages_files():
    out = {}
    # side, group, (P, tokens) for the shapes 2 x 8, 3 x 40 (fp4: 2 x 40), 1 x 80
    main = [("int4c", 32, ((64, 100), (64, 100), (64, 100))), ("fp4", 1, ((64, 100), (64, 100), (64, 70))),
            ("int2", 1, ((64, 100), (64, 100), (64, 70))), ("int8", 1, ((64, 100), (64, 100), (64, 70))),
            ("int4", 1, ((64, 100), (32, 41), (32, 37))), ("int8c", 8, ((64, 100), (32, 45), (32, 55))),
            ("int2c", 16, ((64, 100), (32, 51), (32, 47))), ("fp8", 1, ((64, 100), (32, 37), (32, 41))),
            ("f16", 1, ((64, 100), (32, 39), (32, 43)))]
    # extra: name suffix, side, group, heads, head_dim, P, tokens, window, scale type, non-finite inputs
    extra = [("_p96", "int4c", 32, 2, 8, 96, 130, 0, None, 0), ("_p32", "int4c", 32, 1, 40, 32, 45, 0, None, 0),
             ("_p32", "int2c", 16, 2, 24, 32, 47, 0, None, 0), ("_p24", "fp4", 1, 2, 8, 24, 29, 0, None, 0),
             ("_p32", "int2", 1, 3, 24, 32, 37, 0, None, 0), ("_p8", "int4", 1, 1, 8, 8, 11, 0, None, 0),
             ("_p128", "int8c", 128, 1, 8, 128, 129, 0, None, 0), ("_short", "int4c", 32, 2, 8, 64, 7, 0, None, 0),
             ("_window", "int4", 1, 2, 8, 64, 100, 10, None, 1), ("_window", "fp4", 1, 2, 8, 64, 100, 10, None, 1),
             ("_window", "int4c", 32, 2, 8, 64, 100, 10, None, 1), ("_f32scale", "int8", 1, 2, 8, 64, 70, 0, "f32", 0),
             ("_f32scale", "int4c", 32, 2, 8, 64, 100, 0, "f32", 1)]
    jobs = []
    for side, group, lengths in main:
        shapes = [(2, 8), (2 if side == "fp4" else 3, 40), (1, 80)]
        jobs += [("", side, group, h, d, p, n, 0, None, 0) for (h, d), (p, n) in zip(shapes, lengths)]
        jobs.append(("_nonfinite", side, group, 2, 8, 64, 100, 0, None, 1))
    for k, (suffix, side, group, h, d, p, n, window, scale, bad) in enumerate(jobs + extra):
        # fp8: a power of two, so that ties occur, or a full mantissa; outliers saturate under both
        fp8_scale = "" if side != "fp8" else "3e000000" if d == 8 else "3c4985f1"
        rows = make_rows(side, h, d, n, 9000 + k, bad)
        label = side + (str(group) if group > 1 else "")
        name = f"{label}_{h}x{d}{suffix}"
        assert name not in out
        out[name] = page_case(side, h, d, p, n, rows, group, window, scale, fp8_scale)
    return out


# ---- self-check: known answers -------------------------------------------------------------------------------

def codes(e, text, s=F(1)):
    return [e.encode(f(t), s)[0] for t in text.split()]


def self_check():
    for x in [0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3EAAAAAB, FMAX]:
        assert f32(mag(x)) == x and float(mag(x)) == float(floats([x])[0])
    assert f32(two(128)) == INF and f32(two(-150)) == 0 and f32(two(-150) * 3) == 2
    for text in "0.0118110245 65519.996 1e30 -6.3e-38 464.00003".split():
        assert f(text) == int(np.array([text], np.float64).astype(np.float32).view(np.uint32)[0])
    assert [e.max for e in ELEMENTS] == [448, 6, 127, 7, 1, 65504]
    assert [e.mids[-1] for e in ELEMENTS] == [464, 7, F(255, 2), F(15, 2), F(3, 2), 65520]
    for e in ELEMENTS:  # decode then encode is the identity on every code that is written
        for c, v in enumerate(e.table):
            written = v & ~SIGN < INF and (e.is_float or mag(v) <= e.max)
            assert not written or e.encode(v, F(1)) == (c, 0), (e.name, c)
    assert [mag(v) for v in (INT8.table[128], INT4.table[8], INT2.table[2])] == [128, 8, 2]
    assert [2 * mag(v) for v in E2M1.table[:8]] == [0, 1, 2, 3, 4, 6, 8, 12]
    assert [mag(v) for v in E4M3.table[:8]] == [m * two(-9) for m in range(8)] and E4M3.table[0x7F] == 0x7FC00000
    assert codes(E2M1, "0.25 0.75 1.25 1.75 2.5 3.5 5") == [0, 2, 2, 4, 4, 6, 6]  # NUM-01
    assert codes(E2M1, "-0.25 -2.5 0.25000006 5.0000005 6.5 7") == [8, 12, 1, 7, 7, 7]  # NUM-01, NUM-02
    assert codes(E4M3, "464 465 1000 -1000") == [0x7E, 0x7E, 0x7E, 0xFE]  # NUM-05
    assert E4M3.encode(INF, F(1)) == (0x7E, 1) and E4M3.encode(0xFFC00000, F(1)) == (0, 1)
    assert [E4M3.encode(f(t), F(1))[1] for t in ("464", "464.00003")] == [0, 2]
    a, b = scale_value("f16", scale_of(F(3), 127, "f16")[0]), mag(0x3CC18306)  # NUM-09
    assert f32(F(3, 127)) == 0x3CC18306
    traps = (0x3C418307, 0x3DA952A5, 0x3E7DFBF9)
    assert [[INT8.encode(x, s)[0] for x in traps] for s in (a, b)] == [[1, 4, 11], [1, 3, 11]]
    assert codes(INT8, "0.5 1.5 2.5 -0.5 -2.5 126.5") == [0, 2, 2, 0, 0xFE, 126]  # NUM-10
    assert [scale_of(q, 1, "f16") for q in (1 + two(-11), mag(f("1") + 0x1001), F(65520), two(-25), 3 * two(-25))] == \
        [(0x3C00, 0), (0x3C01, 0), (0x7BFF, 1), (0, 0), (2, 0)]  # NUM-19
    assert scale_of(mag(f("65519.996")), 1, "f16") == (0x7BFF, 0)
    assert scale_of(F(0), 6, "e4m3") == (1, 0) and scale_of(F(0), 7, "f16") == (0, 0)  # SCL-01
    assert scale_of(F(3000), 6, "e4m3") == (0x7E, 1) and scale_of(F(2688), 6, "e4m3") == (0x7E, 0)  # SCL-03
    assert scale_of(mag(f("1e-6")), 127, "f16") == scale_of(mag(f("3e-6")), 127, "f16") == (0, 0)  # SCL-04
    assert scale_of(F(500000), 7, "f16") == scale_of(F(70000), 1, "f16") == (0x7BFF, 1)  # SCL-10

    def words(side, values, **kw):  # one token, scale 1 forced by an f32 scale where the side allows it
        row = [f(str(v)) for v in values]
        return page_case(side, 1, 8, 8, 1, [row], **kw)["pages"][0]["words"]
    # NUM-14, NUM-15: low element in the low bits, neighbours untouched (7 is in the row, so the scale is 1)
    assert words("int4", [1, 2, 3, 4, 5, 6, 7, 0])[:8] == "07654321"
    assert words("int4", [-1, 1, -1, 1, 0, 0, 0, 7])[:8] == "70001f1f"
    w = words("int8", [-1, 1, 0, 0, 0, 0, 0, 127])
    assert (w[:8], w[64:72]) == ("000001ff", "7f000000") and w[128:136] == "00003c00"
    case = page_case("int2", 2, 40, 8, 3, [[f("1")] * 40 + [f("-2")] * 40] * 3)
    w = [case["pages"][0]["words"][k:k + 8] for k in range(0, 8 * 56, 8)]
    assert case["page_bytes"] == 6 * 8 * 4 + 2 * 8 * 2 and len(w) == 56
    assert w[0:4] == ["55555555"] * 3 + ["00000000"] and w[16] == "00005555"  # 40 codes: 2 words and a half
    assert w[24] == "ffffffff" and w[40] == "0000ffff" and w[48:56] == ["3c003c00", "00003c00", "00000000", "00000000",
                                                                          "40004000", "00004000", "00000000", "00000000"]


# ---- files ---------------------------------------------------------------------------------------------------

def text(data):
    return json.dumps(data, indent=0, separators=(",", ":")) + "\n"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    check = bool(sys.argv[1:])
    print(f"python {sys.version.split()[0]}, numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}")
    self_check()
    files = {"elements.json": elements_file(), "rounding.json": rounding_file(), "scales.json": scales_file(),
             "codes.json": codes_file()}
    pages = pages_files()
    files |= {f"pages/{k}.json": v for k, v in pages.items()}
    files = {k: text(v).encode() for k, v in files.items()}
    total = sum(map(len, files.values()))
    print(f"{len(files)} files, {total} bytes")
    if check:
        bad = [k for k, v in files.items() if not (OUT / k).is_file() or (OUT / k).read_bytes() != v]
        bad += [f"pages/{p.name} (not made by this program)" for p in sorted((OUT / "pages").glob("*"))
                if f"pages/{p.name}" not in files]
        for k in bad:
            print("differs:", k)
        print("FAIL" if bad else "identical")
        sys.exit(bool(bad))
    for k, v in files.items():
        (OUT / k).parent.mkdir(parents=True, exist_ok=True)
        (OUT / k).write_bytes(v)


if __name__ == "__main__":
    main()
