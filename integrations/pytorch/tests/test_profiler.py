"""Tests that torch.profiler shows the device's work under the operators that launched it."""

import json
import tempfile
import unittest
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import claystone_torch

DEVICE = "claystone"


class Profiles(unittest.TestCase):
    def step(self):
        layer = torch.nn.Linear(64, 64).to(DEVICE)
        x = torch.randn(32, 64, device=DEVICE)
        with record_function("forward"):
            loss = layer(x).relu().sum()
        loss.backward()
        torch.claystone.synchronize()

    def test_kernels_are_under_their_operators(self):
        self.step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as found:
            self.step()
        averages = {average.key: average for average in found.key_averages()}
        for operator in ("aten::linear", "aten::relu", "aten::linear_backward", "forward"):
            self.assertGreater(averages[operator].device_time_total, 0, operator)
        kernels = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.PrivateUse1]
        self.assertTrue(kernels)
        self.assertTrue(all(kernel.time_range.elapsed_us() >= 0 for kernel in kernels))
        self.assertTrue(all(kernel.time_range.start >= 0 for kernel in kernels))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        shown = [event for event in events if event.get("cat") == "kernel"]
        self.assertGreaterEqual(len(shown), 4)
        if any(event.get("cat") == "privateuse1_runtime" for event in events):
            flows = [{event["id"] for event in events if event.get("cat") == "ac2g" and event["ph"] == end} for end in "sf"]
            self.assertTrue(flows[0] & flows[1]) # arrows from launches to kernels

    def test_norms_and_their_statistics_run_as_one_kernel(self):
        x = torch.randn(32, 64, device=DEVICE, requires_grad=True)
        for norm in (torch.nn.LayerNorm(64), torch.nn.GroupNorm(4, 64)):
            norm = norm.to(DEVICE)
            norm(x)
            torch.claystone.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as found:
                norm(x)
                torch.claystone.synchronize()
            kernels = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.PrivateUse1]
            self.assertEqual(len(kernels), 1, [kernel.name for kernel in kernels])

    def test_cpu_profile_does_not_start_claystones_profiler(self):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            self.step()
        self.assertFalse([event for event in found.events() if event.device_type == torch.autograd.DeviceType.PrivateUse1])


if __name__ == "__main__":
    unittest.main()
