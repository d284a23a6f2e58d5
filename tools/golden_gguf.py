#!/usr/bin/env python3
"""Golden numbers of GGUF blocks, by the ggml project's own Python package (numpy).

    tools/golden_gguf.py            write tests/golden/gguf_blocks.json
    tools/golden_gguf.py --check    regenerate and compare byte for byte; exit 1 on any difference

{type: {blocks, values}}: random blocks as hex bytes, whose f16 scales are finite and of both signs, with a zero and
a subnormal one among them; the f32 numbers that they stand for, 8 hex digits each (the value, not its bytes in memory).
Known good with Python 3.11, numpy 2.4.6, gguf 0.19.0:  pip install numpy==2.4.6 gguf==0.19.0
"""
import json
import pathlib
import sys

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

FILE = pathlib.Path(__file__).resolve().parent.parent / "tests/golden/gguf_blocks.json"
# Where the f16 numbers of a block lie.
HALVES = {"F32": [], "F16": [0], "BF16": [], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
          "Q4_K": [0, 2], "Q6_K": [208]}
BLOCKS = 5


def golden():
    random = np.random.default_rng(20)
    out = {}
    for name, halves in HALVES.items():
        kind = GGMLQuantizationType[name]
        numbers, size = GGML_QUANT_SIZES[kind]
        count = BLOCKS if numbers > 1 else 64
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        for at in halves:
            scales = random.normal(0, 0.1, count).astype(np.float16)
            scales[0], scales[1] = 0, np.float16(2.0**-23)
            blocks[:, at:at + 2] = scales.view(np.uint8).reshape(count, 2)
        if name in ("F32", "BF16"):
            values = random.normal(0, 1, count).astype(np.float32)
            if name == "F32":
                blocks = values.view(np.uint8).reshape(count, 4)
            else:
                blocks = values.view(np.uint8).reshape(count, 4)[:, 2:].copy()
        values = quants.dequantize(blocks.reshape(-1), kind).astype(np.float32).reshape(-1)
        assert values.size == count * numbers and np.isfinite(values).all(), name
        out[name] = {
            "blocks": blocks.tobytes().hex(),
            "values": "".join(f"{bits:08x}" for bits in values.view(np.uint32)),
        }
    return json.dumps(out, indent=0) + "\n"


def main():
    text = golden()
    if sys.argv[1:] == ["--check"]:
        if FILE.read_text() != text:
            sys.exit(f"{FILE} differs")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        FILE.write_text(text)


if __name__ == "__main__":
    main()
