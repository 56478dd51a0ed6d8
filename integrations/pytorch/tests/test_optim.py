"""Compares fused and foreach optimizers, loss scaling and clipping with PyTorch's CPU."""

import unittest

import torch

import claystone_torch

DEVICE = "claystone"
SHAPES = [(4, 3), (3,), (4, 3), (5,), (3,), (), (4, 3), (0,)]


def parameters(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    if dtype == torch.float32:
        made[2] = made[2].t().contiguous().t() # strides differ from the gradient's, which PyTorch's fused CPU steps ignore
    return [torch.nn.Parameter(one.to(device)) for one in made]


def set_gradients(parameters, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale).to(p.dtype).to(p.device)


def steps(device, optimizer, dtype=torch.float32, **options):
    of = parameters(device, dtype)
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    optimizer = optimizer(of, **options)
    for step in range(5):
        set_gradients(of, step)
        optimizer.step()
    state = [tensor for each in optimizer.state.values() for tensor in each.values() if isinstance(tensor, torch.Tensor)]
    return [tensor.detach().cpu() for tensor in of + state]


ADAM = [{}, {"weight_decay": 0.1, "amsgrad": True}, {"lr": 0.1, "maximize": True, "betas": (0.8, 0.95)}]
SGD = [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "maximize": True}]
ADAGRAD = [{}, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "initial_accumulator_value": 0.5, "maximize": True}]
CASES = [(torch.optim.Adam, options) for options in ADAM] + [(torch.optim.AdamW, options) for options in ADAM]
CASES += [(torch.optim.SGD, options) for options in SGD]
CASES += [(torch.optim.Adagrad, options) for options in ADAGRAD]


class Optimizers(unittest.TestCase):
    def setUp(self):
        claystone_torch.reset_fallbacks()

    def tearDown(self):
        self.assertEqual(claystone_torch.fallbacks(), {})

    def compare(self, found, wanted, dtype=torch.float32):
        self.assertEqual(len(found), len(wanted))
        for a, b in zip(found, wanted):
            tolerance = {torch.float32: 2e-6, torch.float64: 1e-6}.get(dtype, 2e-2)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    def test_fused_steps_match_the_cpu(self):
        for optimizer, options in CASES:
            with self.subTest(optimizer=optimizer.__name__, **options):
                self.compare(steps(DEVICE, optimizer, fused=True, **options), steps("cpu", optimizer, foreach=False, **options))

    def test_fused_steps_in_other_dtypes(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            for optimizer in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
                options = {"lr": 0.1, "fused": True}
                self.compare(steps(DEVICE, optimizer, dtype, **options), steps("cpu", optimizer, dtype, **options), dtype)

    def test_learning_rate_can_be_a_tensor(self):
        for optimizer, options in CASES:
            wanted = steps("cpu", optimizer, foreach=False, **{**options, "lr": 0.1})
            self.compare(steps(DEVICE, optimizer, fused=True, **{**options, "lr": torch.tensor(0.1)}), wanted)

    def test_foreach_steps_match_the_cpu(self):
        others = [(torch.optim.RMSprop, {"momentum": 0.9, "centered": True}), (torch.optim.NAdam, {}),
                  (torch.optim.Adamax, {}), (torch.optim.Adadelta, {"weight_decay": 0.1}), (torch.optim.RAdam, {})]
        for optimizer, options in CASES + others:
            with self.subTest(optimizer=optimizer.__name__, **options):
                self.compare(steps(DEVICE, optimizer, foreach=True, **options), steps("cpu", optimizer, foreach=False, **options))

    def test_foreach_with_mixed_tensors(self):
        x = [torch.ones(3, device=DEVICE), torch.ones(2, dtype=torch.int64, device=DEVICE)]
        torch._foreach_add_(x, 2)
        self.assertEqual([t.tolist() for t in x], [[3] * 3, [3] * 2])
        y = torch._foreach_mul([x[0], torch.ones(2, 3, device=DEVICE)], [x[0], x[0]])
        self.assertEqual([t.tolist() for t in y], [[9] * 3, [[3] * 3] * 2])
        z = torch._foreach_add([torch.ones(2, device=DEVICE)] * 2, [1.0, 2.0])
        self.assertEqual([t.tolist() for t in z], [[2] * 2, [3] * 2])
        twice = torch.ones(2, device=DEVICE)
        torch._foreach_mul_([twice, twice], 3)
        self.assertEqual(twice.tolist(), [9] * 2)
        leaf = torch.ones(2, device=DEVICE, requires_grad=True)
        sum(t.sum() for t in torch._foreach_mul([leaf, leaf], 3)).backward()
        self.assertEqual(leaf.grad.tolist(), [6] * 2)

    def scaled(self, device, fused):
        of = parameters(device)
        optimizer = torch.optim.AdamW(of, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(6):
            set_gradients(of, step, scale=1 if step == 2 else scaler.get_scale() if step else 1024.0)
            scaler.scale(torch.zeros((), device=device))
            if step == 2:
                of[1].grad[1] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [p.detach().cpu() for p in of]

    def test_loss_scaling(self):
        wanted = self.scaled("cpu", False)
        for fused in (True, False):
            scales, found = self.scaled(DEVICE, fused)
            self.assertEqual(scales, wanted[0])
            self.compare(found, wanted[1])
        self.assertEqual(wanted[0], [1024, 2048, 1024, 1024, 2048, 2048])

    def test_clipping(self):
        results = []
        for device in ("cpu", DEVICE):
            of = parameters(device)
            set_gradients(of, 3)
            norm = torch.nn.utils.clip_grad_norm_(of, 0.5)
            torch.nn.utils.clip_grad_value_(of, 0.05)
            results.append([norm.cpu()] + [p.grad.cpu() for p in of])
        self.compare(results[1], results[0])


if __name__ == "__main__":
    unittest.main()
