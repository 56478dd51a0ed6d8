"""Compares LSTM, GRU and RNN with PyTorch's CPU: results, states, gradients and second derivatives. One claystone call runs all steps."""

import itertools
import unittest

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import claystone_torch

INPUT, HIDDEN, STEPS, BATCH = 5, 4, 7, 3


def relu(*arguments, **options):
    return nn.RNN(*arguments, nonlinearity="relu", **options)


def run(device, make, packed, state, twice):
    """Results, last states and gradients on a device, and the strides of results and states."""
    torch.manual_seed(0)
    layer = make().double()
    x = torch.randn((BATCH, STEPS, INPUT) if layer.batch_first else (STEPS, BATCH, INPUT)).double()
    slots = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or HIDDEN, HIDDEN][: 2 if layer.mode == "LSTM" else 1]
    states = [torch.randn(slots, BATCH, size).double() for size in sizes] if state else []
    layer = layer.to(device)
    x, *states = (t.to(device).requires_grad_() for t in (x, *states))
    given = None if not states else tuple(states) if len(states) == 2 else states[0]
    if packed:
        sequences = pack_padded_sequence(x, torch.tensor([2, 6, 4]), batch_first=layer.batch_first, enforce_sorted=False)
        out, last = layer(sequences, given)
        out, _ = pad_packed_sequence(out, batch_first=layer.batch_first)
    else:
        out, last = layer(x, given)
    found = [out, *(last if isinstance(last, tuple) else (last,))]
    inputs = [x, *states, *layer.parameters()]
    loss = sum((t**2).sum() * (i + 1) for i, t in enumerate(found))
    gradients = torch.autograd.grad(loss, inputs, create_graph=twice, retain_graph=True)
    again = torch.autograd.grad(sum((t**2).sum() for t in gradients) if twice else loss, inputs)
    return [t.detach().cpu() for t in (*found, *gradients, *again)], [t.stride() for t in found]


