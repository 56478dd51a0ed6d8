#!/usr/bin/env python3
"""Writes layers.npz: the results of PyTorch's parametric activations, instance norms and transformers, with their weights and
gradients. For tests/training/pytorch_layers.rs. Needs torch and numpy."""

import pathlib

import numpy as np
import torch
from torch import nn

torch.manual_seed(27)
N, S, T, WIDTH, HEADS, FEEDFORWARD = 2, 5, 4, 4, 2, 6
out = {}


def keep(name, module, result):
    """The module's state, its result, and the gradients of a loss of the result."""
    for key, value in module.state_dict().items():
        out[f"{name}.state.{key}"] = value
    result.square().sum().backward()
    out[f"{name}.result"] = result
    for key, parameter in module.named_parameters():
        out[f"{name}.grad.{key}"] = parameter.grad


def randomised(module):
    """Randomises biases and norms, whose initial zeros and ones would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.5, 1.5)
    return module


x = torch.randn(3, 4, 5, 6)
out["x"] = x
for name, count in [("prelu", 1), ("prelu_channels", 4)]:
    layer = nn.PReLU(count, init=0.3)
    keep(name, layer, layer(x))
for name, f in [
    ("leaky_relu", nn.LeakyReLU(0.2)),
    ("elu", nn.ELU(1.5)),
    ("softplus", nn.Softplus()),
    ("gelu_tanh", nn.GELU("tanh")),
    ("softmax", nn.Softmax(1)),
    ("log_softmax", nn.LogSoftmax(-1)),
    ("softmin", nn.Softmin(2)),
]:
    out[f"{name}.result"] = f(x)

layer = randomised(nn.InstanceNorm2d(4, affine=True))
keep("instance", layer, layer(x))
layer = nn.InstanceNorm2d(4, track_running_stats=True, momentum=0.3, eps=1e-3)
out["tracked.first"] = layer(x)
layer(2 * x + 1)
for key, value in layer.state_dict().items():
    out[f"tracked.state.{key}"] = value
out["tracked.result"] = layer.eval()(x)

source, target = torch.randn(N, S, WIDTH), torch.randn(N, T, WIDTH)
padding = torch.tensor([[False] * S, [False] * (S - 2) + [True] * 2])
later = torch.ones(T, T).triu(1).bool()
out |= {"source": source, "target": target, "padding": padding, "later": later}
for name, options in [
    ("post", dict(activation="relu")),
    ("pre", dict(activation="gelu", norm_first=True, layer_norm_eps=1e-3)),
    ("plain", dict(bias=False)),
]:
    options = dict(dim_feedforward=FEEDFORWARD, dropout=0.0, batch_first=True, **options)
    encoder = randomised(nn.TransformerEncoderLayer(WIDTH, HEADS, **options))
    keep(f"{name}.encoder", encoder, encoder(source, src_key_padding_mask=padding))
    decoder = randomised(nn.TransformerDecoderLayer(WIDTH, HEADS, **options))
    masks = dict(tgt_mask=later, memory_key_padding_mask=padding)
    keep(f"{name}.decoder", decoder, decoder(target, source, **masks))
    net = randomised(nn.Transformer(WIDTH, HEADS, 2, 1, **options))
    result = net(source, target, tgt_mask=later, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    keep(f"{name}.transformer", net, result)


arrays = {name: value.detach().numpy() for name, value in out.items()}
np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)
