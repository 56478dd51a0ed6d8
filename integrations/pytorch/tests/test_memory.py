"""Tests of memory statistics, snapshots in PyTorch's own reader, constant memory use over many steps, and device errors."""

import contextlib
import json
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

import torch
from torch.cuda import _memory_viz as viewer
from torch.profiler import ProfilerActivity, profile

import claystone_torch

DEVICE = "claystone"


class Program:
    """A network and its training step."""

    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.x = torch.randn(16, 32, device=DEVICE)

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()


def resident():
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# Trains a network for two steps in a process of its own. Prints the report of a dry run, or the real run's peaks, as JSON.
TRAINING = """
import contextlib, json, sys, torch, claystone_torch

with claystone_torch.dry_run(1 << 24) if sys.argv[1] == "dry" else contextlib.nullcontext() as run:
    model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 8)).to("claystone")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if run:
        run.watch(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 1000, device="claystone")).square().mean()
        loss.backward()
        optimizer.step()
    value = loss.item()
if run:
    assert value == 0 and "does not fit in 16.00 MiB" in str(run), run
    assert torch.ones(3, device="claystone").sum().item() == 3, "memory is real again"
    try:
        claystone_torch.dry_run().__enter__()
    except RuntimeError as error:
        assert "begins before the first" in str(error), error
    print(json.dumps(run.report))
else:
    stats = torch.claystone.memory_stats()
    print(json.dumps([stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]))
"""


def trained(how):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TRAINING, how], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)


