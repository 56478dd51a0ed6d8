#!/usr/bin/env python3
"""bandwidth_torch.py FILE.jsonl: runs the cases that `bandwidth` printed to FILE in PyTorch, on this machine's GPU.
Prints a table of both in microseconds, for single calls (each with its wait) and for calls in a row (many calls, one wait), with the
ratio of claystone's time to PyTorch's. `cargo bench --bench bandwidth > FILE.jsonl` makes the file."""
import json
import statistics
import sys
import time

import torch

dev = torch.device("cuda")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
cache = {}


def rand(*shape, dtype=torch.float32):
    key = (shape, dtype)
    if key not in cache:
        cache.clear()
        cache[key] = (torch.rand(*shape, device=dev) - 0.5).to(dtype)
    return cache[key]


def op(case, n, dtype, shape):
    """Returns claystone's operation in PyTorch, as a function without arguments."""
    t = DTYPES[dtype]
    if case in ("add", "relu", "exp", "sum_all", "clone"):
        a = rand(n, dtype=t)
        b = a.clone() if case == "add" else None
        return {"add": lambda: a + b, "relu": lambda: torch.relu(a), "exp": lambda: torch.exp(a),
                "sum_all": lambda: a.sum(), "clone": lambda: a.clone()}[case]
    if case == "fill":
        return lambda: torch.ones(n, dtype=t, device=dev)
    if case in ("h2d", "d2h", "h2d_pinned", "d2h_pinned"):
        host = torch.rand(n // 4) - 0.5
        here = host.to(dev)
        if case.endswith("pinned"):
            host = host.pin_memory()
            return (lambda: host.to(dev, non_blocking=True)) if case[0] == "h" else (lambda: host.copy_(here, non_blocking=True))
        return (lambda: host.to(dev)) if case == "h2d" else here.cpu
    x = rand(*shape, dtype=t)
    if case == "broadcast_add":
        r = x[0].clone()
        return lambda: x + r
    if case == "transpose_copy":
        return lambda: x.t().contiguous()
    if case == "strided_copy":
        half = x.view(shape[0] // 2, 2, shape[1])[:, 0:1]
        return lambda: half.contiguous()
    return {"sum_axis1": lambda: x.sum(1), "sum_axis0": lambda: x.sum(0), "softmax": lambda: torch.softmax(x, 1)}[case]


def sample(fn, calls, budget):
    times, start = [], time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - start < budget and len(times) < 5000):
        at = time.perf_counter()
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - at) / calls * 1e6)
    return statistics.median(times)


BUDGET = float(sys.argv[2]) if len(sys.argv) > 2 else 0.1
print(f"{'case':16} {'n':>10} {'':4}  {'ours':>9} {'torch':>9} ratio  {'in a row':>9} {'torch':>9} ratio    GB/s  torch")
for line in open(sys.argv[1]):
    if not line.startswith("{"):
        continue
    r = json.loads(line)
    fn = op(r["case"], r["n"], r["dtype"], r.get("shape"))
    fn()
    torch.cuda.synchronize()
    sample(fn, 1, BUDGET / 4)
    one = sample(fn, 1, BUDGET)
    row = sample(fn, max(1, min(20, int(2e5 / one))), BUDGET)
    rate = r["gbps"]
    print(f"{r['case']:16} {r['n']:>10} {r['dtype']:4}  {r['median_us']:9.1f} {one:9.1f} {r['median_us'] / one:5.2f}  "
          f"{r['pipe_us']:9.1f} {row:9.1f} {r['pipe_us'] / row:5.2f}  {rate:6.0f} {rate * r['pipe_us'] / row:6.0f}", flush=True)
