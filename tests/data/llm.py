#!/usr/bin/env python3
"""Writes llm/*.gguf: two tiny models with random weights, and for each model some tokens with the logits after each token, which NumPy
computes in f64 from the values that the gguf package gives. For examples/llm/tests. Needs gguf and numpy."""

import math
import pathlib

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as T
from gguf.quants import dequantize, quantize

FOLDER = pathlib.Path(__file__).with_name("llm")
random = np.random.default_rng(54)

# The offsets of the scale and of the scale of minimums in a block, and the minimum that centres values.
SCALES = {T.Q2_K: (80, 82, 1.5), T.Q3_K: (108, None, 0), T.Q4_K: (0, 2, 7.5), T.Q5_K: (0, 2, 15.5), T.Q6_K: (208, None, 0)}

LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *".,!?'0123456789", "\u0120", "\u010a", "\u00c3", "\u00a9"]
MERGES = ["t h", "th e", "i n", "e r", "\u0120 w", "o r", "\u0120 the", "h e", "l l", "he ll", "a n", "an d"]
TOKENS = ["<|im_start|>", "<|im_end|>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
TOKENS += [f"<|unused_{i}|>" for i in range(64 - len(TOKENS))]
CONTROL, NORMAL = 3, 1
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'].strip() + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def weight(kind, rows, columns):
    """Random bytes or elements of a matrix, of variance 1 / columns, and the values."""
    if kind in (T.F32, T.F16):
        data = (random.standard_normal((rows, columns)) / math.sqrt(columns)).astype(kind.name.replace("F", "float"))
        return data, data.astype(np.float64)
    if kind not in SCALES:
        data = quantize((random.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32), kind)
        return data, dequantize(data, kind).astype(np.float64)
    length, size = GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows, columns // length, size), dtype=np.uint8)
    at, minimum_at, minimum = SCALES[kind]

    def scaled(scale):
        data[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        if minimum_at is not None:
            data[..., minimum_at : minimum_at + 2] = np.frombuffer(np.float16(scale * minimum).tobytes(), np.uint8)
        return dequantize(data.reshape(rows, -1), kind).astype(np.float64)

    return data.reshape(rows, -1), scaled(2**-8 / scaled(2**-8).std() / math.sqrt(columns))


def frequencies(model):
    """The angles of one position, and the factor of sines and cosines."""
    count, base = model["head"], model["base"]
    f = base ** (-np.arange(0, count, 2) / count)
    if "factors" in model:
        return f / model["factors"], 1
    factor, original = model["yarn"]
    index = lambda turns: count * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(0, math.floor(index(32))), min(count - 1, math.ceil(index(1)))
    mix = 1 - np.clip((np.arange(count // 2) - low) / max(0.001, high - low), 0, 1)
    return f / factor * (1 - mix) + f * mix, 1 + 0.1 * math.log(factor)


def logits(model, w, tokens):
    """The logits [length, vocabulary] after each of the tokens."""
    width, heads, keys, head = (model[name] for name in ["width", "heads", "keys", "head"])
    norm = lambda x, name: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]
    x, length = w["token_embd.weight"][tokens], len(tokens)
    f, factor = frequencies(model)
    angle = np.arange(length)[:, None, None] * f
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor

    def rotate(x):
        y, half = np.empty_like(x), head // 2
        first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if model["name"] == "llama" else (np.s_[..., :half], np.s_[..., half:])
        y[first] = x[first] * cos - x[second] * sin
        y[second] = x[first] * sin + x[second] * cos
        return y

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    for i in range(model["layers"]):
        layer = lambda name: f"blk.{i}.{name}"
        h = norm(x, layer("attn_norm"))
        q, k, v = (linear(h, layer(f"attn_{name}")).reshape(length, -1, head) for name in "qkv")
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(t, heads // keys, 1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head) + np.triu(np.full((length, length), -np.inf), 1)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + linear(attended.reshape(length, -1), layer("attn_output"))
        h = norm(x, layer("ffn_norm"))
        gate = linear(h, layer("ffn_gate"))
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, layer("ffn_up")), layer("ffn_down"))
    return linear(norm(x, "output_norm"), "output" if "output.weight" in w else "token_embd")


def write(model):
    name, width, head, inner = (model[key] for key in ["name", "width", "head", "inner"])
    file = GGUFWriter(FOLDER / f"{name}.gguf", name)
    file.add_block_count(model["layers"])
    file.add_context_length(128)
    file.add_embedding_length(width)
    file.add_feed_forward_length(inner)
    file.add_head_count(model["heads"])
    file.add_head_count_kv(model["keys"])
    file.add_key_length(head)
    file.add_value_length(head)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(model["base"])
    file.add_rope_dimension_count(head)
    if "yarn" in model:
        file.add_string(f"{name}.rope.scaling.type", "yarn")
        file.add_rope_scaling_factor(model["yarn"][0])
        file.add_rope_scaling_orig_ctx_len(model["yarn"][1])
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("llama-bpe" if name == "llama" else "qwen2")
    file.add_token_list(TOKENS)
    file.add_token_types([CONTROL if token.startswith("<|") else NORMAL for token in TOKENS])
    file.add_token_merges(MERGES)
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_add_bos_token(False)
    file.add_chat_template(TEMPLATE)

    values = {}

    def add(name, kind, rows, columns):
        data, values[name] = weight(kind, rows, columns)
        file.add_tensor(name, data, raw_dtype=kind)

    def add_vector(name, length, mean=0.0):
        data = (mean + 0.2 * random.standard_normal(length)).astype(np.float32)
        values[name] = data.astype(np.float64)
        file.add_tensor(name, data)

    kinds, rows = model["kinds"], {"attn_q": model["heads"] * head, "attn_k": model["keys"] * head, "attn_v": model["keys"] * head}
    rows |= {"attn_output": width, "ffn_gate": inner, "ffn_up": inner, "ffn_down": width}
    add("token_embd.weight", kinds["token_embd"], len(TOKENS), width)
    if "output" in kinds:
        add("output.weight", kinds["output"], len(TOKENS), width)
    if "factors" in model:
        file.add_tensor("rope_freqs.weight", model["factors"].astype(np.float32))
    add_vector("output_norm.weight", width, 1.0)
    for i in range(model["layers"]):
        add_vector(f"blk.{i}.attn_norm.weight", width, 1.0)
        add_vector(f"blk.{i}.ffn_norm.weight", width, 1.0)
        for part, count in rows.items():
            columns = {"attn_output": model["heads"] * head, "ffn_down": inner}.get(part, width)
            add(f"blk.{i}.{part}.weight", kinds[part], count, columns)
            if name == "qwen2" and part in ("attn_q", "attn_k", "attn_v"):
                add_vector(f"blk.{i}.{part}.bias", count)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()

    prompt = random.integers(0, len(TOKENS), 21)
    np.save(FOLDER / f"{name}.tokens.npy", prompt)
    np.save(FOLDER / f"{name}.logits.npy", logits(model, values, prompt).astype(np.float32))
    tokens = [*prompt[:5]]  # greedy continuations of five tokens
    gaps = []
    for _ in range(12):
        last = np.sort(logits(model, values, tokens)[-1])
        gaps.append((last[-1] - last[-2]) / (last[-1] - last[0]))
        tokens.append(int(logits(model, values, tokens)[-1].argmax()))
    np.save(FOLDER / f"{name}.greedy.npy", np.array(tokens[5:]))
    print(name, "least gap between the two greatest logits, over their range:", min(gaps), "tokens", tokens[5:])


FOLDER.mkdir(exist_ok=True)
# All formats with blocks of 256 elements, factors of frequencies, and an embedding that is also the last projection.
K = {"attn_q": T.Q4_K, "attn_k": T.Q5_K, "attn_v": T.Q6_K, "attn_output": T.Q4_1, "ffn_gate": T.Q2_K, "ffn_up": T.Q3_K}
write({
    "name": "llama", "layers": 2, "width": 256, "head": 32, "heads": 2, "keys": 1, "inner": 64, "base": 10000.0,
    "factors": np.linspace(1, 8, 16), "kinds": {"token_embd": T.Q8_0, "ffn_down": T.Q5_0, **K},
})  # fmt: skip
# Biases, YaRN, plain weights and joins of different kinds.
F = {"attn_q": T.Q8_0, "attn_k": T.F32, "attn_v": T.F16, "attn_output": T.Q5_1, "ffn_gate": T.Q4_0, "ffn_up": T.Q5_0}
write({
    "name": "qwen2", "layers": 2, "width": 64, "head": 16, "heads": 4, "keys": 2, "inner": 64, "base": 10000.0,
    "yarn": (4.0, 32), "kinds": {"token_embd": T.F16, "output": T.Q4_1, "ffn_down": T.F16, **F},
})  # fmt: skip
