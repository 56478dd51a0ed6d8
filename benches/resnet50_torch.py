"""The network of benches/resnet50.rs in PyTorch, channels-last, eager or compiled. Prints ms per training step, as the bench does.

python3 benches/resnet50_torch.py BATCH SIDE f32|f16|bf16 [STEPS [eager|compile [FILE]]]

With the FILE of that bench's `--save` it starts from the same weights, uses the same images, and prints how far the losses differ."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from saved import run, tensors

BATCHES = 4
batch, side = map(int, sys.argv[1:3])
half = {"f32": None, "f16": torch.float16, "bf16": torch.bfloat16}[sys.argv[3]]
steps = int(sys.argv[4]) if len(sys.argv) > 4 else 50
device = "cuda" if torch.cuda.is_available() else "cpu"


def conv(inputs, outputs, kernel, stride):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.residual = nn.Sequential(
            *conv(inputs, width, 1, 1), nn.ReLU(), nn.Sequential(*conv(width, width, 3, stride)), nn.ReLU(),
            nn.Sequential(*conv(width, outputs, 1, 1)))
        self.shortcut = nn.Sequential(*(conv(inputs, outputs, 1, stride) if inputs != outputs else ()))

    def forward(self, x):
        return F.relu(self.residual(x) + self.shortcut(x))


def resnet50():
    layers, inputs = [*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for width, blocks, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


net = resnet50()
images, labels, theirs = torch.randn(BATCHES, batch, side, side, 3), torch.randint(0, 1000, (BATCHES, batch)), None
if len(sys.argv) > 6:
    saved = tensors(sys.argv[6])
    images, labels, theirs = saved.pop("images"), saved.pop("labels"), saved.pop("losses")
    net.load_state_dict(saved)
net = net.to(device, memory_format=torch.channels_last)
images, labels = images.to(device).permute(0, 1, 4, 2, 3), labels.to(device)
model = torch.compile(net) if len(sys.argv) > 5 and sys.argv[5] == "compile" else net
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)


def step(number):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=half or torch.bfloat16, enabled=half is not None):
        loss = F.cross_entropy(model(images[number % BATCHES]), labels[number % BATCHES])
    loss.backward()
    optimizer.step()
    return loss.detach()


run(step, steps, theirs)
