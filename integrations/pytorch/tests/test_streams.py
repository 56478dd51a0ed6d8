"""Tests of streams, events and pinned memory."""

import os
import unittest

import torch
from torch.utils.data import DataLoader, TensorDataset

import claystone_torch

DEVICE = "claystone"
COMPUTES_AT_ONCE = os.environ.get("CLAYSTONE_TORCH_DEVICE") == "cpu"


class Streams(unittest.TestCase):
    def test_current_stream(self):
        default = torch.claystone.default_stream()
        self.assertEqual(torch.claystone.current_stream(), default)
        side = torch.claystone.Stream(priority=-1)
        other = torch.Stream(device=DEVICE)
        self.assertEqual(len({default, side, other}), 3)
        with torch.claystone.stream(side):
            self.assertEqual(torch.claystone.current_stream(), side)
            with other:
                self.assertEqual(torch.accelerator.current_stream(), other)
            with torch.claystone.stream(None):
                self.assertEqual(torch.claystone.current_stream(), side)
        self.assertEqual(torch.claystone.current_stream(), default)
        torch.claystone.set_stream(side)
        self.assertEqual(torch.claystone.current_stream(), side)
        torch.claystone.set_stream(default)
        self.assertLessEqual(len({torch.claystone.Stream() for _ in range(100)}), 32)
        with self.assertRaisesRegex(RuntimeError, "no stream 12345"):
            torch.Stream(stream_id=12345, device_index=0, device_type=side.device_type).synchronize()

    def test_waits_order_work_between_streams(self):
        main, side = torch.claystone.current_stream(), torch.claystone.Stream()
        x = torch.randn(300, 300, device=DEVICE)
        for _ in range(10):
            side.wait_stream(main)
            with torch.claystone.stream(side):
                x = x @ x / 20
                done = side.record_event()
            main.wait_event(done)
            x = x + 1
            side.synchronize()
        self.assertTrue(done.query() and side.query())
        y = torch.randn(300, 300, device=DEVICE)
        with torch.claystone.stream(side):
            side.wait_stream(main)
            z = y + y
        main.wait_stream(side)
        self.assertTrue(torch.equal((z - y).cpu(), y.cpu()))

    def test_backward_runs_on_the_stream_of_the_forward(self):
        side = torch.claystone.Stream()
        layer = torch.nn.Linear(8, 8).to(DEVICE)
        seen = []
        layer.weight.register_hook(lambda grad: seen.append(torch.claystone.current_stream()))
        side.wait_stream(torch.claystone.current_stream())
        with torch.claystone.stream(side):
            layer(torch.ones(2, 8, device=DEVICE)).sum().backward()
        torch.claystone.current_stream().wait_stream(side)
        self.assertEqual(seen, [side])
        self.assertEqual(layer.weight.grad.unique().tolist(), [2])

    def test_memory_in_use_by_a_stream_is_not_reused(self):
        main, side = torch.claystone.current_stream(), torch.claystone.Stream()
        for record in (True, False): # PyTorch requires record_stream; claystone records uses itself
            x = torch.ones(1 << 18, device=DEVICE)
            out = torch.empty(1 << 18, device=DEVICE)
            side.wait_stream(main)
            with torch.claystone.stream(side):
                total = torch.zeros(1 << 18, device=DEVICE)
                for _ in range(20):
                    total += x
                out.copy_(total)
            if record:
                x.record_stream(side)
            del x
            for _ in range(4):
                torch.full((1 << 18,), 1e9, device=DEVICE)
            main.wait_stream(side)
            self.assertEqual(out.unique().tolist(), [20])
            # `out` was allocated on this stream, written on the other, and is freed after a use on this stream.
            used = out + 0
            del out
            with torch.claystone.stream(side):
                torch.full((1 << 18,), 1e9, device=DEVICE)
            self.assertEqual(used.unique().tolist(), [20])

    def test_times(self):
        x = torch.randn(200, 200, device=DEVICE)
        start, middle, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(3))
        start.record()
        for _ in range(5):
            x = x @ x / 200
        middle.record()
        end.record(torch.claystone.current_stream())
        end.synchronize()
        self.assertGreater(start.elapsed_time(middle), 0)
        self.assertAlmostEqual(start.elapsed_time(middle) + middle.elapsed_time(end), start.elapsed_time(end), places=6)
        untimed = torch.claystone.Event()
        untimed.record()
        with self.assertRaisesRegex(ValueError, "enable_timing"):
            untimed.elapsed_time(untimed)

    def test_streams_of_several_devices(self):
        if torch.claystone.device_count() < 2:
            self.skipTest("there is one device")
        there = torch.claystone.Stream("claystone:1")
        with torch.claystone.stream(there):
            self.assertEqual(torch.claystone.current_device(), 1)
            x = torch.ones(1000, device=DEVICE) * 3
        self.assertEqual((torch.claystone.current_device(), x.device.index), (0, 1))
        torch.claystone.current_stream().wait_stream(there)
        self.assertEqual(x.to("claystone:0").sum().item(), 3000)


