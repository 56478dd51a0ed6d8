#!/usr/bin/env python3
"""Writes windows.npz: the results of PyTorch's convolutional layers and pools, with their weights and gradients.
For tests/training/pytorch_windows.rs. Needs torch and numpy."""

import pathlib

import numpy as np
import torch
from torch import nn

torch.manual_seed(31)
out = {"x1": torch.randn(2, 4, 9), "x2": torch.randn(2, 4, 6, 7), "x3": torch.randn(2, 4, 5, 6, 4)}


def keep(name, module, result):
    """The layer's weights, its result, and the gradients of a loss of the result."""
    for key, value in module.state_dict().items():
        out[f"{name}.state.{key}"] = value
    result.square().sum().backward()
    out[f"{name}.result"] = result
    for key, parameter in module.named_parameters():
        out[f"{name}.grad.{key}"] = parameter.grad


def pool(name, x, f):
    """The result, and the gradient of its square with respect to x."""
    x = x.clone().requires_grad_()
    result = f(x)
    result.square().sum().backward()
    out[f"{name}.result"], out[f"{name}.grad"] = result, x.grad


x1, x2, x3 = out["x1"], out["x2"], out["x3"]
for name, layer, x in [
    ("conv3d", nn.Conv3d(4, 6, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1), dilation=(2, 1, 1), groups=2), x3),
    ("conv3d_same", nn.Conv3d(4, 3, (2, 3, 4), padding="same"), x3),
    ("conv_transpose1d", nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), x1),
    ("conv_transpose3d", nn.ConvTranspose3d(4, 2, (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 0, 0), 2, True, (1, 2, 1)), x3),
]:
    keep(name, layer, layer(x))
for name, layer, x in [
    ("max_pool1d", nn.MaxPool1d(3, 2, 1), x1),
    ("avg_pool1d", nn.AvgPool1d(3, 2, 1), x1),
    ("adaptive_avg_pool1d", nn.AdaptiveAvgPool1d(4), x1),
    ("adaptive_max_pool1d", nn.AdaptiveMaxPool1d(4), x1),
    ("adaptive_max_pool2d", nn.AdaptiveMaxPool2d((4, 3)), x2),
    ("max_pool3d", nn.MaxPool3d((2, 3, 2), (2, 2, 1), (1, 1, 0), (1, 2, 1), ceil_mode=True), x3),
    ("avg_pool3d", nn.AvgPool3d((2, 3, 2), (2, 2, 1), (1, 1, 0), ceil_mode=True, count_include_pad=False), x3),
    ("adaptive_avg_pool3d", nn.AdaptiveAvgPool3d((2, 4, 3)), x3),
    ("adaptive_max_pool3d", nn.AdaptiveMaxPool3d((2, 4, 3)), x3),
]:
    pool(name, x, layer)
# PyTorch applies padding that differs between the two sides of a dim in a separate step, last dim first.
weight, sides = torch.randn(3, 4, 3, 2), (0, 1, 1, 2)
out["uneven.weight"] = weight
pad = nn.functional.pad
pool("uneven.conv2d", x2, lambda x: nn.functional.conv2d(pad(x, sides), weight))
transposed = nn.functional.conv_transpose2d
pool("uneven.conv_transpose2d", x2, lambda x: transposed(x, weight.transpose(0, 1), stride=2)[..., 1:-2, :-1])
pool("uneven.max_pool2d", x2, lambda x: nn.functional.max_pool2d(pad(x, sides, value=-torch.inf), (4, 2)))
pool("uneven.avg_pool2d", x2, lambda x: nn.functional.avg_pool2d(pad(x, sides), (4, 2)))
_, out["max_pool3d.index"] = nn.functional.max_pool3d(x3, 2, 2, return_indices=True)

arrays = {name: value.detach().numpy() for name, value in out.items()}
np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)
