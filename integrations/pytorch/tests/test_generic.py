"""Generic device tests, instantiated for claystone with PyTorch's instantiate_device_type_tests. They cover the subjects of PyTorch's test_torch,
test_view_ops, test_indexing, test_type_promotion and test_serialization. Each result is compared with that of PyTorch's CPU."""

import copy
import io
import itertools
import re
import unittest

import torch

import claystone_torch  # noqa: F401, must come before the imports below, which look up the devices
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def values(shape, dtype):
    return (torch.arange(torch.Size(shape).numel()) * 7 % 11).reshape(shape).to(dtype)


class Generic(TestCase):
    def on_both(self, compute, *arguments, **how):
        """Asserts that `compute` has the same result on the device and on the CPU."""
        moved = [torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(self.device_type), a) for a in arguments]
        self.assertEqual(compute(*moved), compute(*arguments), exact_device=False, exact_stride=how.pop("exact_stride", False), **how)

    @dtypes(*NUMBERS)
    def test_writes_through_views_change_the_base(self, device, dtype):
        def compute(x):
            views = [
                x.t(), x[1:, ::2], x.view(-1)[3:9], x.unsqueeze(1).expand(4, 3, 5), x.select(1, 2), x.narrow(0, 1, 2), x.unfold(1, 3, 2),
                x.as_strided((2, 2), (3, 1), 1), x.diagonal(), x.movedim(0, 1), *x.split(2, 1), *x.chunk(3), *x.unbind(),
            ]  # fmt: skip
            self.assertTrue(all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and view._is_view() for view in views))
            views[1].fill_(3)
            views[2].add_(1)
            views[0].mul_(2)
            return [(view, view.stride(), view.storage_offset()) for view in views]

        self.on_both(compute, values((4, 5), dtype))

    @dtypes(*NUMBERS)
    def test_indices_read_and_write(self, device, dtype):
        def compute(x, rows, mask):
            found = [x[rows], x[rows, 1], x[:, rows[:2]], x[mask], x[..., None, 2], x[[2, 0]], x[-1], x[rows[:, None], rows], x[True], x[1:1]]
            x[rows] = 5
            x[mask] = x[mask] + 1
            x[1, ::2] = torch.arange(3, device=x.device).to(x.dtype)
            x[rows, rows] += 2
            x.index_put_((rows,), x[0].clone(), accumulate=False)
            return found, x

        x = values((4, 5), dtype)
        self.on_both(compute, x, torch.tensor([3, 0, 2]), x > 4)

    def test_indices_out_of_range_are_errors(self, device):
        x = torch.zeros(3, 4, device=device)
        for wrong in (lambda: x[5], lambda: x[:, 7], lambda: x[torch.tensor([1, 9], device=device)].cpu(), lambda: x[..., 0, 0, 0]):
            self.assertRaises((IndexError, RuntimeError), wrong)
        self.assertEqual((x + 1).sum().item(), 12)

    def test_type_promotion_matches_the_cpu(self, device):
        for a, b in itertools.product((*NUMBERS, torch.bool), repeat=2):
            for operator in (torch.add, torch.mul, torch.maximum, torch.eq, torch.true_divide):
                self.on_both(lambda x, y: operator(x, y).dtype, values((3,), a), values((3,), b))
            self.on_both(lambda x, y: (x + y.sum()).dtype, values((3,), a), values((3,), b))
            # A zero-dimensional CPU tensor may be combined with tensors of any device.
            self.on_both(lambda x: (x * torch.tensor(1, dtype=b)).dtype, values((3,), a))
            self.on_both(lambda x: torch.add(torch.tensor(1, dtype=b), x.sum()).dtype, values((3,), a))
            self.on_both(lambda x: ((x + 1).dtype, (x * 1.5).dtype, (x == True).dtype), values((3,), a))  # noqa: E712

    @dtypes(*NUMBERS)
    def test_factories(self, device, dtype):
        def compute(x):
            options = {"dtype": dtype, "device": x.device}
            return [
                torch.zeros(2, 3, **options), torch.ones(2, **options), torch.full((2, 2), 3, **options), torch.arange(1, 10, 2, **options),
                torch.eye(3, 4, **options), torch.tensor([[1, 2], [3, 4]], **options), torch.linspace(0, 4, 5, **options), x.new_full((2,), 7),
                torch.zeros_like(x), torch.ones_like(x, dtype=torch.float32), torch.full_like(x, 2), x.new_tensor([1, 2]), torch.empty(0, 3, **options),
                torch.scalar_tensor(3, **options), torch.tril_indices(3, 3, device=x.device),
            ]  # fmt: skip

        self.on_both(compute, values((2, 3), dtype), exact_stride=True)

    @dtypes(*FLOATS)
    def test_out_tensors_receive_results(self, device, dtype):
        def compute(x, y):
            given = [torch.empty(0, dtype=dtype, device=x.device), torch.zeros(5, 4, dtype=dtype, device=x.device).t()]
            for out in given:
                result = torch.add(x, y, out=out)
                self.assertIs(result, out)
            torch.sum(x, 1, out=given[0].resize_(0))
            torch.exp(x, out=x)
            return given, x

        self.on_both(compute, values((4, 5), dtype), values((4, 5), dtype) / 4)

    @dtypes(*NUMBERS)
    def test_copies_between_dtypes_devices_and_layouts(self, device, dtype):
        for other in NUMBERS:
            self.on_both(lambda x: [x.to(other), x.t().to(other), torch.zeros(5, 4, device=x.device, dtype=other).copy_(x.t())], values((4, 5), dtype))
        x = values((2, 3, 4, 5), dtype)
        there = x.to(device, memory_format=torch.channels_last)
        self.assertTrue(there.is_contiguous(memory_format=torch.channels_last))
        self.assertEqual(there.cpu(), x)
        self.assertEqual(x.clone().copy_(there.transpose(2, 3).contiguous().transpose(2, 3)), x)

    @dtypes(*NUMBERS)
    def test_in_place_operators_return_their_tensor(self, device, dtype):
        def compute(x):
            address, version = x.data_ptr(), x._version
            x.add_(1).mul_(2).clamp_(2, 15).neg_() if dtype != torch.uint8 else x.add_(1).mul_(2).clamp_(2, 15)
            x.t_().t_().unsqueeze_(0).squeeze_(0)
            self.assertEqual(x.data_ptr(), address)
            return x, x._version - version

        self.on_both(compute, values((4, 5), dtype))
        with self.assertRaises(RuntimeError):
            torch.ones(3, device=device, dtype=torch.int64).add_(0.5)  # a float result cannot be cast to int64
        with self.assertRaises(RuntimeError):
            torch.ones(3, device=device, dtype=dtype).add_(torch.ones(2, 3, device=device, dtype=dtype))

    @dtypes(*NUMBERS)
    def test_copies_and_files_have_the_same_values(self, device, dtype):
        x = values((4, 5), dtype).to(device)
        views = {"x": x, "part": x[1:, 2:], "transposed": x.t()}
        file = io.BytesIO()
        torch.save(views, file)
        file.seek(0)
        for made in (copy.deepcopy(views), torch.load(file)):
            self.assertEqual({k: v.cpu() for k, v in made.items()}, {k: v.cpu() for k, v in views.items()})
            self.assertEqual({v.device for v in made.values()}, {x.device})
            made["x"].zero_()
            self.assertEqual(made["part"].sum().item(), 0)  # they still share storage
        self.assertEqual(x.cpu(), values((4, 5), dtype))

    def test_printing_matches_the_cpu(self, device):
        for x in (torch.tensor([1.5, float("nan"), float("inf"), -1e-8]), torch.arange(6).view(2, 3), torch.tensor(True), torch.zeros(0, 2)):
            self.assertEqual(re.sub(r",\s*device='\w+:0'", "", str(x.to(device))), str(x))

    @dtypes(*FLOATS)
    def test_gradients_through_views_and_writes(self, device, dtype):
        def compute(x, w):
            x, w = x.clone().requires_grad_(True), w.clone().requires_grad_(True)
            y = x * 2
            y[1:, ::2] *= w
            y[0] = w.sum()
            y.t().mul(y.t()).sum().backward()
            return x.grad, w.grad

        self.on_both(compute, values((4, 6), dtype), values((3,), dtype), atol=1e-2, rtol=1e-2)

    def test_changing_a_saved_tensor_is_an_error(self, device):
        x = torch.ones(3, device=device, requires_grad=True)
        y = x.exp()
        y.add_(1)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()


instantiate_device_type_tests(Generic, globals(), only_for="privateuse1", allow_xpu=False)

if __name__ == "__main__":
    unittest.main()  # PyTorch's run_tests needs more packages if the variable CI is set
