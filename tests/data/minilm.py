"""Writes minilm/: a tiny model for the example minilm. Prints PyTorch's results for two sentences, for tests/training/examples.rs.
Needs torch and safetensors."""

import json
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

WIDTH, INNER, HEADS, LAYERS, POSITIONS = 8, 16, 2, 2, 16
WORDS = ["a", "man", "eat", "##s", "##ing", "food", "."]
VOCABULARY = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", *WORDS]
SENTENCES = [["[CLS]", "a", "man", "eat", "##s", "food", ".", "[SEP]"], ["[CLS]", "eat", "##ing", "[UNK]", "[SEP]"]]

torch.manual_seed(1)
folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "minilm")
os.makedirs(folder, exist_ok=True)
w = {}


def add(name, *shape):
    w[name] = (torch.randn(*shape) * 0.5).half().float()


def layer(name, outputs, inputs):
    add(name + ".weight", outputs, inputs)
    add(name + ".bias", outputs)


def norm(name):
    w[name + ".weight"] = (1 + torch.randn(WIDTH) * 0.2).half().float()
    w[name + ".bias"] = (torch.randn(WIDTH) * 0.1).half().float()


for name, count in ("word", len(VOCABULARY)), ("position", POSITIONS), ("token_type", 2):
    add(f"embeddings.{name}_embeddings.weight", count, WIDTH)
norm("embeddings.LayerNorm")
for i in range(LAYERS):
    at = f"encoder.layer.{i}."
    for name in "query", "key", "value":
        layer(at + "attention.self." + name, WIDTH, WIDTH)
    layer(at + "attention.output.dense", WIDTH, WIDTH)
    norm(at + "attention.output.LayerNorm")
    layer(at + "intermediate.dense", INNER, WIDTH)
    layer(at + "output.dense", WIDTH, INNER)
    norm(at + "output.LayerNorm")
layer("pooler.dense", WIDTH, WIDTH)
save_file({name: t.half() for name, t in w.items()}, os.path.join(folder, "model.safetensors"))
with open(os.path.join(folder, "vocab.txt"), "w") as file:
    file.write("\n".join(VOCABULARY) + "\n")
sizes = dict(hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS, num_hidden_layers=LAYERS)
sizes |= dict(vocab_size=len(VOCABULARY), max_position_embeddings=POSITIONS, type_vocab_size=2)
with open(os.path.join(folder, "config.json"), "w") as file:
    json.dump(sizes, file)

w = {name: t.double() for name, t in w.items()}
linear = lambda x, name: F.linear(x, w[name + ".weight"], w[name + ".bias"])
normed = lambda x, name: F.layer_norm(x, (WIDTH,), w[name + ".weight"], w[name + ".bias"], 1e-12)
heads = lambda x: x.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1)
for sentence in SENTENCES:
    ids = torch.tensor([VOCABULARY.index(token) for token in sentence])
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = normed(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        q, k, v = (heads(linear(x, at + "attention.self." + name)) for name in ("query", "key", "value"))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = normed(x + linear(mixed, at + "attention.output.dense"), at + "attention.output.LayerNorm")
        x = normed(x + linear(F.gelu(linear(x, at + "intermediate.dense")), at + "output.dense"), at + "output.LayerNorm")
    print(ids.tolist(), [round(value, 6) for value in F.normalize(x.mean(0), dim=0).tolist()])
