#!/usr/bin/env python3
"""digits_torch.py [DEVICE]: the example `cargo run --release --example digits` in eager PyTorch, with the same network, data,
optimiser and minibatches. Prints the median time of an epoch, including its test, and the final accuracy."""
import csv
import gzip
import pathlib
import statistics
import sys
import time

import torch
from torch import nn

dev = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
EPOCHS, BATCH, HELD_OUT = 40, 32, 360
data = pathlib.Path(__file__).parent.parent / "examples" / "data" / "digits.csv.gz"
rows = torch.tensor([[int(v) for v in row] for row in csv.reader(gzip.open(data, "rt"))])
images, labels = (rows[:, :-1].float() / 16).to(dev), rows[:, -1].to(dev)
torch.manual_seed(20)
order = torch.randperm(len(rows), device=dev)
test, train = order[:HELD_OUT], order[HELD_OUT:]


def run(**options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).to(dev)
    adam = torch.optim.AdamW(net.parameters(), lr=5e-3, **options)
    loss_of = nn.CrossEntropyLoss()
    times = []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        shuffled = train[torch.randperm(len(train), device=dev)]
        x, y = images[shuffled], labels[shuffled]
        losses = []
        for i in range(0, len(train), BATCH):
            loss = loss_of(net(x[i : i + BATCH]), y[i : i + BATCH])
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.detach())
        torch.stack(losses).double().tolist()
        with torch.no_grad():
            right = (net(images[test]).argmax(1) == labels[test]).float().sum().item()
        times.append(time.perf_counter() - start)
    name = "fused AdamW" if options else "AdamW"
    print(f"{name}: {statistics.median(times) * 1e3:.2f} ms an epoch, test accuracy {right / HELD_OUT:.3f}", flush=True)


run()
run(fused=True)
