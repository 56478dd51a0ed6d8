#!/usr/bin/env python3
"""nanoGPT's training loop on claystone: a small GPT learns to write, character by character.

    python examples/nanogpt.py [FILE or FOLDER ...] [--device claystone] [--steps 200]

The training text is the given files, and the `.rs`, `.md`, `.py` and `.txt` files of the given folders; by default this repository's guide.
`--dtype bfloat16` trains under autocast, `--save FILE` writes the model and its optimizer after training, `--resume FILE` continues from them.
"""

import argparse
import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import claystone_torch


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary, context, layers, heads, width, dropout):
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that add to the residual stream start with smaller weights, as in GPT-2.
                adds = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens, targets=None):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens, count, temperature=0.8):
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1].float() / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
        return tokens


def read(paths):
    for path in map(Path, paths):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file == path or file.suffix in (".rs", ".md", ".py", ".txt"):
                yield file.read_text()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", nargs="*", default=[Path(__file__).resolve().parents[3] / "docs/guide"])
parser.add_argument("--device", default="claystone")
parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--accumulate", type=int, default=1, help="batches per step")
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
parser.add_argument("--save", help="file for the model and its optimizer")
parser.add_argument("--resume", help="file that --save wrote")
arguments = parser.parse_args()
device, begun_at = arguments.device, 0

torch.manual_seed(1337)
text = "".join(read(arguments.text))
characters = sorted(set(text))
data = torch.tensor([characters.index(c) for c in text])
training, validation = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
print(f"{len(text)} characters, {len(characters)} distinct")


def batch(source):
    starts = torch.randint(len(source) - arguments.context, (arguments.batch,))
    rows = torch.stack([source[i : i + arguments.context + 1] for i in starts])
    # Pinned memory lets the copy to the device overlap with other work of the host.
    rows = rows if device == "cpu" else rows.pin_memory()
    rows = rows.to(device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]


model = Gpt(len(characters), arguments.context, arguments.layers, arguments.heads, arguments.width, arguments.dropout).to(device)
matrices = [p for p in model.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=arguments.lr, betas=(0.9, 0.99), fused=True
)
scaler = torch.amp.GradScaler(torch.device(device).type, enabled=arguments.dtype == "float16")
if arguments.resume:
    saved = torch.load(arguments.resume, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begun_at = saved["step"]


def precision():
    if arguments.dtype == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, arguments.dtype))


def rate(step):
    """Learning rate: linear warm-up over 1/20 of the steps, then cosine decay to 1/10 of the maximum."""
    warm = max(1, arguments.steps // 20)
    if step < warm:
        return arguments.lr * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, arguments.steps - warm))
    return arguments.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def validate():
    model.eval()
    losses = torch.stack([model(*batch(validation)) for _ in range(5)])
    model.train()
    return losses.mean().item()


clock, last = time.perf_counter(), begun_at
for step in range(begun_at, arguments.steps):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    for _ in range(arguments.accumulate):
        with precision():
            loss = model(*batch(training)) / arguments.accumulate
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if (step + 1) % 50 == 0 or step + 1 == arguments.steps:
        value = loss.item() * arguments.accumulate
        milliseconds = 1000 * (time.perf_counter() - clock) / (step + 1 - last)
        print(f"step {step + 1}: loss {value:.4f}, validation {validate():.4f}, {milliseconds:.0f} ms a step")
        clock, last = time.perf_counter(), step + 1

if arguments.save:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": arguments.steps}, arguments.save)
if arguments.sample:
    model.eval()
    start = torch.tensor([[characters.index("\n") if "\n" in characters else 0]], device=device)
    print("".join(characters[i] for i in model.generate(start, arguments.sample)[0].tolist()))
print("on the CPU ran:", claystone_torch.fallbacks() or "nothing")