def keep_busy():
    """Submits long work to the current stream, unless the device is the CPU device, so that the next command has to wait."""
    x = torch.zeros(1000, 1000, device=DEVICE)
    for _ in range(0 if COMPUTES_AT_ONCE else 4):
        x = x @ x


class NonBlocking(unittest.TestCase):
    def assertUnderWay(self):
        """Asserts that the stream still has work after the previous call, or is idle on the CPU device, which computes within the call."""
        self.assertEqual(torch.claystone.current_stream().query(), COMPUTES_AT_ONCE)

    def test_to_the_device_from_pinned_memory(self):
        x = torch.arange(1000.0)
        pinned = x.pin_memory()
        keep_busy()
        there = pinned.to(DEVICE, non_blocking=True)
        self.assertUnderWay()
        # The block is not reused before the copy is complete.
        del pinned
        others = [torch.full((1000,), -1.0).pin_memory() for _ in range(3)]
        self.assertTrue(torch.equal(there.cpu(), x))
        self.assertEqual([int(other.sum()) for other in others], [-1000] * 3)
        # Device memory is not reused before a copy to it is complete.
        for _ in range(3):
            keep_busy()
            torch.full((1000,), 5.0).pin_memory().to(DEVICE, non_blocking=True)
            kept = torch.zeros(1000, device=DEVICE)
            self.assertEqual(kept.unique().tolist(), [0])

    def test_to_pinned_memory(self):
        x = torch.arange(1000.0, device=DEVICE)
        back = torch.zeros(1000).pin_memory()
        keep_busy()
        x += 1
        back.copy_(x, non_blocking=True)
        x += 1 # comes after the copy
        self.assertUnderWay()
        torch.claystone.synchronize()
        self.assertTrue(torch.equal(back, torch.arange(1000.0) + 1))
        keep_busy()
        on_host = x.cpu() # waits
        self.assertTrue(torch.equal(on_host, torch.arange(1000.0) + 2))
        keep_busy()
        later = (x * 2).to("cpu", non_blocking=True)
        done = torch.claystone.current_stream().record_event()
        done.synchronize()
        self.assertTrue(torch.equal(later, 2 * torch.arange(1000.0) + 4))

    def test_from_ordinary_memory(self):
        x = torch.arange(1000.0)
        keep_busy()
        there = x.to(DEVICE, non_blocking=True)
        self.assertUnderWay()
        x.zero_() # as with CUDA, ordinary memory may be changed at once
        self.assertTrue(torch.equal(there.cpu(), torch.arange(1000.0)))
        large = torch.arange(5_000_000)
        self.assertTrue(torch.equal(large.to(DEVICE, non_blocking=True).cpu(), large))

    def test_other_dtypes_and_strides(self):
        x = torch.randn(64, 33)
        pinned = x.pin_memory()
        for is_compiled in (False, True):
            keep_busy()
            halves = torch.empty(33, 64, dtype=torch.float16, device=DEVICE).copy_(pinned.t(), non_blocking=True)
            turned = pinned.t()[3:].to(DEVICE, non_blocking=True)
            complex_ones = torch.full((5,), 1 + 2j).pin_memory().to(DEVICE, non_blocking=True)
            back = torch.empty(64, 33, dtype=torch.float64).pin_memory()
            back.copy_(halves.t(), non_blocking=True)
            if is_compiled: # in the first round, compiling takes longer than the stream's work
                self.assertUnderWay()
            torch.claystone.synchronize()
        self.assertTrue(torch.equal(back, x.half().double()))
        self.assertTrue(torch.equal(turned.cpu(), x.t()[3:]))
        self.assertEqual(complex_ones.cpu().tolist(), [1 + 2j] * 5)
        ordinary = torch.zeros(64, 33, dtype=torch.float64)
        ordinary.copy_(halves.t(), non_blocking=True) # waits
        self.assertTrue(torch.equal(ordinary, back))

    def test_two_streams(self):
        main, side = torch.claystone.current_stream(), torch.claystone.Stream()
        ones, back = torch.ones(1000).pin_memory(), torch.zeros(1000).pin_memory()
        for i in range(5):
            with torch.claystone.stream(side):
                keep_busy()
                x = ones.to(DEVICE, non_blocking=True) * i
            main.wait_stream(side)
            back.copy_(x + 1, non_blocking=True)
            x = None # allocated on the other stream
            with torch.claystone.stream(side):
                torch.full((1000,), 1e9, device=DEVICE)
            main.synchronize()
            self.assertEqual(back.unique().tolist(), [i + 1])

    def test_kernel_errors_are_reported_at_the_next_wait(self):
        table, back = torch.zeros(4, 8, device=DEVICE), torch.zeros(8).pin_memory()
        if COMPUTES_AT_ONCE:
            return # the CPU device reports the error within the call
        back.copy_(torch.embedding(table, torch.tensor([7], device=DEVICE))[0], non_blocking=True)
        with self.assertRaisesRegex(IndexError, "embedding"):
            torch.claystone.synchronize()


