#!/usr/bin/env python3
"""PyTorch's MNIST example on claystone: a convolutional network learns digits.

    python examples/mnist.py [--device claystone] [--epochs 3]

The data are the 1,797 digits of 8 by 8 pixels in this repository (examples/data/digits.csv.gz), so nothing is downloaded.
"""

import argparse
import csv
import gzip
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import claystone_torch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(64 * 4 * 4, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def digits(path):
    with gzip.open(path, "rt") as file:
        rows = [[float(x) for x in row] for row in csv.reader(file)]
    table = torch.tensor(rows)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    images, labels = table[order, :64].view(-1, 1, 8, 8) / 16, table[order, 64].long()
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


parser = argparse.ArgumentParser()
parser.add_argument("--device", default="claystone")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--data", default=Path(__file__).resolve().parents[3] / "examples/data/digits.csv.gz")
arguments = parser.parse_args()

torch.manual_seed(1)
train, test = digits(arguments.data)
model = Net().to(arguments.device)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
for epoch in range(arguments.epochs):
    begun = time.time()
    model.train()
    for images, labels in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images.to(arguments.device)), labels.to(arguments.device))
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x.to(arguments.device)).argmax(1) == y.to(arguments.device)).sum().item() for x, y in DataLoader(test, batch_size=256))
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {100 * correct / len(test):.1f} % of {len(test)} right, {time.time() - begun:.1f} s")
print("on the CPU ran:", claystone_torch.fallbacks() or "nothing")
