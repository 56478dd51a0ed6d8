"""Tests of PyTorch's interface for any accelerator: every public function of torch.accelerator and torch.accelerator.memory."""

import unittest
import warnings

import torch
from torch import accelerator

import claystone_torch

DEVICE = "claystone"


class Accelerator(unittest.TestCase):
    def test_every_public_function_runs(self):
        device = torch.device(DEVICE, 0)
        stats = torch.claystone.memory_stats
        stream = torch.claystone.current_stream()
        expected = {
            "current_accelerator": ((), torch.device(DEVICE)),
            "current_device_idx": ((), 0),
            "current_device_index": ((), 0),
            "current_stream": ((), stream),
            "device_count": ((), torch.claystone.device_count()),
            "empty_cache": ((), None),
            "empty_host_cache": ((), None),
            "get_memory_info": ((device,), torch.claystone.mem_get_info()),
            "is_available": ((), True),
            "max_memory_allocated": ((device,), torch.claystone.max_memory_allocated()),
            "max_memory_reserved": ((0,), torch.claystone.max_memory_reserved()),
            "memory_allocated": ((), torch.claystone.memory_allocated()),
            "memory_reserved": ((DEVICE,), torch.claystone.memory_reserved()),
            "reset_accumulated_memory_stats": ((), None),
            "reset_peak_memory_stats": ((), None),
            "set_device_idx": ((0,), None),
            "set_device_index": ((0,), None),
            "set_stream": ((stream,), None),
            "synchronize": ((), None),
        }
        own_tests = {"Graph", "device_index", "get_device_capability", "memory_stats"}
        found = {name: accelerator for name in accelerator.__all__}
        if hasattr(accelerator, "memory"):
            found |= {name: accelerator.memory for name in accelerator.memory.__all__}
        self.assertEqual(set(found) - set(expected) - own_tests, set())
        kept = torch.ones(1 << 18, device=DEVICE)
        torch.claystone.empty_cache()
        for name, module in found.items():
            if name in expected:
                arguments, value = expected[name]
                if "memory_" in name or name == "get_memory_info":
                    value = getattr(torch.claystone, {"get_memory_info": "mem_get_info"}.get(name, name))()
                with warnings.catch_warnings(action="ignore"):
                    self.assertEqual(getattr(module, name)(*arguments), value, name)
        del kept

    @unittest.skipUnless(hasattr(accelerator, "memory_stats"), "this PyTorch has no statistics of accelerators")
    def test_statistics_are_those_of_the_device(self):
        kept = torch.ones(1 << 18, device=DEVICE)
        torch.ones(1 << 20, device=DEVICE)
        torch.claystone.synchronize()
        theirs, ours = dict(accelerator.memory_stats()), torch.claystone.memory_stats()
        self.assertEqual({name: theirs[name] for name in theirs if name in ours}, {name: ours[name] for name in ours if name in theirs})
        # The others of claystone are those of moves to the host, those of PyTorch are of private pools and of a key without meaning here.
        self.assertTrue(all("spill" in name or name == "num_returns" for name in set(ours) - set(theirs)), set(ours) - set(theirs))
        others = [name for name in theirs if name not in ours and "private_pools" not in name and name != "num_oom_rejections"]
        self.assertEqual(others, [])
        accelerator.reset_peak_memory_stats()
        self.assertEqual(torch.claystone.max_memory_allocated(), torch.claystone.memory_allocated())
        accelerator.reset_accumulated_memory_stats()
        self.assertEqual(torch.claystone.memory_stats()["allocated_bytes.all.allocated"], 0)
        del kept

    def test_device_index_is_a_context(self):
        with accelerator.device_index(0):
            self.assertEqual(torch.ones(2, device=DEVICE).device, torch.device(DEVICE, 0))

    @unittest.skipUnless(hasattr(accelerator, "get_device_capability"), "this PyTorch asks for no capabilities")
    def test_capabilities_are_the_dtypes(self):
        dtypes = accelerator.get_device_capability()["supported_dtypes"]
        self.assertLessEqual({torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool}, dtypes)
        self.assertNotIn(torch.complex64, dtypes)

    def test_allocator_copies_and_records_streams(self):
        x = torch.arange(5.0, device=DEVICE)
        x.record_stream(torch.claystone.Stream())
        self.assertEqual(x.untyped_storage().clone().nbytes(), 20)
        self.assertEqual((x + 1).tolist(), [1, 2, 3, 4, 5])

    def test_memory_of_a_stream_is_not_reused_before_its_work_ends(self):
        stream = torch.claystone.Stream()
        x = torch.ones(1 << 20, device=DEVICE)
        with torch.claystone.stream(stream):
            stream.wait_stream(torch.claystone.default_stream())
            y = x * 2
        x.record_stream(stream)
        del x
        z = torch.zeros(1 << 20, device=DEVICE)
        torch.claystone.synchronize()
        self.assertEqual((y.sum().item(), z.sum().item()), (2.0 * (1 << 20), 0.0))


if __name__ == "__main__":
    unittest.main()
