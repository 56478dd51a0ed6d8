"""Compares PyTorch's convolutions on CUDA with those of benches/convolutions.rs, in the same formats. Prints a line for each, and the
ratios of the sums by kind, dtype and format.

    cargo bench --bench convolutions -- --device opencl:0 > FILE.jsonl; python3 benches/convolutions_torch.py FILE.jsonl"""

import json
import sys
import time
from collections import defaultdict

import torch
from torch.nn import functional as F

torch.backends.cudnn.benchmark = True
BATCH = 64


def measure(f):
    for _ in range(3):
        f()
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            f()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e5)
    return sorted(times)[3]


sums = defaultdict(lambda: [0.0] * 4)
print(f"{'case':12}{'dtype':6}{'format':18}{'in, out, side, kernel, stride, groups':>40}{'forward':>9}{'torch':>9}{'ratio':>7}{'both':>9}{'torch':>9}{'ratio':>7}")
for line in map(json.loads, open(sys.argv[1])):
    inputs, outputs, side, kernel, stride, groups = line["sizes"]
    dtype = {"f16": torch.float16, "f32": torch.float32}[line["dtype"]]
    layout = getattr(torch, line["format"])
    x = torch.randn(BATCH, inputs, side, side, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
    w = torch.randn(outputs, inputs // groups, kernel, kernel, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
    conv = lambda x, w: F.conv2d(x, w, None, stride, kernel // 2, 1, groups)
    grad = torch.ones_like(conv(x, w))

    def forward():
        with torch.no_grad():
            conv(x, w)

    def both():
        torch.autograd.grad(conv(x, w), (x, w), grad)

    ours, theirs = (line["forward_us"], line["both_us"]), (measure(forward), measure(both))
    row = [v for pair in zip(ours, theirs) for v in pair]
    kind = line["case"], line["dtype"], line["format"]
    sums[kind] = [a + b for a, b in zip(sums[kind], row)]
    columns = "".join(f"{a:9.1f}{b:9.1f}{a / b:7.2f}" for a, b in zip(ours, theirs))
    print(f"{line['case']:12}{line['dtype']:6}{line['format']:18}{', '.join(map(str, line['sizes'])):>40}{columns}")
for (case, dtype, layout), (f, ft, b, bt) in sums.items():
    print(f"sum of {case} {dtype} {layout}: forward {f / ft:.2f}, with gradients {b / bt:.2f} of PyTorch's time")
