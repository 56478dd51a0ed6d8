"""Tests that networks train as on PyTorch's CPU: the losses of three steps are equal, and no operator runs on the CPU."""

import unittest

import torch
import torch.nn.functional as F
from torch import nn

import claystone_torch


class Convolutional(nn.Module):
    """The network of PyTorch's MNIST example, without dropout, because random numbers differ between devices."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


class Residual(nn.Module):
    """A residual block as in ResNet, with a stem and a head."""

    def __init__(self, channels=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(channels, 10))

    def forward(self, x):
        x = self.pool(self.stem(x))
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(F.relu(x + y))


class Transformer(nn.Module):
    """A decoder as in GPT-2: embeddings, attention layers with a causal mask, and a head that shares the embedding's weight."""

    def __init__(self, vocabulary=17, width=16, heads=2, layers=2, length=8):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "ln1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
            "ln2": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width),
        }) for _ in range(layers))
        self.norm, self.head, self.heads = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False), heads
        self.head.weight = self.tokens.weight

    def forward(self, x):
        batch, length = x.shape
        x = self.tokens(x) + self.positions(torch.arange(length, device=x.device))
        for block in self.blocks:
            q, k, v = block["qkv"](block["ln1"](x)).split(x.shape[-1], dim=2)
            q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).contiguous().view(batch, length, -1))
            x = x + block["down"](F.gelu(block["up"](block["ln2"](x)), approximate="tanh"))
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, layer=nn.LSTM, **options):
        super().__init__()
        self.layer = layer(5, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if self.layer.bidirectional else 8, 10)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def sentences(model, device, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def classes(model, device, x):
    labels = torch.arange(len(x), device=device) % 10
    return F.cross_entropy(model(x), labels)


def negative_log_likelihood(model, device, x):
    return F.nll_loss(model(x), torch.arange(len(x), device=device) % 10)


def losses(device, make, data, loss, optimiser, steps=3):
    torch.manual_seed(3)
    model = make().to(device)
    x = data().to(device)
    step = optimiser(model.parameters())
    found = []
    for _ in range(steps):
        step.zero_grad()
        value = loss(model, device, x)
        value.backward()
        step.step()
        found.append(value.item())
    return found


class Training(unittest.TestCase):
    def same(self, *arguments):
        expected = losses("cpu", *arguments)
        claystone_torch.reset_fallbacks()
        found = losses("claystone", *arguments)
        for a, b in zip(expected, found):
            self.assertLess(abs(a - b), 1e-4 * max(1, abs(a)), f"{expected} on the CPU, {found} on claystone")
        self.assertNotEqual(expected[0], expected[-1])
        self.assertEqual(claystone_torch.fallbacks(), {})

    def test_mnist(self):
        for optimiser in (lambda p: torch.optim.Adadelta(p, lr=1.0), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
            self.same(Convolutional, lambda: torch.randn(4, 1, 14, 14), negative_log_likelihood, optimiser)

    def test_residual_network(self):
        self.same(Residual, lambda: torch.randn(4, 3, 32, 32), classes, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4))

    def test_transformer(self):
        data = lambda: torch.randint(17, (3, 8))
        self.same(Transformer, data, sentences, lambda p: torch.optim.AdamW(p, lr=1e-2))

    def test_recurrent_network(self):
        deep = {"num_layers": 2, "bidirectional": True}
        for make in (Recurrent, lambda: Recurrent(nn.GRU), lambda: Recurrent(nn.LSTM, **deep), lambda: Recurrent(nn.GRU, **deep)):
            self.same(make, lambda: torch.randn(4, 6, 5), classes, lambda p: torch.optim.Adam(p, lr=1e-2))


if __name__ == "__main__":
    unittest.main()
