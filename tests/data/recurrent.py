#!/usr/bin/env python3
"""Writes recurrent.npz: the results of PyTorch's recurrent layers and cells for sequences of different lengths, with their
weights. For tests/training/packed.rs. Needs torch and numpy."""

import pathlib

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(24)
LENGTHS, INPUT, HIDDEN, CLASSES = [4, 9, 1, 9, 6], 6, 5, 3


class Net(nn.Module):
    """A sequence classifier on the final states of a bidirectional LSTM, and further layers and cells."""

    def __init__(self):
        super().__init__()
        deep = dict(num_layers=2, bidirectional=True, batch_first=True)
        self.lstm = nn.LSTM(INPUT, HIDDEN, **deep)
        self.fc = nn.Linear(2 * HIDDEN, CLASSES)
        self.gru = nn.GRU(INPUT, HIDDEN, **deep)
        self.rnn = nn.RNN(INPUT, HIDDEN, **deep)
        self.proj = nn.LSTM(INPUT, HIDDEN, proj_size=3, **deep)
        self.lstm_cell = nn.LSTMCell(INPUT, HIDDEN)
        self.gru_cell = nn.GRUCell(INPUT, HIDDEN)
        self.rnn_cell = nn.RNNCell(INPUT, HIDDEN, nonlinearity="relu")


net, x = Net(), torch.randn(len(LENGTHS), max(LENGTHS), INPUT, requires_grad=True)
packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
out = {"x": x, "lengths": torch.tensor(LENGTHS), "data": packed.data, "batch_sizes": packed.batch_sizes}
out |= {"sorted_indices": packed.sorted_indices, "unsorted_indices": packed.unsorted_indices}

y, (h, c) = net.lstm(packed)
logits = net.fc(torch.cat([h[-2], h[-1]], 1))
loss = nn.functional.cross_entropy(logits, torch.arange(len(LENGTHS)) % CLASSES)
out["lstm.out"], out["lstm.h"], out["lstm.c"], out["logits"], out["loss"] = y.data, h, c, logits, loss
wanted = [x, *net.lstm.parameters()]
out["grad.x"], *grads = torch.autograd.grad(loss, wanted)
out |= {f"grad.{name}": g for (name, _), g in zip(net.lstm.named_parameters(), grads) if "l0_reverse" in name or "hh_l1" in name}

h0 = torch.randn(4, len(LENGTHS), HIDDEN)
out["h0"] = h0
for name in ["gru", "rnn"]:
    y, h = getattr(net, name)(packed, h0)
    out[f"{name}.padded"], _ = pad_packed_sequence(y, batch_first=True, padding_value=-2.0, total_length=10)
    out[f"{name}.h"] = h
out["proj.out"], (out["proj.h"], out["proj.c"]) = net.proj(x, (h0[:, :, :3].contiguous(), h0))
out["lstm_cell.h"], out["lstm_cell.c"] = net.lstm_cell(x[:, 0], (h0[0], h0[1]))
out["gru_cell.h"], out["rnn_cell.h"] = net.gru_cell(x[:, 0], h0[0]), net.rnn_cell(x[:, 0], h0[0])

arrays = {f"net.{name}": t for name, t in net.state_dict().items()} | out
np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **{name: t.detach().numpy() for name, t in arrays.items()})
