#!/usr/bin/env python3
"""Times training steps and forward passes of networks on claystone and on PyTorch's CPU or CUDA, in turns.

    python benches/steps.py [--rounds 9] [--only resnet18,lstm] [--beside cuda] [--compile [MODE]] [--beside-compiled]

With `--compile`, torch.compile compiles the network with its loss, and the optimiser's step, on claystone, in mode MODE. PyTorch's own device
stays eager, except with `--beside-compiled`, which compiles it in the default mode.

Times are medians in milliseconds: wall time, and in parentheses the processor time of all threads. PyTorch's own device runs in a separate
process, because CUDA has no backward while another device is registered (github.com/pytorch/pytorch/issues/161129)."""

import argparse
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Mnist(nn.Module):
    """The network of examples/mnist.py."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(64 * 4 * 4, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def resnet18():
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


def vit():
    import torchvision

    return torchvision.models.VisionTransformer(32, 4, 12, 3, 192, 768, num_classes=10)


def gpt2(**sizes):
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0, **sizes))


def resnet50():
    import torchvision

    return torchvision.models.resnet50()


def bert_base():
    import transformers

    return transformers.BertForMaskedLM(transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0))


def classes(model, x):
    return F.cross_entropy(model(x), torch.arange(len(x), device=x.device) % 10)


def sentences(model, x):
    return model(input_ids=x, labels=x).loss


def launches(function, *arguments):
    """The number of launches of a call."""
    before = torch.claystone.launch_count()
    function(*arguments)
    torch.claystone.synchronize()
    return torch.claystone.launch_count() - before


# Name, network, input, loss, optimizer.
CASES = {
    "mlp": (mlp, lambda: torch.randn(64, 784), classes, lambda p: torch.optim.SGD(p, lr=0.01)),
    "mnist": (Mnist, lambda: torch.randn(64, 1, 8, 8), classes, lambda p: torch.optim.Adadelta(p, lr=1.0)),
    "resnet18": (resnet18, lambda: torch.randn(16, 3, 32, 32), classes, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    "vit": (vit, lambda: torch.randn(8, 3, 32, 32), classes, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "gpt2": (lambda: gpt2(n_layer=4, vocab_size=8192, n_positions=128), lambda: torch.randint(8192, (2, 128)), sentences, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "lstm": (Recurrent, lambda: torch.randn(16, 32, 64), classes, lambda p: torch.optim.Adam(p, lr=1e-3)),
}


# Networks of their published sizes, with small batches.
FULL_SIZE = {
    "gpt2-small": (gpt2, lambda: torch.randint(50257, (1, 128)), sentences, lambda p: torch.optim.AdamW(p, lr=1e-4)),
    "resnet50": (resnet50, lambda: torch.randn(4, 3, 64, 64), classes, lambda p: torch.optim.SGD(p, lr=1e-3)),
    "bert-base": (bert_base, lambda: torch.randint(30522, (1, 128)), sentences, lambda p: torch.optim.AdamW(p, lr=1e-4)),
}


class Run:
    def __init__(self, device, make, data, loss, optimiser, mode=None):
        torch.manual_seed(0)
        self.model, self.x, self.loss = make().to(device), data().to(device), loss
        self.optimiser = optimiser(self.model.parameters())
        self.update = self.optimiser.step
        if mode:
            torch._dynamo.reset()  # networks that share a loss do not share its limit of compilations
            backend = "claystone" if device == "claystone" else "inductor"
            self.loss, self.update = (torch.compile(f, backend=backend, mode=mode) for f in (loss, self.update))

    def step(self):
        self.optimiser.zero_grad()
        loss = self.loss(self.model, self.x)
        loss.backward()
        self.update()
        return loss.item()

    def forward(self):
        with torch.no_grad():
            return self.loss(self.model, self.x).item()


    def timed(self, what):
        # A step ends with its loss on the host, so the device has finished the step.
        wall, processor = time.perf_counter(), time.process_time()
        getattr(self, what)()
        return time.perf_counter() - wall, time.process_time() - processor


class Elsewhere:
    """A run in a process without claystone, which reads commands as lines of its input."""

    def __init__(self, device, name, mode):
        command = [sys.executable, __file__, "--serve", device, name, mode or ""]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def timed(self, what):
        print(what, file=self.process.stdin, flush=True)
        return tuple(map(float, self.process.stdout.readline().split()))

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def serve(device, name, mode):
    run = Run(device, *CASES[name], mode)
    for line in sys.stdin:
        print(*run.timed(line.strip()), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--beside", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", metavar="MODE", nargs="?", const="default")
    parser.add_argument("--beside-compiled", action="store_true")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(*arguments.serve)
    import claystone_torch

    beside = arguments.beside
    print(f"claystone:0 is {torch.claystone.get_device_name(0)}, {torch.get_num_threads()} threads of PyTorch")
    print(f"| network | step: claystone | {beside} | ratio | forward: claystone | {beside} | ratio |\n|---|---|---|---|---|---|---|", flush=True)
    for name in arguments.only.split(","):
        runs = {"claystone": Run("claystone", *CASES[name], arguments.compile), beside: Elsewhere(beside, name, "default" if arguments.beside_compiled else None)}
        cells = []
        for what in ("step", "forward"):
            times = {device: [] for device in runs}
            for round in range(arguments.rounds + 2):
                for device, run in runs.items():
                    measured = run.timed(what)
                    if round >= 2:
                        times[device].append(measured)
            median = {device: [1e3 * statistics.median(column) for column in zip(*given)] for device, given in times.items()}
            cells += [f"{wall:.1f} ({processor:.1f})" for wall, processor in median.values()]
            ratios = [ours[0] / theirs[0] for ours, theirs in zip(times["claystone"], times[beside])]
            cells.append(f"{statistics.median(ratios):.2f}")
        runs[beside].end()
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if claystone_torch.fallbacks():
        print("on the CPU ran:", claystone_torch.fallbacks())


if __name__ == "__main__":
    main()
