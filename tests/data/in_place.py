#!/usr/bin/env python3
"""Writes in_place.npz: PyTorch's results and gradients of programs that change recorded tensors in place.
tests/api/in_place.rs has the same programs. Needs torch and numpy."""

import pathlib

import numpy as np
import torch
import torch.nn.functional as F

rng = np.random.default_rng(24)
inputs = {
    "image": rng.standard_normal((2, 3, 5, 4)),
    "weight": rng.standard_normal((4, 3, 3, 3)),
    "residual": rng.standard_normal((2, 4, 5, 4)),
    "a": rng.standard_normal((3, 4)),
    "b": rng.standard_normal((3, 4)),
    "row": rng.standard_normal(4),
}
out = dict(inputs)


def residual_block(x):
    y = F.conv2d(x["image"], x["weight"], padding=1)
    y += x["residual"]
    return torch.relu_(y)


def row_of_base(x):
    y = x["a"] * 2
    y[1].mul_(x["row"])
    return y * y


def base_under_view(x):
    y = x["a"] * 2
    t, column = y.t(), y[:, 2]
    y.mul_(x["b"])
    return torch.cat([(t * t).flatten(), column.exp()])


def views_of_views(x):
    y = x["a"] * x["b"]
    part = y.t()[1:3]
    other = y[0]
    part.mul_(x["b"].t()[1:3])
    part[0].add_(x["row"][:3])
    y[2].copy_(x["row"])
    return torch.cat([part.flatten() ** 2, other.sin(), y.flatten() ** 3])


def plain_buffer(x):
    buffer = torch.zeros(4, 4, dtype=torch.float64)
    buffer[:3].copy_(x["a"])
    last = buffer[3]
    last.copy_(x["row"]).mul_(x["b"][0])
    buffer[0] += last
    return buffer * buffer


def permuted_base(x):
    y = (x["a"].t() * 3).t()
    y[1].mul_(x["row"])
    y[:, 1:3].tanh_()
    return y ** 2


def overwritten(x):
    y = x["a"].exp()
    z = x["a"] * x["b"]
    z.zero_()
    z.add_(x["b"])
    z[1].fill_(3)
    return z * z + y


def indexed(x):
    y = x["a"] * 2
    rows = torch.tensor([2, 0])
    y.index_add_(0, rows, x["b"][:2])
    y.index_put_((torch.tensor([1, 1]), torch.tensor([0, 3])), x["row"][:2])
    y.masked_fill_(x["b"] > 0.8, 0.5)
    y.t().scatter_(0, torch.tensor([[3, 2, 1]]), x["a"][:, :1].t())
    y[1:].clamp_(-1, 1)
    return y ** 3


def expanded_views(x):
    y = x["row"] * 2
    wide = y.expand(3, 4)
    y.mul_(x["b"][0])
    return wide * x["a"]


for program in [residual_block, row_of_base, base_under_view, views_of_views, plain_buffer, permuted_base, overwritten, indexed, expanded_views]:
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in inputs.items()}
    result = program(leaves)
    name = program.__name__
    out[f"{name}.result"] = result.detach().numpy()
    result.square().sum().backward()
    for leaf, value in leaves.items():
        if value.grad is not None:
            out[f"{name}.{leaf}"] = value.grad.numpy()

np.savez(pathlib.Path(__file__).with_name("in_place.npz"), **out)
