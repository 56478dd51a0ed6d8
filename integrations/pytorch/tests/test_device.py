"""Tests of the device: tensors, views, copies, files, random numbers, memory, errors."""

import copy
import io
import pickle
import unittest
import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

import claystone_torch

DEVICE = "claystone"


class Tensors(unittest.TestCase):
    def test_views_share_storage(self):
        x = torch.arange(12, dtype=torch.float32, device=DEVICE).view(3, 4)
        y = x.t()[1:3]
        self.assertEqual(y.untyped_storage().data_ptr(), x.untyped_storage().data_ptr())
        self.assertEqual(y.data_ptr(), x.data_ptr() + 4)
        y.mul_(10)
        expected = torch.arange(12, dtype=torch.float32).view(3, 4)
        expected.t()[1:3].mul_(10)
        self.assertTrue(torch.equal(x.cpu(), expected))
        x[0, 0] = 7
        x[:, 3] = torch.tensor([1.0, 2, 3])
        expected[0, 0] = 7
        expected[:, 3] = torch.tensor([1.0, 2, 3])
        self.assertEqual(x.cpu().tolist(), expected.tolist())
        self.assertEqual(x.view(torch.int32).cpu().tolist(), expected.view(torch.int32).tolist())

    def test_view_sees_out_results_written_to_its_base(self):
        x = torch.empty(4, 4, device=DEVICE)
        row = x[1]
        torch.mm(torch.eye(4, device=DEVICE), torch.full((4, 4), 3.0, device=DEVICE), out=x)
        self.assertEqual(row.tolist(), [3.0] * 4)

    def test_out(self):
        x = torch.randn(3, 4, device=DEVICE)
        out = torch.empty(0, device=DEVICE)
        self.assertIs(torch.add(x, x, out=out), out)
        torch.testing.assert_close(out.cpu(), 2 * x.cpu())
        narrow = torch.empty(3, 4, dtype=torch.int64, device=DEVICE)
        with self.assertRaisesRegex(RuntimeError, "can't be cast"):
            torch.mul(x, x, out=narrow)

    def test_dtypes(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
            x = torch.tensor([0, 1, 1, 0, 1], dtype=dtype)
            self.assertTrue(torch.equal(x.to(DEVICE).cpu(), x), dtype)
            self.assertTrue(torch.equal(x.to(DEVICE)[::2].cpu(), x[::2]), dtype)
            self.assertEqual((x.to(DEVICE) + 1.5).dtype, (x + 1.5).dtype)

    def test_unsupported_dtypes_can_be_stored(self):
        for dtype in (torch.complex64, torch.complex128):
            x = torch.tensor([[1, 2], [3, 4]], dtype=dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.assertTrue(torch.equal(x.to(DEVICE).t().cpu(), x.t()), dtype)
                self.assertTrue(torch.equal((x.to(DEVICE) + x.to(DEVICE)).cpu(), x + x), dtype)

    def test_copies(self):
        x = torch.randn(4, 6)
        y = torch.zeros(6, 4, device=DEVICE)
        y.t().copy_(x)
        self.assertTrue(torch.equal(y.cpu(), x.t()))
        y[::2, 1:3].copy_(torch.ones(3, 2))
        self.assertEqual(y[::2, 1:3].sum().item(), 6)
        self.assertTrue(torch.equal(y.to(torch.float64).cpu(), y.cpu().double()))
        z = torch.empty(2, 4, 6)
        z.copy_(x.to(DEVICE))
        self.assertTrue(torch.equal(z, x.expand(2, 4, 6)))

    def test_resize(self):
        x = torch.arange(4, device=DEVICE)
        x.resize_(2, 3)
        self.assertEqual(x.flatten()[:4].tolist(), [0, 1, 2, 3])

    def test_numpy_of_a_device_tensor_is_an_error(self):
        x = torch.ones(3, device=DEVICE)
        with self.assertRaises((TypeError, RuntimeError)):
            x.numpy()

    def test_promotion(self):
        i, h, f = (torch.ones(2, dtype=d, device=DEVICE) for d in (torch.int64, torch.float16, torch.float32))
        self.assertEqual([(i / i).dtype, (i * 1.0).dtype, (h + f).dtype, (h * 2.0).dtype, (i + h).dtype, (i > 0).dtype],
                         [torch.float32, torch.float32, torch.float32, torch.float16, torch.float16, torch.bool])

    def test_printing(self):
        self.assertIn("device='claystone:0'", repr(torch.arange(3, device=DEVICE)))


class Programs(unittest.TestCase):
    def test_deepcopy_pickle_and_files(self):
        model = torch.nn.Linear(3, 2).to(DEVICE)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model.weight.add_(1)
        self.assertEqual((model.weight - twin.weight).sum().item(), 6)
        x = torch.randn(2, 3, device=DEVICE)
        self.assertTrue(torch.equal(pickle.loads(pickle.dumps(x)), x))
        file = io.BytesIO()
        torch.save({"x": x, "row": x[1], "model": model.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file)
        self.assertEqual(loaded["x"].device, x.device)
        self.assertEqual(loaded["row"].untyped_storage().data_ptr(), loaded["x"].untyped_storage().data_ptr())
        self.assertTrue(torch.equal(loaded["row"], x[1]))
        file.seek(0)
        self.assertTrue(torch.equal(torch.load(file, map_location="cpu")["x"], x.cpu()))
        file = io.BytesIO()
        torch.save(x.cpu(), file)
        file.seek(0)
        self.assertTrue(torch.equal(torch.load(file, map_location=DEVICE), x))

    def test_map_location(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
        model[1].weight = model[0].weight = torch.nn.Parameter(torch.ones(2, 3, device=DEVICE)) # shared by two layers
        last = f"claystone:{torch.claystone.device_count() - 1}"
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        for wanted in (last, torch.device(last), lambda storage, location: storage.claystone(torch.device(last).index), {"claystone:0": last, "cpu": last}):
            file.seek(0)
            loaded = torch.load(file, map_location=wanted, weights_only=not callable(wanted))
            self.assertEqual({str(tensor.device) for tensor in loaded.values()}, {last})
            self.assertEqual(loaded["0.weight"].untyped_storage().data_ptr(), loaded["1.weight"].untyped_storage().data_ptr())
            self.assertEqual(loaded["0.weight"].sum().item(), 6)
        file.seek(0)
        self.assertEqual({str(tensor.device) for tensor in torch.load(file).values()}, {"cpu", "claystone:0"})

    def test_training_resumes_from_a_file(self):
        def step(model, optimizer):
            optimizer.zero_grad()
            model(torch.ones(2, 3, device=DEVICE)).square().sum().backward()
            optimizer.step()

        model = torch.nn.Linear(3, 2).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, optimizer)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, map_location="cpu")
        twin = torch.nn.Linear(3, 2).to(DEVICE)
        twin.load_state_dict(saved["model"])
        others = torch.optim.AdamW(twin.parameters(), lr=0.1)
        others.load_state_dict(saved["optimizer"])
        self.assertEqual(others.state[twin.weight]["exp_avg"].device.type, DEVICE)
        step(model, optimizer)
        step(twin, others)
        self.assertTrue(torch.equal(model.weight, twin.weight))

    def test_deepcopy_keeps_shared_storage(self):
        x = torch.arange(6.0, device=DEVICE).view(2, 3)
        kept = {"x": x, "row": x[1], "parameter": torch.nn.Parameter(x.t())}
        for twin in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
            self.assertTrue(torch.equal(twin["row"], x[1]))
            self.assertTrue(isinstance(twin["parameter"], torch.nn.Parameter) and twin["parameter"].requires_grad)
            self.assertEqual((twin["parameter"].stride(), twin["x"].device), ((1, 3), x.device))
        twin = copy.deepcopy(kept)
        twin["x"][1, 0] = 50 # the row is still a view of x
        self.assertEqual((twin["row"][0].item(), x[1, 0].item()), (50, 3))
        self.assertTrue(torch.equal(copy.copy(x), x))

    def test_several_devices(self):
        if torch.claystone.device_count() < 2:
            self.skipTest("there is one device")
        with torch.claystone.device(1):
            self.assertEqual(torch.claystone.current_device(), 1)
            x = torch.ones(3, device=DEVICE)
            self.assertGreater(torch.claystone.memory_allocated(), 0)
        self.assertEqual((torch.claystone.current_device(), x.device.index), (0, 1))
        model = torch.nn.Linear(3, 2).to("claystone:1")
        loss = model(x).sum()
        loss.backward()
        self.assertEqual((loss.device.index, model.weight.grad.device.index), (1, 1))
        across = (x.to("claystone:0").requires_grad_() * 2).to("claystone:1") + x
        across.sum().backward()
        self.assertEqual(across.tolist(), [3] * 3)
        optimizer = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(2, device="claystone:0"))], fused=True)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)

    def test_data_loader(self):
        data = TensorDataset(torch.arange(10.0), torch.arange(10))
        total = 0
        for x, y in DataLoader(data, batch_size=4, num_workers=1):
            total += (x.to(DEVICE) * y.to(DEVICE)).sum().item()
        self.assertEqual(total, sum(i * i for i in range(10)))

    def test_lazy_modules_move_before_their_first_use(self):
        for place in ("cpu", DEVICE):
            module = torch.nn.Sequential(torch.nn.LazyConv2d(3, 2), torch.nn.LazyBatchNorm2d(), torch.nn.Flatten(), torch.nn.LazyLinear(2))
            weights = list(module.parameters())
            module.to(place, torch.float64)
            result = module(torch.randn(2, 1, 5, 5, dtype=torch.float64, device=place))
            self.assertEqual((result.shape, result.device.type), ((2, 2), place))
            self.assertTrue(all(a is b for a, b in zip(weights, module.parameters(), strict=True)))

    def test_transformers_in_evaluation(self):
        # PyTorch has special operators for these modules, and would make nested tensors from the masks.
        x, causal = torch.randn(3, 5, 16), torch.nn.Transformer.generate_square_subsequent_mask(5)
        hidden = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 0, 0]], dtype=torch.bool)
        for norm_first, activation, layers in (False, "relu", 2), (True, "gelu", 2), (False, "gelu", 1):
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, activation=activation, norm_first=norm_first, batch_first=True)
            encoder = torch.nn.TransformerEncoder(layer, layers).eval()
            attention = layer.self_attn.eval()
            ours = copy.deepcopy(encoder).to(DEVICE), copy.deepcopy(attention).to(DEVICE)
            for mask, padding in (None, None), (causal, None), (None, hidden), (causal.isinf(), hidden):
                on_device = [None if t is None else t.to(DEVICE) for t in (x, mask, padding)]
                with torch.no_grad():
                    want = [encoder(x, mask=mask, src_key_padding_mask=padding), *attention(x, x, x, padding, attn_mask=mask)]
                    x_, mask_, padding_ = on_device
                    made = [ours[0](x_, mask=mask_, src_key_padding_mask=padding_), *ours[1](x_, x_, x_, padding_, attn_mask=mask_)]
                seen = torch.ones(3, 5, dtype=torch.bool) if padding is None else ~padding
                for a, b in zip(want, made): # the CPU has zeros at padding
                    torch.testing.assert_close(b.cpu()[seen], a[seen], rtol=1e-4, atol=1e-4)
        self.assertFalse({"_transformer_encoder_layer_fwd", "_native_multi_head_attention"} & set(claystone_torch.fallbacks()))

    def test_autocast(self):
        layer = torch.nn.Linear(4, 4).to(DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            self.assertEqual(layer(torch.randn(2, 4, device=DEVICE)).dtype, torch.bfloat16)

    def test_random_numbers(self):
        torch.manual_seed(5)
        a = torch.rand(100, device=DEVICE)
        state = torch.claystone.get_rng_state()
        b = torch.randn(100, device=DEVICE)
        torch.claystone.set_rng_state(state)
        self.assertTrue(torch.equal(torch.randn(100, device=DEVICE), b))
        torch.claystone.manual_seed(5)
        self.assertTrue(torch.equal(torch.rand(100, device=DEVICE), a))
        self.assertTrue(0 <= a.min().item() and a.max().item() < 1 and 0.3 < a.mean().item() < 0.7)
        generator = torch.Generator(DEVICE).manual_seed(7)
        c = torch.rand(5, device=DEVICE, generator=generator)
        self.assertTrue(torch.equal(torch.rand(5, device=DEVICE, generator=generator.manual_seed(7)), c))
        dropped = torch.nn.functional.dropout(torch.ones(1000, device=DEVICE), 0.25)
        self.assertAlmostEqual(dropped.mean().item(), 1, delta=0.1)
        self.assertEqual(sorted(torch.randperm(20, device=DEVICE).tolist()), list(range(20)))

    def test_fallbacks_are_listed(self):
        claystone_torch.reset_fallbacks()
        x = torch.tensor([2.0, 1], device=DEVICE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                torch.special.bessel_j0(x)
        listed = claystone_torch.fallbacks()
        self.assertEqual([name.split(".")[0] for name in listed], ["special_bessel_j0"])
        self.assertEqual(next(iter(listed.values()))[0], 3)
        self.assertEqual(sum("special_bessel_j0" in str(w.message) for w in caught), 1)

    def test_writes_into_expanded_tensors_match_the_cpu(self):
        mask, index = torch.tensor([True, False, True]), torch.tensor([0, 2])
        writes = {
            "fill": lambda x, on: x.fill_(2), "zero": lambda x, on: x.zero_(), "add": lambda x, on: x.add_(1),
            "copy": lambda x, on: x.copy_(on(torch.ones(3))), "relu": lambda x, on: x.relu_(), "clamp": lambda x, on: x.clamp_(0, 1),
            "masked_fill": lambda x, on: x.masked_fill_(on(mask), 5), "index_fill": lambda x, on: x.index_fill_(1, on(index), 5),
            "index_put": lambda x, on: torch.ops.aten.index_put_(x, [None, on(index)], on(torch.tensor(5.0))),
            "index_add": lambda x, on: x.index_add_(1, on(index), on(torch.ones(2, 2))),
            "scatter": lambda x, on: x.scatter_(1, on(torch.zeros(2, 2, dtype=torch.int64)), 5),
        }

        def outcome(write, device):
            base = torch.tensor([[-1.0], [3.0]]).to(device)
            try:
                returned = write(base.expand(2, 3), lambda tensor: tensor.to(device))
                return base.tolist(), returned.tolist(), returned.stride(), returned.device.type == device
            except RuntimeError as error:
                return base.tolist(), str(error)

        allowed = 0
        for name, write in writes.items():
            expected = outcome(write, "cpu")
            self.assertEqual(outcome(write, DEVICE), expected, name)
            allowed += len(expected) == 4
        self.assertTrue(0 < allowed < len(writes))

    def test_every_row_is_for_an_operator_of_pytorch(self):
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15):
            self.assertEqual(claystone_torch._unknown, [])

    def test_mixing_devices_is_an_error(self):
        if torch.claystone.device_count() > 1:
            with self.assertRaisesRegex(RuntimeError, "same device"):
                torch.ones(2, device="claystone:0") + torch.ones(2, device="claystone:1")
            x = torch.arange(3.0, device="claystone:0").to("claystone:1")
            self.assertEqual(((x + 1).device.index, (x + 1).tolist()), (1, [1, 2, 3]))
        with self.assertRaises(RuntimeError):
            torch.empty(1, device="claystone:99")


if __name__ == "__main__":
    unittest.main()
