"""Composed operators, experts and operators of the host: values and gradients as on PyTorch's CPU."""

import itertools
import unittest
import warnings

import torch
import torch.nn.functional as F

import claystone_torch


class Composed(unittest.TestCase):
    def on_both(self, compute, *arguments, fallbacks=(), **tolerances):
        """Asserts that `compute` has the same results and gradients on both devices without a warning, and that the operators with these
        names, and no others, run on PyTorch's CPU."""

        def run(device):
            inputs = [x.detach().to(device).requires_grad_(x.requires_grad) for x in arguments]
            result = compute(*inputs)
            wanted = [x for x in inputs if x.requires_grad]
            weights = torch.linspace(0.5, 1.5, result.numel()).view(result.shape).to(result)
            return result.detach().cpu(), *(x.cpu() for x in (torch.autograd.grad(result, wanted, weights) if wanted else ()))

        expected = run("cpu")
        claystone_torch.reset_fallbacks()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = run("claystone")
        self.assertEqual({name.split(".")[0] for name in claystone_torch.fallbacks()}, set(fallbacks))
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, **tolerances)

    def setUp(self):
        torch.manual_seed(0)

    def test_weight_norm(self):
        for shape, dim in itertools.product([(4, 3, 2), (6, 5), (4,)], (0, -1)):
            dim = dim % len(shape)
            g = torch.rand([n if i == dim else 1 for i, n in enumerate(shape)]) + 0.5
            self.on_both(lambda v, g: torch._weight_norm(v, g, dim), torch.randn(shape, requires_grad=True), g.requires_grad_())
        half = {"dtype": torch.bfloat16, "requires_grad": True}
        self.on_both(lambda v, g: torch._weight_norm(v, g, 0), torch.randn(6, 5, **half), torch.ones(6, 1, **half), atol=0.02, rtol=0.02)
        layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(3, 4, 3)).to("claystone")
        claystone_torch.reset_fallbacks()
        layer(torch.randn(2, 3, 8, device="claystone")).sum().backward()
        self.assertEqual(claystone_torch.fallbacks(), {})

    def test_grid_sample(self):
        for dims, mode, padding, align in itertools.product((2, 3), ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)):
            compute = lambda x, grid: F.grid_sample(x, grid, mode, padding, align)
            sizes, places = (5, 1, 4)[:dims], (3, 4, 2)[:dims]
            with self.subTest(dims=dims, mode=mode, padding=padding, align=align):
                x = torch.randn(2, 3, *sizes, requires_grad=True)
                self.on_both(compute, x, (torch.randn(2, *places, dims) * 1.2).requires_grad_(), atol=1e-4, rtol=1e-4)
        with torch.inference_mode():
            self.on_both(lambda x, grid: F.grid_sample(x, grid, align_corners=False), torch.randn(1, 2, 4, 4), torch.rand(1, 3, 3, 2))

    def test_embedding_bag(self):
        indices = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
        for mode, padding, by_freq, last in itertools.product(("sum", "mean", "max"), (None, 4), (False, True), (False, True)):
            if mode == "max" and by_freq:
                continue
            options = {"mode": mode, "padding_idx": padding, "scale_grad_by_freq": by_freq, "include_last_offset": last}
            offsets = torch.tensor([0, 2, 2, 7] + [8] * last)
            with self.subTest(**options):
                self.on_both(lambda w, i, o: F.embedding_bag(i, w, o, **options), torch.randn(10, 3, requires_grad=True), indices, offsets)
        weight, samples = torch.randn(10, 3, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        self.on_both(lambda w, i, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s), weight, indices.view(2, 4), samples)
        self.on_both(lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 0], device=w.device)), weight, indices[:0])
        self.on_both(lambda w, i: F.embedding_bag(i.int(), w), torch.randn(10, 3), indices.view(2, 4))

    def test_nan_to_num_and_windows(self):
        x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 0.0], requires_grad=True)
        self.on_both(torch.nan_to_num, x)
        self.on_both(lambda x: torch.nan_to_num(x, 2.0, posinf=3.0, neginf=-4.0), x)
        self.on_both(torch.nan_to_num, torch.arange(4))
        self.on_both(lambda x: x.unfold(1, 3, 2), torch.randn(2, 9, requires_grad=True))

    def test_grouped_products(self):
        ends = torch.tensor([4, 8, 8, 16], dtype=torch.int32)
        for dtype in (torch.float32, torch.bfloat16):
            make = lambda *shape: torch.randn(*shape, dtype=dtype, requires_grad=True)
            close = {"atol": 0.1, "rtol": 0.02} if dtype == torch.bfloat16 else {}
            grouped = lambda a, b, ends: F.grouped_mm(a, b, offs=ends)
            self.on_both(grouped, make(16, 32), make(4, 32, 16), ends, **close)
            self.on_both(grouped, make(16, 16), make(16, 32), ends, **close)
            self.on_both(grouped, make(4, 16, 32), make(32, 16), ends, **close)
            self.on_both(F.grouped_mm, make(4, 16, 32), make(4, 32, 16), **close)

    def test_histograms_of_integers(self):
        x = torch.arange(-1, 62, device="claystone").repeat(2)
        for dtype in (torch.int32, torch.int64):
            found = torch.histc(x.to(dtype), bins=60, min=0, max=59)
            self.assertEqual((found.dtype, found.tolist()), (dtype, [2] * 60))
            self.assertEqual(torch.histc(x.to(dtype), bins=60, min=0, max=60).tolist(), [2] * 59 + [4])

    def test_sums_have_the_requested_dtype(self):
        for dtype, name in itertools.product((torch.int32, torch.uint8, torch.float16), ("cumsum", "cumprod", "sum", "nansum", "prod")):
            self.on_both(lambda x: getattr(x, name)(0, dtype=dtype), torch.tensor([[1, 2], [3, 4]]))

    def test_mixture_of_experts(self):
        def sorted_by_expert(x, router, first, second):
            weights, experts = (x @ router).softmax(-1).topk(2)
            order = experts.flatten().argsort(stable=True)
            ends = torch.bincount(experts.flatten(), minlength=4).cumsum(0).to(torch.int32)
            hidden = F.grouped_mm(x[order // 2], first, offs=ends).relu()
            found = F.grouped_mm(hidden, second, offs=ends) * weights.flatten()[order].unsqueeze(1)
            return torch.zeros_like(x).index_add_(0, order // 2, found)

        def one_by_one(x, router, first, second):
            weights, experts = (x @ router).softmax(-1).topk(2)
            mask = F.one_hot(experts, 4).permute(2, 1, 0)
            result = torch.zeros_like(x)
            for expert in (mask.sum((1, 2)) > 0).nonzero().flatten().tolist():
                rank, token = torch.where(mask[expert])
                found = (x[token] @ first[expert]).relu() @ second[expert]
                result.index_add_(0, token, found * weights[token, rank].unsqueeze(1))
            return result

        make = lambda *shape: torch.randn(*shape, requires_grad=True)
        arguments = make(10, 8), make(8, 4), make(4, 8, 16), make(4, 16, 8)
        self.on_both(sorted_by_expert, *arguments, atol=1e-4, rtol=1e-4)
        self.on_both(one_by_one, *arguments, atol=1e-4, rtol=1e-4)

    def test_matrices_on_the_host(self):
        a, b = torch.randn(3, 4, 4) + 4 * torch.eye(4), torch.randn(3, 4, 2)
        a.requires_grad_(), b.requires_grad_()
        close = {"atol": 1e-4, "rtol": 1e-4}
        self.on_both(torch.linalg.inv, a, fallbacks={"linalg_inv_ex"}, **close)
        self.on_both(torch.linalg.solve, a, b, fallbacks={"_linalg_solve_ex", "linalg_lu_solve"}, **close)
        self.on_both(lambda a: torch.linalg.cholesky(a @ a.mT), a, fallbacks={"linalg_cholesky_ex", "linalg_solve_triangular"}, **close)
        self.on_both(lambda a: torch.linalg.qr(a)[1], a, fallbacks={"linalg_qr", "linalg_solve_triangular"}, **close)
        self.on_both(torch.linalg.det, a, fallbacks={"_linalg_det", "linalg_lu_solve"}, **close)
        self.on_both(torch.linalg.svdvals, a, fallbacks={"_linalg_svd"}, **close)
        self.on_both(lambda a: torch.linalg.eigvalsh(a + a.mT), a, fallbacks={"_linalg_eigh"}, **close)
        claystone_torch.reset_fallbacks()
        torch.linalg.inv(a.detach().to("claystone"))
        self.assertEqual([count for count, _ in claystone_torch.fallbacks().values()], [1])

    def test_ctc_loss_on_the_host(self):
        targets, lengths = torch.tensor([[1, 2, 2], [3, 1, 0]]), torch.tensor([3, 2])
        compute = lambda x, targets, lengths: F.ctc_loss(x.log_softmax(-1), targets, torch.tensor([8, 7]), lengths)
        self.on_both(compute, torch.randn(8, 2, 5, requires_grad=True), targets, lengths, fallbacks={"_ctc_loss", "_ctc_loss_backward"})


if __name__ == "__main__":
    unittest.main()