class Recurrent(unittest.TestCase):
    def same(self, make, packed=False, state=False, twice=False):
        (expected, strides), (found, others) = (run(device, make, packed, state, twice) for device in ("cpu", "claystone"))
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)
        self.assertEqual(strides, others)

    def test_layers(self):
        claystone_torch.reset_fallbacks()
        options = ({}, {"bias": False, "batch_first": True}, {"num_layers": 2, "bidirectional": True}, {"num_layers": 2, "batch_first": True})
        for cell, given, packed, state in itertools.product((nn.LSTM, nn.GRU, nn.RNN, relu), options, (False, True), (False, True)):
            with self.subTest(cell=cell.__name__, packed=packed, state=state, **given):
                self.same(lambda: cell(INPUT, HIDDEN, **given), packed, state)
        for packed in (False, True):
            self.same(lambda: nn.LSTM(INPUT, HIDDEN, num_layers=2, bidirectional=True, proj_size=2), packed, state=True)
        self.assertEqual(claystone_torch.fallbacks(), {})

    def test_gradients_of_gradients(self):
        for cell in (nn.LSTM, nn.GRU, nn.RNN, relu):
            self.same(lambda: cell(INPUT, HIDDEN, num_layers=2), state=True, twice=True)
        self.same(lambda: nn.GRU(INPUT, HIDDEN, bidirectional=True), packed=True, twice=True)

    def test_gradients_of_inputs_that_depend_on_each_other(self):
        def gradients(device):
            torch.manual_seed(0)
            layer, x = nn.LSTM(INPUT, HIDDEN).double(), torch.randn(STEPS, BATCH, INPUT).double()
            z = torch.randn(1, BATCH, HIDDEN).double()
            layer, x, z = layer.to(device), x.to(device).requires_grad_(), z.to(device).requires_grad_()
            _, states = layer(x, (z, z))
            out, _ = layer(x.cumsum(0), states)
            first = torch.autograd.grad((out**2).sum(), [x, z, *layer.parameters()], create_graph=True)
            return [t.detach().cpu() for t in (*first, *torch.autograd.grad(sum((t**2).sum() for t in first), [x, z]))]

        for expected, found in zip(gradients("cpu"), gradients("claystone"), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)

    def test_saved_tensor_hooks(self):
        layer, x = nn.GRU(INPUT, HIDDEN).to("claystone"), torch.randn(STEPS, BATCH, INPUT, device="claystone", requires_grad=True)
        expected = torch.autograd.grad((layer(x)[0] ** 2).sum(), [x, *layer.parameters()])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            out, _ = layer(x)
        found = torch.autograd.grad((out**2).sum(), [x, *layer.parameters()])
        with torch.autograd.graph.save_on_cpu():
            out, _ = layer(x)
        again = torch.autograd.grad((out**2).sum(), [x, *layer.parameters()])
        for right, *others in zip(expected, found, again, strict=True):
            for gradient in others:
                self.assertFalse(gradient.requires_grad)
                torch.testing.assert_close(gradient, right)

    def test_all_steps_run_as_one_operator(self):
        layer, x = nn.LSTM(INPUT, HIDDEN, num_layers=2).to("claystone"), torch.randn(STEPS, BATCH, INPUT, device="claystone")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out, _ = layer(x)
            out.sum().backward()
        names = {event.name for event in profile.events()}
        self.assertIn("aten::lstm", names)
        self.assertFalse(names & {"aten::linear", "aten::mm", "aten::addmm", "aten::_thnn_fused_lstm_cell"}, names)

    def test_dropout(self):
        layer = nn.GRU(INPUT, HIDDEN, num_layers=3, dropout=0.5, bidirectional=True).to("claystone")
        x = torch.randn(STEPS, BATCH, INPUT, device="claystone")
        drawn = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            drawn.append(layer(x)[0])
        self.assertTrue(torch.equal(drawn[0], drawn[1]))
        self.assertFalse(torch.equal(drawn[0], drawn[2]))
        drawn[2].sum().backward()
        self.assertTrue(all(p.grad is not None for p in layer.parameters()))
        layer.eval()
        self.assertTrue(torch.equal(layer(x)[0], layer(x)[0]))

    def test_writes_between_forward_and_backward(self):
        x = torch.randn(STEPS, BATCH, INPUT, device="claystone")
        for cell in (nn.LSTM, nn.GRU):
            layer = cell(INPUT, HIDDEN).to("claystone")
            layer(x)[0].mul_(2).sum().backward()  # the caller may change the result
            self.assertEqual(len({p.grad.data_ptr() for p in layer.parameters()}), 4)
            out, _ = layer(x)
            out.sum().backward()
            with self.assertRaisesRegex(RuntimeError, "backward through the graph a second time"):
                out.sum().backward()
            out, _ = layer(x)
            with torch.no_grad():
                layer.weight_hh_l0.mul_(2)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                out.sum().backward()

    def test_forward_without_autograd(self):
        layer, x = nn.LSTM(INPUT, HIDDEN).to("claystone"), torch.randn(STEPS, BATCH, INPUT, device="claystone")
        with torch.inference_mode():
            out, _ = layer(x)
        self.assertTrue(out.is_inference())
        with torch.no_grad():
            self.assertIsNone(layer(x)[0].grad_fn)
        with torch.autocast("claystone", torch.bfloat16):
            self.assertEqual(layer(x)[0].dtype, torch.bfloat16)

    def test_mismatched_parameters_are_errors(self):
        layer, x = nn.LSTM(INPUT, HIDDEN).to("claystone"), torch.randn(STEPS, BATCH, INPUT, device="claystone")
        state = [torch.zeros(1, BATCH, HIDDEN, device="claystone")] * 2
        for parameters in ([p.double() for p in layer.parameters()], [p.cpu() for p in layer.parameters()]):
            with self.assertRaises(RuntimeError):
                torch.lstm(x, state, parameters, True, 1, 0.0, False, False, False)


if __name__ == "__main__":
    unittest.main()
