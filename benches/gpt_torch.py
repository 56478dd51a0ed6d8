"""The model of examples/char_transformer in PyTorch on CUDA, eager or compiled: ms a training step.

python3 benches/gpt_torch.py WIDTH LAYERS HEADS CONTEXT BATCH VOCABULARY f32|bf16 [STEPS [eager|compile]]
"""

import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

W, L, H, C, B, V = map(int, sys.argv[1:7])
bf16 = sys.argv[7] == "bf16"
steps = int(sys.argv[8]) if len(sys.argv) > 8 else 200


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
        self.ln_f, self.head = nn.LayerNorm(W), nn.Linear(W, V, bias=False)

    def forward(self, x):
        x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


gpt = Gpt().cuda()
if len(sys.argv) > 9 and sys.argv[9] == "compile":
    gpt = torch.compile(gpt)
optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
windows = torch.randint(0, V, (200_000,), device="cuda").unfold(0, C + 1, 1)


def step():
    optimizer.zero_grad(set_to_none=True)
    w = windows[torch.randint(0, windows.shape[0], (B,), device="cuda")]
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        loss = F.cross_entropy(gpt(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()


for _ in range(10):
    step()
torch.cuda.synchronize()
start = time.perf_counter()
for _ in range(steps):
    step()
torch.cuda.synchronize()
print(f"{(time.perf_counter() - start) / steps * 1e3:.3f} ms a step")