class Memory(unittest.TestCase):
    def test_dry_runs_report_the_peaks_of_a_real_run(self):
        report = trained("dry")
        [device] = report["devices"]
        self.assertEqual([device["peak_allocated"], device["peak_reserved"]], trained("real"))
        self.assertFalse(device["fits"])
        self.assertTrue(device["peak_requested"] <= device["smallest_device"] <= device["peak_reserved"])
        self.assertIn("item", {assumed["what"] for assumed in report["assumed"]})
        roles, parameters = device["roles"], 4 * (1000 * 2000 + 2000 + 2000 * 8 + 8)
        self.assertEqual(sum(roles.values()), device["peak_allocated"])
        for role, copies in [("Parameter", 1), ("OptimizerState", 2)]:
            self.assertTrue(copies * parameters <= roles[role] < copies * (parameters + 4 * 512 + 512), (role, roles))
        # At the peak, the large weight has a gradient.
        self.assertTrue(4 * 1000 * 2000 <= roles["Gradient"] < parameters + 4 * 512, roles)

    def test_statistics(self):
        torch.claystone.synchronize()
        before = torch.claystone.memory_allocated()
        x = torch.zeros(1 << 20, device=DEVICE)
        self.assertGreaterEqual(torch.claystone.memory_allocated() - before, 4 << 20)
        self.assertGreaterEqual(torch.claystone.max_memory_allocated(), torch.claystone.memory_allocated())
        del x
        self.assertEqual(torch.claystone.memory_allocated(), before)
        torch.claystone.empty_cache()
        free, total = torch.claystone.mem_get_info()
        self.assertTrue(0 < free <= total)

    def test_nested_statistics_and_summary(self):
        stats, nested = torch.claystone.memory_stats(), torch.claystone.memory_stats_as_nested_dict()
        self.assertEqual(nested["reserved_bytes"]["large_pool"]["peak"], stats["reserved_bytes.large_pool.peak"])
        self.assertEqual(nested["num_ooms"], stats["num_ooms"])
        text, short = torch.claystone.memory_summary(), torch.claystone.memory_summary(DEVICE, abbreviated=True)
        self.assertIn("small pool", text)
        self.assertNotIn("small pool", short)
        self.assertEqual(len({len(line) for line in text.splitlines()[:-1]}), 1, "the columns are aligned")

    def test_pinned_memory(self):
        host = torch.ones(1 << 20).pin_memory()
        x = host.to(DEVICE, non_blocking=True)
        torch.claystone.synchronize()
        stats, nested = torch.claystone.host_memory_stats(), torch.claystone.host_memory_stats_as_nested_dict()
        self.assertEqual(nested["host_alloc_time"]["avg"], stats["host_alloc_time.avg"])
        self.assertLessEqual(stats["active_bytes.current"], stats["allocated_bytes.current"])
        self.assertEqual(stats["allocations.current"], stats["num_host_alloc"] - stats["num_host_free"])
        torch.claystone.empty_host_cache()
        torch.claystone.reset_peak_host_memory_stats()
        torch.claystone.reset_accumulated_host_memory_stats()
        stats = torch.claystone.host_memory_stats()
        self.assertEqual((stats["active_bytes.peak"], stats["num_host_alloc"]), (stats["active_bytes.current"], 0))
        self.assertEqual(x.sum().item(), host.sum().item())

    def test_limits(self):
        self.assertEqual(torch.claystone.get_per_process_memory_fraction(), 1.0)
        torch.claystone.set_per_process_memory_fraction(0.5)
        self.assertEqual(torch.claystone.get_per_process_memory_fraction(0), 0.5)
        torch.claystone.set_per_process_memory_fraction(1.0)
        with self.assertRaises(TypeError):
            torch.claystone.set_per_process_memory_fraction(1)
        with self.assertRaises(ValueError):
            torch.claystone.set_per_process_memory_fraction(1.5)

    def test_observers_of_failed_allocations(self):
        seen = []
        torch.claystone.attach_out_of_memory_observer(lambda *event: seen.append(event))
        total = torch.claystone.mem_get_info()[1]
        with self.assertRaises(torch.OutOfMemoryError):
            torch.zeros(64 * total, dtype=torch.uint8, device=DEVICE)
        torch.claystone.empty_cache()
        torch.claystone.set_per_process_memory_fraction(1e-9)
        with self.assertRaises(torch.OutOfMemoryError):
            torch.ones(1 << 24, device=DEVICE)
        torch.claystone.set_per_process_memory_fraction(1.0)
        index, requested, allowed, free = seen[-1]
        self.assertEqual((index, requested), (0, 4 << 24))
        self.assertTrue(allowed < requested and free <= total)

    def test_observers_may_use_the_tensor_whose_allocation_failed(self):
        x = torch.empty(64 * torch.claystone.mem_get_info()[1], dtype=torch.uint8, device=DEVICE) # takes no memory yet
        seen = []

        def observe(*event):
            try:
                print(x)
            except torch.OutOfMemoryError as error:
                seen.append(error)

        torch.claystone.attach_out_of_memory_observer(observe)
        with self.assertRaises(torch.OutOfMemoryError):
            x + 1
        self.assertEqual(len(seen), 1)

    def test_private_pools(self):
        torch.claystone.empty_cache()
        pool = torch.claystone.MemPool()
        self.assertEqual((pool.use_count(), pool.snapshot()), (1, []))
        with torch.claystone.use_mem_pool(pool):
            self.assertEqual(pool.use_count(), 2)
            inside = torch.full((1 << 18,), 2.0, device=DEVICE) + 1
        outside = torch.ones(1 << 18, device=DEVICE)
        segments, stats = pool.snapshot(), pool.stats()
        self.assertEqual({segment["segment_pool_id"] for segment in segments}, {pool.id})
        states = [block["state"] for segment in segments for block in segment["blocks"]]
        self.assertEqual((states.count("active_allocated"), stats["allocations"]), (1, 1))
        self.assertEqual((len(segments), sum(segment["total_size"] for segment in segments)), (stats["segments"], stats["reserved_bytes"]))
        self.assertEqual(torch.claystone.memory_snapshot((0, 1 << 40)), [])
        self.assertEqual(pool.use_count(), 1)
        if hasattr(torch.accelerator, "memory_stats"):
            self.assertGreaterEqual(torch.accelerator.memory_reserved(), stats["reserved_bytes"])
        torch.claystone.empty_cache() # keeps the memory in use, and free memory of the pool
        self.assertEqual(pool.stats()["segments"], len(segments))
        self.assertEqual((inside.sum().item(), outside.sum().item()), (3 << 18, 1 << 18))
        del inside
        pool.empty_cache()
        self.assertEqual(pool.stats()["segments"], 0)
        with self.assertRaises(TypeError):
            torch.claystone.MemPool(allocator=object())

    def test_options_of_private_pools(self):
        pool = torch.claystone.MemPool(no_split=True)
        with torch.claystone.use_mem_pool(pool, DEVICE):
            kept = [torch.ones(100, device=DEVICE) for _ in range(3)]
        self.assertEqual((pool.stats()["segments"], pool.stats()["allocations"]), (3, 3))
        spare = torch.claystone.MemPool(use_on_oom=True)
        with torch.claystone.use_mem_pool(spare):
            torch.ones(1 << 22, device=DEVICE)
        torch.claystone.empty_cache()
        reserved, total = torch.claystone.memory_reserved(), torch.claystone.mem_get_info()[1]
        torch.claystone.set_per_process_memory_fraction((reserved + (1 << 20)) / total)
        x = torch.ones(1 << 22, device=DEVICE) # only the pool has room
        self.assertEqual(spare.stats()["allocations"], 1)
        torch.claystone.set_per_process_memory_fraction(1.0)
        del x, kept

    def test_history_of_pinned_memory(self):
        torch.claystone._record_memory_history(record_pinned_host_memory=True, record_cuda=False, max_entries=3, clear_history=True)
        kept = torch.ones(5000).pin_memory()
        torch.ones(100).pin_memory()
        torch.ones(100).pin_memory()
        snapshot = torch.claystone._snapshot()
        torch.claystone._record_memory_history(None)
        self.assertEqual([entry["action"] for entry in snapshot["host_traces"]],
                         ["free_requested", "free_completed", "alloc", "free_requested", "free_completed"])
        self.assertEqual(snapshot["device_traces"][0], [])
        self.assertIn((kept.data_ptr(), 20000), [(segment["address"], segment["total_size"]) for segment in snapshot["host_segments"]])
        self.assertEqual(torch.claystone._snapshot()["host_traces"], [])

    def test_another_allocator(self):
        source = """
            #include <stdlib.h>
            static long pieces;
            void *allocate(ssize_t nbytes, int device, void *stream) { pieces++; return stream || device ? 0 : malloc(nbytes); }
            void release(void *memory, ssize_t nbytes, int device, void *stream) { pieces--; free(memory); }
            long count(void) { return pieces; }
        """
        program = """
            import ctypes, sys, torch, claystone_torch
            before = torch.ones(1 << 18, device="claystone")
            memory = torch.claystone.memory
            memory.change_current_allocator(memory.CUDAPluggableAllocator(sys.argv[1], "allocate", "release"))
            count = ctypes.CDLL(sys.argv[1]).count
            after = torch.full((1 << 18,), 2.0, device="claystone")
            assert count() == torch.claystone.memory_stats()["segment.all.current"] >= 1
            assert (before + after).sum().item() == 3 << 18
            del after
            torch.claystone.empty_cache()
            assert count() == 0, count()
        """
        with tempfile.TemporaryDirectory() as folder:
            file, library = Path(folder) / "allocator.c", Path(folder) / "allocator.so"
            file.write_text(source)
            subprocess.run(["gcc", "-shared", "-fPIC", "-include", "sys/types.h", "-o", library, file], check=True)
            if torch.claystone.is_opencl():
                with self.assertRaisesRegex(RuntimeError, "cl_mem"):
                    torch.claystone.change_current_allocator(torch.claystone.PluggableAllocator(str(library), "allocate", "release"))
            else:
                subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(library)], check=True)

    def test_caching_is_disabled(self):
        torch.claystone.empty_cache()
        with torch.claystone.caching_allocator_disabled():
            self.assertEqual(torch.claystone.get_allocator_backend(), "direct")
            x = torch.ones(1 << 18, device=DEVICE)
            self.assertEqual(torch.claystone.memory_stats()["segment.all.current"], 1)
            self.assertEqual(x.sum().item(), 1 << 18)
            del x
            torch.claystone.synchronize()
            self.assertEqual(torch.claystone.memory_reserved(), 0)
        self.assertEqual(torch.claystone.get_allocator_backend(), "native")
        self.assertEqual(torch.ones(3, device=DEVICE).sum().item(), 3)

    def test_keys_of_the_configuration(self):
        # The keys that PyTorch's headers declare, of which some are written in parts.
        keys = {"large_segment_size_mb", "max_split_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold",
                "roundup_power2_divisions", "expandable_segments", "pinned_use_background_threads"}
        headers = Path(torch.__file__).parent / "include/c10"
        common = (headers / "core/AllocatorConfig.h").read_text()
        keys |= {"pinned_" + name + "_mb" for name in re.findall(r"// Parse `(max_\w+)` from environment", common) if not name.endswith("_mb")}
        self.assertLessEqual(set(re.findall(r"// Parse `(\w+)` from environment", common)),
                             keys | {key.removeprefix("pinned_").removesuffix("_mb") for key in keys})
        cuda = headers / "cuda/CUDAAllocatorConfig.h"
        if cuda.exists():
            declared = re.search(r"unordered_set<std::string> keys\{(.*?)\};", cuda.read_text(), re.DOTALL)[1]
            declared = re.sub(r"//[^\n]*", "", declared)
            keys |= set(re.findall(r'"(\w+)"', re.sub(r'"\s*"', "", declared)))
        for key in keys:
            with self.assertRaises(RuntimeError) as caught:
                claystone_torch._C.check_alloc_conf(f"{key}:no value of this key")
            self.assertRegex(str(caught.exception), f"{key} (cannot be|has no meaning here, as)", key)
        claystone_torch._C.check_alloc_conf("pinned_max_cached_size_mb:64,max_split_size_mb:unlimited")
        with self.assertRaisesRegex(RuntimeError, "unknown key"):
            claystone_torch._C.check_alloc_conf("no_such_key:1")

    def test_the_readme_lists_the_names_of_cuda(self):
        readme = (Path(__file__).parents[1] / "README.md").read_text()
        table = readme.split("| name in `torch.cuda.memory` |")[1].split("\n\n")[0]
        rows = {}
        for line in table.splitlines()[2:]:
            names, has, why = (cell.strip() for cell in line.strip("|").split("|"))
            self.assertTrue(has in ("has", "has not") and why, line)
            rows |= {name: has for name in re.findall(r"`(\w+)`", names)}
        import torch.cuda.memory as cuda
        known = set(cuda.__all__) if torch.__version__ >= "2.15" else set(cuda.__all__) & set(rows)
        self.assertEqual(set(rows) & set(cuda.__all__), known)
        self.assertEqual({name: has for name, has in rows.items() if (has == "has") != hasattr(torch.claystone, name)}, {})

    def test_out_of_memory(self):
        total = torch.claystone.mem_get_info()[1]
        with self.assertRaises(torch.OutOfMemoryError):
            torch.zeros(64 * total, dtype=torch.uint8, device=DEVICE)

    def test_memory_does_not_grow_over_steps(self):
        program = Program()
        seen = []
        for i in range(1, 1001):
            program.step()
            if i in (200, 1000):
                torch.claystone.synchronize()
                seen.append((torch.claystone.memory_allocated(), torch.claystone.memory_reserved(), resident()))
        self.assertEqual(seen[0][0], seen[1][0])
        # The backward thread and this thread both allocate. When they first do so at the same time, a small segment is added.
        self.assertLess(seen[1][1] - seen[0][1], 1 << 16)
        # Steps leak nothing, but Python and the driver may need some pages.
        self.assertLess(seen[1][2] - seen[0][2], 1 << 20)

    def test_snapshots_are_read_by_pytorch(self):
        torch.claystone._record_memory_history(clear_history=True, skip_actions=["free_requested"])
        program = Program()
        torch.claystone._set_memory_metadata({"phase": "train"})
        for _ in range(3):
            program.step()
        self.assertEqual(torch.claystone._get_memory_metadata(), '{"phase":"train"}')
        torch.claystone._set_memory_metadata("")
        kept = torch.ones(7, device=DEVICE)
        segments = torch.claystone.memory_snapshot(include_traces=False)
        self.assertTrue(any(block["state"] == "active_allocated" for segment in segments for block in segment["blocks"]))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot.pickle"
            torch.claystone._dump_snapshot(path)
            snapshot = pickle.loads(path.read_bytes())
        self.assertEqual([entry for trace in torch.claystone._snapshot(include_traces=False)["device_traces"] for entry in trace], [])
        torch.claystone._record_memory_history(None)
        entries = snapshot["device_traces"][0]
        self.assertEqual({entry["action"] for entry in entries} & {"alloc", "free_requested", "free_completed"}, {"alloc", "free_completed"})
        phases = [entry["user_metadata"] for entry in entries if entry["action"] == "alloc"]
        self.assertEqual((phases[0], phases[-1]), ("", ""))
        self.assertIn('{"phase":"train"}', phases)
        self.assertEqual(torch.claystone._snapshot()["device_traces"][0], [])
        self.assertEqual(kept.numel(), 7)
        with self.assertRaises(ValueError):
            torch.claystone._record_memory_history(stacks="c")
        self.assertIn("aten::linear", {annotation["name"] for annotation in snapshot["external_annotations"]})
        self.assertIn("total_allocated", viewer.segsum(snapshot)) # asserts that every segment's bytes add up
        self.assertIn("entries", viewer.trace(snapshot))
        self.assertIn("<script", viewer.trace_plot(snapshot))
        self.assertIn("<script", viewer.segment_plot(snapshot))

    def test_peak_of_a_scope(self):
        with torch.claystone.PeakMemory() as outer:
            kept = torch.ones(1 << 18, device="claystone")
            with torch.claystone.PeakMemory() as inner:
                pass
            (torch.ones(1 << 20, device="claystone") + 1).sum().item()
        self.assertGreaterEqual(outer.requested - inner.requested, 8 << 20)
        self.assertLessEqual(outer.allocated, outer.reserved)
        self.assertGreaterEqual(torch.claystone.max_memory_allocated(), outer.allocated)
        del kept

    def test_snapshot_when_memory_runs_out(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot.pickle"
            torch.claystone._snapshot_on_oom(path)
            torch.claystone.empty_cache()
            torch.claystone.set_per_process_memory_fraction(1e-9)
            with self.assertRaises(torch.OutOfMemoryError):
                torch.ones(1 << 24, device="claystone")
            torch.claystone.set_per_process_memory_fraction(1.0)
            torch.claystone._snapshot_on_oom(None)
            torch.claystone._record_memory_history(None)
            snapshot = pickle.loads(path.read_bytes())
        self.assertIn("oom", {entry["action"] for trace in snapshot["device_traces"] for entry in trace})

    def test_memory_profile(self):
        program = Program()
        program.step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1], profile_memory=True,
                     record_shapes=True, with_stack=True) as found:
            program.step()
            kept = torch.zeros(1 << 18, device=DEVICE)
        averages = {average.key: average for average in found.key_averages()}
        self.assertGreater(averages["aten::linear"].device_memory_usage, 0)
        self.assertEqual(averages["aten::zeros"].device_memory_usage, 4 << 18)
        self.assertIn("<script", viewer.profile_plot(found))
        del kept


