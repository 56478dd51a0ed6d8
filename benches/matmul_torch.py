"""What matmul.rs does, by PyTorch on a CUDA device: the same sizes, the same timing, the same lines of JSON."""
import json
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


for name, dtype in [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]:
    for n in [1024, 2048, 4096, 8192]:
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        t = seconds(lambda: a @ b)
        line = {"peer": "torch", "case": "matmul", "n": n, "dtype": name, "median_us": t * 1e6, "gflops": 2 * n**3 / t / 1e9}
        print(json.dumps(line), flush=True)
