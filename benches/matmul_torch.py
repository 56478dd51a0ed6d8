"""The cases of matmul.rs in PyTorch on a CUDA device, with the same sizes, timing and JSON lines. `matmul_torch.py halves` runs the
cases of its `--halves` on the CPU, with one thread unless OMP_NUM_THREADS is set."""
import json
import os
import statistics
import sys
import time

import torch


def seconds(f):
    def row(count):
        start = time.perf_counter()
        for _ in range(count):
            f()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    row(3)
    count = min(max(int(0.03 / row(3)), 1), 1000)
    return sorted(row(count) for _ in range(7))[3]


def halves():
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_grad_enabled(False)
    square = [(1, n, n, n, turned) for n in (512, 2048) for turned in (False, True)][:3]
    few = [(1, m, 4096, 4096, turned) for m in (1, 4) for turned in (False, True)]
    for batch, m, k, n, turned in few + square + [(512, 1, 64, 64, True), (512, 1, 64, 64, False), (512, 4, 64, 64, False)]:
        a, b = torch.randn(batch, m, k), torch.randn(batch, *((n, k) if turned else (k, n)))
        operands = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            left, right = a.to(dtype), b.to(dtype)
            right = right.transpose(1, 2) if turned else right
            operands.append((left, right) if batch > 1 else (left[0], right[0]))

        def turn(of, count):
            start = time.perf_counter()
            for _ in range(count):
                of[0] @ of[1]
            return (time.perf_counter() - start) / count

        for of in operands:
            turn(of, 3)
        count = min(max(int(0.01 / turn(operands[0], 3)), 1), 1000)
        turns = [[turn(of, count) for of in operands] for _ in range(31)]
        line = {"peer": "torch", "device": "cpu", "case": "halves", "batch": batch, "m": m, "k": k, "n": n,
                "b": "[n, k]" if turned else "[k, n]", "f32_us": round(statistics.median(t[0] for t in turns) * 1e6, 3)}
        for i, name in ((1, "bf16"), (2, "f16")):
            line[f"{name}_over_f32"] = round(statistics.median(t[i] / t[0] for t in turns), 3)
        line["bf16_us"] = round(statistics.median(t[1] for t in turns) * 1e6, 3)
        print(json.dumps(line), flush=True)


if sys.argv[1:] == ["halves"]:
    halves()
    sys.exit()
for name, dtype in [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]:
    for n in [1024, 2048, 4096, 8192]:
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        t = seconds(lambda: a @ b)
        line = {"peer": "torch", "case": "matmul", "n": n, "dtype": name, "median_us": t * 1e6, "gflops": 2 * n**3 / t / 1e9}
        print(json.dumps(line), flush=True)
