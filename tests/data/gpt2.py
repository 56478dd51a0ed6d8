#!/usr/bin/env python3
"""Writes gpt2/model.safetensors: a tiny GPT-2 with Hugging Face's parameter names, tokens, and PyTorch's results for them: the
logits after each token and the most likely next tokens. For tests/training/examples.rs. Needs torch and numpy."""

import json
import pathlib
import struct

import torch
from torch.nn import functional as F

torch.manual_seed(7)
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 17, 12, 8, 2, 2


def normal(*shape):
    return torch.randn(shape) * 0.4


state = {"wte.weight": normal(VOCABULARY, WIDTH), "wpe.weight": normal(CONTEXT, WIDTH)}
for i in range(LAYERS):
    for norm in ["ln_1", "ln_2"]:
        state |= {f"h.{i}.{norm}.weight": 1 + normal(WIDTH), f"h.{i}.{norm}.bias": normal(WIDTH)}
    for name, outputs, inputs in [("attn.c_attn", 3, 1), ("attn.c_proj", 1, 1), ("mlp.c_fc", 4, 1), ("mlp.c_proj", 1, 4)]:
        state[f"h.{i}.{name}.weight"] = normal(inputs * WIDTH, outputs * WIDTH)
        state[f"h.{i}.{name}.bias"] = normal(outputs * WIDTH)
    state[f"h.{i}.attn.bias"] = torch.ones(CONTEXT, CONTEXT).tril()[None, None]  # the mask, which old files have
state |= {"ln_f.weight": 1 + normal(WIDTH), "ln_f.bias": normal(WIDTH)}


def gpt2(tokens):
    """Logits [length, vocabulary] of tokens [length], as transformers.GPT2LMHeadModel computes them."""
    norm = lambda x, name: F.layer_norm(x, [WIDTH], state[f"{name}.weight"], state[f"{name}.bias"])
    conv1d = lambda x, name: x @ state[f"{name}.weight"] + state[f"{name}.bias"]
    x = state["wte.weight"][tokens] + state["wpe.weight"][: len(tokens)]
    for i in range(LAYERS):
        heads = lambda x: x.unflatten(-1, [HEADS, WIDTH // HEADS]).transpose(0, 1)
        q, k, v = map(heads, conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1))
        scores = q @ k.transpose(1, 2) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(state[f"h.{i}.attn.bias"][0, :, : len(tokens), : len(tokens)] == 0, float("-inf"))
        x = x + conv1d((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"h.{i}.attn.c_proj")
        hidden = F.gelu(conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + conv1d(hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ state["wte.weight"].T


tokens = torch.tensor([3, 14, 1, 5, 9, 2, 6])
written = tokens
while len(written) < CONTEXT:
    written = torch.cat([written, gpt2(written)[-1:].argmax(-1)])
arrays = state | {"tokens": tokens, "logits": gpt2(tokens), "written": written[len(tokens) :]}

header, data = {}, b""
for name, array in arrays.items():
    dtype, array = "I64" if array.dtype == torch.int64 else "F32", array.detach().contiguous().numpy().tobytes()
    header[name] = {"dtype": dtype, "shape": list(arrays[name].shape), "data_offsets": [len(data), len(data) + len(array)]}
    data += array
header = json.dumps(header).encode()
header += b" " * (-len(header) % 8)
folder = pathlib.Path(__file__).with_suffix("")
folder.mkdir(exist_ok=True)
(folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
