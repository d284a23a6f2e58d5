#!/usr/bin/env python3
"""Reads the golden vectors of an export folder by the written page layout (shaders/README.md) alone.

    tools/decode_pages.py DIR     DIR: what `kvpack shaders export --vectors --out DIR` wrote, for any target

Every page of a case, packed or f16, is decoded to rows and compared bit for bit with the rows that the case expects of
its dequantise kernel. Needs numpy and ml_dtypes:  pip install numpy==2.4.6 ml_dtypes==0.6.0
Exit: 0 all equal, 1 a difference or a case that cannot be read, 2 usage or no vectors.
"""
import json
import sys
from pathlib import Path
import ml_dtypes
import numpy as np

ELEMENTS = {"f32": np.float32, "f16": np.float16, "fp8_e4m3": ml_dtypes.float8_e4m3fn, "int8": np.int8,
            "int4": ml_dtypes.int4, "int2": ml_dtypes.int2, "fp4_e2m1": ml_dtypes.float4_e2m1fn}
STORED = {8: ml_dtypes.float8_e4m3fn, 16: np.float16, 32: np.float32}


def decode(words, g, tensor_scale):
    """One page's words to f32 rows [slot, head, channel]."""
    tokens, heads, dim, bits = g["page_tokens"], g["heads"], g["head_dim"], g["bits"]
    head_words = -(-dim * bits // 32)
    offset = -(-heads * head_words * tokens // 4) * 4
    if (head_words, offset) != (g["head_words"], g["scale_offset"]):
        raise ValueError(f"the layout gives head_words {head_words} and scale_offset {offset}")
    # Word w of slot t is word w P + t; w counts heads, then words of a head; the lowest bits are the lowest channel.
    plane = words[:heads * head_words * tokens].reshape(heads, head_words, tokens)
    codes = plane[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)
    codes = codes.transpose(2, 0, 1, 3).reshape(tokens, heads, -1)[:, :, :dim]
    holder = np.uint32 if bits == 32 else np.uint16 if bits == 16 else np.uint8
    values = np.ascontiguousarray(codes.astype(holder)).view(ELEMENTS[g["element"]]).astype(np.float32)

    layout, group = g["scale_layout"], g["token_group"]
    if layout in ("none", "per_tensor"):
        return values if layout == "none" else values * tensor_scale
    stored = words[offset:].view(STORED[g["scale_bits"]])
    if layout == "per_token":  # of slot t and head h: element h P + t
        scales = stored[:heads * tokens].reshape(heads, tokens).T[:, :, None]
    elif layout == "per_block":  # of slot t and block (h d + channel) / 16: element block P + t
        blocks = heads * dim // 16
        scales = stored[:blocks * tokens].reshape(blocks, tokens).T.repeat(16, axis=1).reshape(tokens, heads, dim)
    elif layout == "per_channel":  # of token group j and channel c = h d + channel: element j H d + c
        scales = stored[:tokens // group * heads * dim].reshape(-1, heads, dim).repeat(group, axis=0)
    else:
        raise ValueError(f"unknown layout of scales: {layout}")
    return values * scales.astype(np.float32)  # one f32 multiplication


def check(folder):
    """Decodes what each dequantise step of a case reads. Returns the number of rows, and what is wrong."""
    case = json.loads((folder / "case.json").read_text())
    for item in case["buffers"] + case["expect"]:
        if Path(item.get("file", "")).name != item.get("file", ""):
            raise ValueError(f"{item['file']!r} is no plain file name")
    buffers = {buffer["name"]: buffer for buffer in case["buffers"]}
    expected = {e["buffer"]: np.load(folder / e["file"]) for e in case["expect"] if e["rule"] == "bits"}
    initial = {name: np.load(folder / buffer["file"]) for name, buffer in buffers.items() if "file" in buffer}
    seen, wrong = {}, []
    for step in (s for s in case["steps"] if {"side_pages", "runs", "rows"} <= s["bindings"].keys()):
        names = step["bindings"]
        geometry = buffers[names["side_pages"]]["geometry"]
        scales = expected.get(names["tensor_scales"], initial.get(names["tensor_scales"]))
        scale = None if scales is None else scales.view(np.float32)[step["params"]["side_tensor"]]
        rows = expected[names["rows"]].reshape(-1, geometry["heads"], geometry["head_dim"])
        done = seen.setdefault(names["rows"], np.zeros(len(rows), bool))
        for page, first, count, source in initial[names["runs"]]:
            found = decode(expected[names["side_pages"]][page], geometry, scale)
            for i in range(count):
                differ = found[first + i].view(np.uint32) != rows[source + i]
                if differ.any():
                    place = "page {}, slot {}, head {}, channel {}".format(page, first + i, *np.argwhere(differ)[0])
                    wrong.append(f"{names['side_pages']}: {place}")
                done[source + i] = True
    wrong += [f"{name}: no page holds row {np.argmin(done)}" for name, done in seen.items() if not done.all()]
    return sum(len(done) for done in seen.values()), wrong


def main(arguments):
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    folders = sorted(file.parent for file in Path(arguments[0]).glob("vectors/*/case.json"))
    rows = failures = 0
    for folder in folders:
        try:
            with np.errstate(all="ignore"):  # unused slots hold anything
                count, wrong = check(folder)
        except Exception as error:  # whatever a damaged file leads to
            count, wrong = 0, [f"cannot be read: {type(error).__name__}: {error}"]
        rows, failures = rows + count, failures + len(wrong)
        for words in wrong:
            print("FAILED ", repr(f"{folder.name}: {words}"[:400])[1:-1])  # repr: no control characters
    print(f"{len(folders)} cases, {rows} rows decoded, {failures} wrong")
    return 1 if failures else 2 if rows == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
