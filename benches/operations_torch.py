#!/usr/bin/env python3
"""operations_torch.py FILE.jsonl [DEVICE]: runs the cases that `operations` printed to FILE in PyTorch, on DEVICE (cpu), with two
CPU threads unless OMP_NUM_THREADS is set. Prints a table of both medians in microseconds and the ratio of claystone's time to
PyTorch's, the largest first. `cargo bench --bench operations -- --device cpu > FILE.jsonl` makes the file."""
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

dev = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
torch.backends.cudnn.allow_tf32 = False  # computes f32 convolutions in f32, as products
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def backward(f, *leaves):
    def step():
        y = f()
        y.backward(torch.ones_like(y))
        for leaf in leaves:
            leaf.grad = None
    return step


def leaf(t):
    return t.clone().requires_grad_()


def matrices(r, c):
    x, y, turned = torch.randn(r, c, device=dev), torch.randn(r, c, device=dev), torch.randn(c, r, device=dev).t()
    flat, row, column, positive, mask = x.reshape(-1), torch.randn(c, device=dev), x[:, :1], x.abs() + 0.1, x < 0.3
    places, down = torch.randint(0, c, (r, c), device=dev), torch.randint(0, r, (r, c), device=dev)
    lines, some = torch.randint(0, r, (r,), device=dev), torch.randint(0, c, (c,), device=dev)
    f16, bf16, f64, four = x.half(), x.bfloat16(), x.double(), x.reshape(r // 16, 16, 4, c // 4)
    tx, w, b = leaf(x), leaf(row), leaf(row)
    one = torch.randn(r, device=dev)
    one16 = one.half()
    return {
        "layer_norm": lambda: F.layer_norm(x, (c,), row, row),
        "layer_norm, backward": backward(lambda: F.layer_norm(tx, (c,), w, b), tx, w, b),
        "rms_norm": lambda: F.rms_norm(x, (c,), row, 1e-5),
        "softmax": lambda: x.softmax(1), "softmax, dim 0": lambda: x.softmax(0), "log_softmax": lambda: x.log_softmax(1),
        "softmax, backward": backward(lambda: tx.softmax(1), tx), "logsumexp, dim 0": lambda: x.logsumexp(0),
        "gelu": lambda: F.gelu(x), "gelu, tanh": lambda: F.gelu(x, approximate="tanh"),
        "silu": lambda: F.silu(x), "pow 2": lambda: x.pow(2), "clamp": lambda: x.clamp(-0.5, 0.5),
        "where": lambda: torch.where(mask, x, y), "addcmul": lambda: torch.addcmul(x, y, y, value=0.5),
        "add_": lambda: x.add_(y), "logical_and": lambda: mask.logical_and(mask),
        "add, a row": lambda: x + row, "add, a column": lambda: x + column, "add, transposed": lambda: x + turned,
        "exp, transposed": lambda: turned.exp(),
        "matrix and vector": lambda: x @ row, "vector and matrix": lambda: one @ x,
        "f16, vector and matrix": lambda: one16 @ f16, "linear, one row": lambda: F.linear(row[None], x),
        "sum": lambda: x.sum(), "sum, dim 0": lambda: x.sum(0), "sum, dim 1": lambda: x.sum(1),
        "var, dim 1": lambda: x.var(1), "norm, dim 1": lambda: torch.linalg.vector_norm(x, dim=1),
        "argmax, dim 1": lambda: x.argmax(1), "cumsum, dim 0": lambda: x.cumsum(0), "cumsum, dim 1": lambda: x.cumsum(1),
        "sort": lambda: x.sort(dim=1, stable=True), "topk": lambda: x.topk(8, 1), "topk, flat": lambda: flat.topk(8),
        "median": lambda: x.median(1),
        "gather": lambda: x.gather(1, places), "gather, dim 0": lambda: x.gather(0, down),
        "scatter_add": lambda: x.scatter_add(1, places, y), "scatter_add, dim 0": lambda: x.scatter_add(0, down, y),
        "index_select": lambda: x.index_select(0, lines), "index_select, dim 1": lambda: x.index_select(1, some),
        "index_add": lambda: x.index_add(0, lines, y),
        "embedding, backward": backward(lambda: F.embedding(lines, tx), tx),
        "nonzero": lambda: mask.nonzero(), "masked_select": lambda: x.masked_select(mask),
        "cat, dim 0": lambda: torch.cat([x, y], 0), "cat, dim 1": lambda: torch.cat([x, y], 1),
        "stack, dim 2": lambda: torch.stack([x, y], 2),
        "permute 0213": lambda: four.permute(0, 2, 1, 3).contiguous(), "permute 0231": lambda: four.permute(0, 2, 3, 1).contiguous(),
        "transpose": lambda: turned.contiguous(), "repeat": lambda: x.repeat(2, 2),
        "expand, a row": lambda: row.expand(r, c).contiguous(), "roll": lambda: x.roll(3, 1),
        "pad": lambda: F.pad(x, (2, 2, 2, 2)), "tril": lambda: x.tril(),
        "f16, add": lambda: f16 + f16, "f16, sum": lambda: f16.sum(), "f16, softmax": lambda: f16.softmax(1),
        "f16 to f32": lambda: f16.float(), "f32 to f16": lambda: x.half(), "bf16, add": lambda: bf16 + bf16,
        "bf16 to f32": lambda: bf16.float(), "f32 to bf16": lambda: x.bfloat16(), "f32 to i64": lambda: x.long(),
        "i64, add": lambda: places + places, "f64, exp": lambda: f64.exp(),
        "dropout": lambda: F.dropout(x, 0.3), "randn": lambda: torch.randn(r, c, device=dev),
        "arange": lambda: torch.arange(0, r * c, device=dev), "mse_loss": lambda: F.mse_loss(x, positive),
    }


def optimisers(r, c):
    def made(kind, **options):
        t = torch.randn(r, c, device=dev, requires_grad=True)
        t.grad = torch.ones_like(t)
        return kind([t], fused=True, **options).step
    return {"sgd": made(torch.optim.SGD, lr=1e-3, momentum=0.9), "adamw": made(torch.optim.AdamW)}


def labels(r, c):
    x, t = torch.randn(r, c, device=dev), torch.randint(0, c, (r,), device=dev)
    tx = leaf(x)
    return {"cross_entropy": lambda: F.cross_entropy(x, t),
            "cross_entropy, backward": backward(lambda: F.cross_entropy(tx, t), tx),
            "softmax of classes": lambda: x.softmax(1), "logsumexp of classes": lambda: x.logsumexp(1),
            "log_softmax of classes, backward": backward(lambda: tx.log_softmax(1), tx)}


def images(n, c, h, w):
    x, one, zero = torch.randn(n, c, h, w, device=dev), torch.ones(c, device=dev), torch.zeros(c, device=dev)
    three, w1, deep, fours = (torch.randn(c, of, side, side, device=dev) for of, side in ((c, 3), (c, 1), (1, 3), (4, 3)))
    x16, three16, tx, t3, td = x.half(), three.half(), leaf(x), leaf(three), leaf(deep)
    line, four = x.reshape(n, c, h * w), torch.randn(c, 1, 4, device=dev)
    return {"group_norm": lambda: F.group_norm(x, 8, one, zero),
            "batch_norm, training": lambda: F.batch_norm(x, zero, one, one, zero, True, 0.0),
            "batch_norm": lambda: F.batch_norm(x, zero, one, one, zero),
            "max_pool2d": lambda: F.max_pool2d(x, 2), "avg_pool2d": lambda: F.avg_pool2d(x, 2),
            "softmax, channels": lambda: x.softmax(1),
            "conv2d 3x3": lambda: F.conv2d(x, three, padding=1),
            "conv2d 3x3, backward": backward(lambda: F.conv2d(tx, t3, padding=1), tx, t3),
            "conv2d 3x3, f16": lambda: F.conv2d(x16, three16, padding=1),
            "conv2d 1x1": lambda: F.conv2d(x, w1),
            "conv2d 3x3, depthwise": lambda: F.conv2d(x, deep, padding=1, groups=c),
            "conv2d 3x3, depthwise, backward": backward(lambda: F.conv2d(tx, td, padding=1, groups=c), tx, td),
            "conv2d 3x3, groups of 4": lambda: F.conv2d(x, fours, padding=1, groups=c // 4),
            "conv1d 4, depthwise": lambda: F.conv1d(line, four, padding=3, groups=c),
            "max_pool2d, backward": backward(lambda: F.max_pool2d(tx, 2), tx),
            "interpolate": lambda: F.interpolate(x, (2 * h, 2 * w), mode="bilinear"),
            "interpolate, half": lambda: F.interpolate(x, (h // 2, w // 2), mode="bilinear"),
            "interpolate, nearest": lambda: F.interpolate(x, (2 * h, 2 * w), mode="nearest"),
            "interpolate, f16": lambda: F.interpolate(x16, (2 * h, 2 * w), mode="bilinear"),
            "interpolate, backward": backward(lambda: F.interpolate(tx, (2 * h, 2 * w), mode="bilinear"), tx)}


def sequences(n, h, s, e):
    q, k, v = (torch.randn(n * h, s, e, device=dev) for _ in range(3))
    four = [t.reshape(n, h, s, e) for t in (q, k, v)]
    half, bf16, tq = [t.half() for t in four], [t.bfloat16() for t in four], leaf(four[0])
    th, tb = leaf(half[0]), leaf(bf16[0])
    attention = F.scaled_dot_product_attention
    return {"bmm": lambda: q.bmm(k.transpose(1, 2)), "attention": lambda: attention(*four),
            "attention, causal": lambda: attention(*four, is_causal=True),
            "attention, backward": backward(lambda: attention(tq, tq, tq, is_causal=True), tq),
            "attention, f16": lambda: attention(*half, is_causal=True),
            "attention, f16, backward": backward(lambda: attention(th, th, th, is_causal=True), th),
            "attention, bf16": lambda: attention(*bf16, is_causal=True),
            "attention, bf16, backward": backward(lambda: attention(tb, tb, tb, is_causal=True), tb)}


def recurrent(n, length, width, hidden):
    x = torch.randn(n, length, width, device=dev)
    x16 = x.half()
    made = lambda kind: kind(width, hidden, num_layers=2, batch_first=True, device=dev)
    lstm, half, gru = made(torch.nn.LSTM), made(torch.nn.LSTM).half(), made(torch.nn.GRU)
    cases = {}
    for name, layer, given in (("lstm", lstm, x), ("lstm, f16", half, x16), ("gru", gru, x)):
        cases[name] = torch.no_grad()(lambda layer=layer, given=given: layer(given)[0])
        cases[name + ", backward"] = backward(lambda layer=layer, given=given: layer(given)[0], *layer.parameters())
    return cases


def measure(f):
    for _ in range(3):
        f()
    begun, times = time.perf_counter(), []
    while len(times) < 3 or time.perf_counter() - begun < 0.15:
        a = time.perf_counter()
        f()
        if dev.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - a) * 1e6)
    return statistics.median(times)


cases, rows = {}, []
for line in map(json.loads, open(sys.argv[1])):
    size = tuple(map(int, line["size"].split("x")))
    if size not in cases:
        kinds = [recurrent if line["case"].startswith(("lstm", "gru")) else sequences if "bmm" in line["case"] or "attention" in line["case"] else images] if len(size) == 4 else [matrices, optimisers, labels] if size[0] % 16 == 0 and size[1] % 16 == 0 else [labels]
        cases = {size: {name: f for kind in kinds for name, f in kind(*size).items()}}
    theirs = measure(cases[size][line["case"]])
    rows.append((line["median_us"] / theirs, line["case"], line["size"], line["median_us"], theirs))
print(f"{'case':26}{'size':>14}{'ours':>10}{'torch':>10}{'ratio':>8}")
for ratio, case, size, ours, theirs in sorted(rows, reverse=True):
    print(f"{case:26}{size:>14}{ours:>10.1f}{theirs:>10.1f}{ratio:>8.2f}")
