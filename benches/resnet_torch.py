"""Training steps of ResNet-18 on images of 32 x 32 in PyTorch, on the CPU in f32 and under autocast to bf16, to compare with
examples/resnet.

    python3 benches/resnet_torch.py [STEPS]    prints the median and the minimum time of a step, a JSON line for each dtype"""

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 32


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet18():
    layers, width = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()], 64
    for outputs, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        layers += [Block(width, outputs, stride), Block(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    net = resnet18()
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    for dtype in ("f32", "bf16"):
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            sgd.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
                loss = F.cross_entropy(net(x), y)
            loss.backward()
            sgd.step()
            times.append(time.perf_counter() - start)
        times.sort()
        print(json.dumps({"peer": "torch", "dtype": dtype, "median_s": round(times[steps // 2], 3), "least_s": round(times[0], 3)}))


if __name__ == "__main__":
    main()
