"""Writes quantized.npz with the package `gguf`: for each format, random and special blocks with their elements, and quantised rows.

    pip install gguf numpy
    python tests/data/quantized.py
"""

import pathlib

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize, quantize

# The offsets of f16 fields in a block.
FORMATS = {
    T.Q8_0: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
}
# 0, -0, a subnormal number, the greatest number.
SPECIAL = np.array([0x0000, 0x8000, 0x0001, 0x7BFF], np.uint16)

rng = np.random.default_rng(49)
arrays = {}
for kind, offsets in FORMATS.items():
    _, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (12, size), dtype=np.uint8)
    for i, offset in enumerate(offsets):
        halves = rng.standard_normal(12).astype(np.float16).view(np.uint16)
        halves[:4] = np.roll(SPECIAL, i)
        blocks[:, offset : offset + 2] = halves[:, None].view(np.uint8)
    name = kind.name.lower()
    arrays[f"{name}.blocks"] = blocks
    arrays[f"{name}.values"] = dequantize(blocks, kind)

x = rng.standard_normal((8, 96)).astype(np.float32)
x[1] *= 1000
x[2] *= 1e-4
x[3, :32] = 0
x[3, 32:64] = -2.5
x[4] = np.round(x[4] * 4) / 4  # ties
x[5] = np.abs(x[5])
x[6] = -np.abs(x[6])
arrays["x"] = x
for kind in [T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1]:
    arrays[f"{kind.name.lower()}.quantized"] = quantize(x, kind)
np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)