class Pinned(unittest.TestCase):
    def test_tensors(self):
        x = torch.randn(64, 33)
        pinned = x.pin_memory()
        self.assertTrue(pinned.is_pinned() and pinned[5:].is_pinned() and not x.is_pinned())
        self.assertTrue(torch.equal(pinned, x))
        self.assertEqual(pinned.data_ptr() % 64, 0)
        on_device = pinned[5:].to(DEVICE, non_blocking=True)
        self.assertTrue(torch.equal(on_device.cpu(), x[5:]))
        back = torch.zeros(59, 33, pin_memory=True)
        back.copy_(on_device, non_blocking=True)
        torch.claystone.synchronize()
        self.assertTrue(torch.equal(back, x[5:]))
        # With other strides and dtypes.
        self.assertTrue(torch.equal(pinned.t()[3:].to(DEVICE).cpu(), x.t()[3:]))
        halves = torch.empty(33, 64, dtype=torch.float16, pin_memory=True)
        halves.t().copy_(pinned.to(DEVICE))
        self.assertTrue(torch.equal(halves, x.t().half()))
        self.assertTrue(torch.empty(0).pin_memory().numel() == 0)

    def test_data_loader(self):
        data = TensorDataset(torch.arange(10.0), torch.arange(10))
        for workers in (0, 1):
            total = 0
            for x, y in DataLoader(data, batch_size=4, num_workers=workers, pin_memory=True):
                self.assertTrue(x.is_pinned() and y.is_pinned())
                total += (x.to(DEVICE, non_blocking=True) * y.to(DEVICE, non_blocking=True)).sum().item()
            self.assertEqual(total, sum(i * i for i in range(10)))


if __name__ == "__main__":
    unittest.main()
