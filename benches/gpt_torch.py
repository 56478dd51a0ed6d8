"""The model of examples/char_transformer in PyTorch, eager or compiled. Prints ms per training step, as `cargo bench --bench gpt` does.

python3 benches/gpt_torch.py WIDTH LAYERS HEADS CONTEXT BATCH VOCABULARY f32|bf16 [STEPS [eager|compile [FILE]]]

With the FILE of that bench's `--save` it starts from the same weights, uses the same tokens, and prints how far the losses differ."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from saved import WARM, run, tensors

W, L, H, C, B, V = map(int, sys.argv[1:7])
bf16 = sys.argv[7] == "bf16"
steps = int(sys.argv[8]) if len(sys.argv) > 8 else 200
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(W), nn.LayerNorm(W)
        self.attn, self.proj = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.fc, self.out = nn.Linear(W, 4 * W), nn.Linear(4 * W, W)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, H, W // H).transpose(1, 2) for z in self.attn(self.ln_1(x)).split(W, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, W)
        x = x + self.proj(y)
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, W), nn.Embedding(C, W)
        self.h = nn.ModuleList([Block() for _ in range(L)])
        self.ln_f, self.lm_head = nn.LayerNorm(W), nn.Linear(W, V, bias=False)

    def forward(self, x):
        x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


gpt = Gpt().to(device)
windows, theirs = (torch.rand(WARM + steps, B, C + 1) ** 3 * V).long().clamp(max=V - 1), None
if len(sys.argv) > 10:
    saved = tensors(sys.argv[10])
    windows, theirs = saved.pop("windows"), saved.pop("losses")
    gpt.load_state_dict(saved)
windows = windows.to(device)
model = torch.compile(gpt) if len(sys.argv) > 9 and sys.argv[9] == "compile" else gpt
optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-4)


def step(number):
    optimizer.zero_grad(set_to_none=True)
    w = windows[number]
    with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
        loss = F.cross_entropy(model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


run(step, steps, theirs)