class Errors(unittest.TestCase):
    def test_errors_of_the_device_name_the_operator(self):
        x, i = torch.arange(5.0, device=DEVICE), torch.tensor([1, 7], device=DEVICE)
        for name, operator in {"index_select": lambda: torch.index_select(x, 0, i), "gather": lambda: torch.gather(x, 0, i),
                               "embedding": lambda: torch.nn.functional.embedding(i, x.view(5, 1))}.items():
            with self.assertRaises((IndexError, RuntimeError)) as caught:
                operator().cpu() # the operator is enqueued first; the copy then reports its error
            if torch.claystone.is_opencl():
                self.assertIn(f"{name}: index 7 is out of range", str(caught.exception))
        # An error is reported once, and later operators work.
        self.assertEqual((x + 1).tolist(), [1, 2, 3, 4, 5])

    def test_errors_surface_at_the_next_wait(self):
        x, i = torch.arange(5.0, device=DEVICE), torch.tensor([9], device=DEVICE)
        if torch.claystone.is_opencl():
            y = torch.index_select(x, 0, i)
            with self.assertRaisesRegex(IndexError, "index_select"):
                torch.claystone.synchronize()
            torch.claystone.synchronize()
            del y

    def test_operators_that_read_report_earlier_errors(self):
        x, i, mask = torch.arange(5.0, device=DEVICE), torch.tensor([9], device=DEVICE), torch.tensor([True], device=DEVICE)
        if torch.claystone.is_opencl():
            y = torch.index_select(x, 0, i)
            with self.assertRaisesRegex(IndexError, "index_select"):
                y[mask] # reads the number of true elements; the CPU must not repeat the call
            self.assertEqual(y[mask].numel(), 1)

    def test_errors_of_backward_are_reported_to_the_waiting_thread(self):
        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return torch.index_select(grad, 0, torch.tensor([9, 9], device=DEVICE))

        if torch.claystone.is_opencl():
            x = torch.ones(2, device=DEVICE, requires_grad=True)
            Bad.apply(x).sum().backward()
            with self.assertRaisesRegex(IndexError, "index_select"):
                torch.claystone.synchronize()
            torch.claystone.synchronize()

    def test_save_on_cpu(self):
        def run(context):
            torch.manual_seed(0)
            weights = [torch.randn(64, 64).to(DEVICE).requires_grad_() for _ in range(4)]
            x = torch.randn(1024, 64).to(DEVICE)
            torch.claystone.synchronize()
            before = torch.claystone.memory_allocated()
            with context:
                for weight in weights:
                    x = (x @ weight).sin()
                loss = x.square().mean()
            del x
            torch.claystone.synchronize()
            kept = torch.claystone.memory_allocated() - before
            loss.backward()
            return kept, [weight.grad.cpu() for weight in weights]

        kept, expected = run(contextlib.nullcontext())
        for pin_memory in (False, True):
            less, found = run(torch.autograd.graph.save_on_cpu(pin_memory=pin_memory))
            self.assertLess(less, kept / 4)
            for a, b in zip(expected, found, strict=True):
                torch.testing.assert_close(b, a)


if __name__ == "__main__":
    unittest.main()
