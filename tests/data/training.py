#!/usr/bin/env python3
"""Writes training.npz: the learning rates of PyTorch's schedulers at each step, and the averages that its AveragedModel computes
from a series of weights. For tests/training/schedules.rs. Needs torch and numpy."""

import pathlib

import numpy as np
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 40
rng = np.random.default_rng(24)
out = {}


def optimizer():
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)]}, {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.02}], lr=0.5)


def rates(make, metrics=None):
    """The learning rates of both parameter groups at each step."""
    sgd = optimizer()
    scheduler = make(sgd)
    rows = []
    for i in range(STEPS):
        rows.append([group["lr"] for group in sgd.param_groups])
        sgd.step()
        if i < STEPS - 1:
            scheduler.step(*([] if metrics is None else [metrics[i]]))
    return np.array(rows)


out["restarts"] = rates(lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=7))
out["restarts_mult"] = rates(lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=0.01))
out["one_cycle"] = rates(lambda o: lrs.OneCycleLR(o, 0.5, total_steps=STEPS, cycle_momentum=False))
out["one_cycle_linear"] = rates(
    lambda o: lrs.OneCycleLR(o, 0.5, total_steps=STEPS, pct_start=0.25, anneal_strategy="linear", div_factor=10.0, final_div_factor=100.0, cycle_momentum=False)
)
out["one_cycle_three_phase"] = rates(lambda o: lrs.OneCycleLR(o, 0.5, total_steps=STEPS, three_phase=True, cycle_momentum=False))

metrics = np.round(np.abs(np.exp(-np.arange(STEPS) / 6) + 0.02 * rng.standard_normal(STEPS)), 3)
metrics[17] = np.nan
out["metrics"] = metrics
out["plateau"] = rates(lambda o: lrs.ReduceLROnPlateau(o, patience=2), metrics)
out["plateau_cooldown"] = rates(
    lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=1, threshold=0.05, threshold_mode="abs", cooldown=3, min_lr=0.01), metrics
)
out["plateau_max"] = rates(lambda o: lrs.ReduceLROnPlateau(o, mode="max", factor=0.3, patience=3, threshold=0.01), metrics)
out["plateau_max_abs"] = rates(lambda o: lrs.ReduceLROnPlateau(o, mode="max", patience=0, threshold_mode="abs", eps=1e-3), metrics)

weights = rng.standard_normal((6, 4, 3)).astype(np.float32)
out["weights"] = weights
for name, average in [("ema", get_ema_multi_avg_fn(0.9)), ("swa", None)]:
    layer = torch.nn.Linear(3, 4, bias=False)
    averaged = AveragedModel(layer, multi_avg_fn=average)
    rows = []
    for w in weights:
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(w))
        averaged.update_parameters(layer)
        rows.append(averaged.module.weight.detach().numpy().copy())
    out[name] = np.array(rows)

np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **out)
