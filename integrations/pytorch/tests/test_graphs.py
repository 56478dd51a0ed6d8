"""Tests of graphs: captured work gives eager's values, inputs are copied in, memory is the graph's own, and errors leave a usable device."""

import copy
import threading
import unittest

import torch

import claystone_torch

DEVICE = "claystone"
OPENCL = torch.claystone.is_opencl()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)).to(DEVICE)


class Graphs(unittest.TestCase):
    def capture(self, compute, **options):
        graph = torch.claystone.Graph()
        with torch.claystone.graph(graph, **options):
            result = compute()
        return graph, result

    def test_replays_compute_on_new_inputs(self):
        model, x = network(), torch.randn(8, 16, device=DEVICE)
        with torch.no_grad():
            model(x)
            graph, y = self.capture(lambda: model(x))
            for _ in range(3):
                batch = torch.randn(8, 16)
                x.copy_(batch)
                graph.replay()
                torch.testing.assert_close(y, model(x), rtol=0, atol=0)
        self.assertGreater(graph.commands(), 0)

    def test_nothing_runs_during_the_capture(self):
        x = torch.zeros(3, device=DEVICE)
        graph, _ = self.capture(lambda: x.add_(1))
        self.assertEqual(x.tolist(), [0, 0, 0])
        graph.replay()
        graph.replay()
        self.assertEqual(x.tolist(), [2, 2, 2])

    def test_tensors_keep_their_memory_after_the_capture(self):
        x = torch.arange(4.0, device=DEVICE)
        graph, y = self.capture(lambda: torch.cumsum(x, 0))
        torch.cumsum(torch.ones(4, device=DEVICE), 0, out=x) # eager operators may otherwise give a tensor other memory
        y.zero_()
        torch.cumsum(y, 0, out=y)
        graph.replay()
        self.assertEqual(y.tolist(), [1, 3, 6, 10])

    def test_writes_with_out_inside_the_capture(self):
        x, total = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)

        def compute():
            doubled = total * 2
            torch.cumsum(x, 0, out=total)
            return doubled

        graph, doubled = self.capture(compute)
        graph.replay()
        self.assertEqual((doubled.tolist(), total.tolist()), ([0, 0, 0, 0], [1, 2, 3, 4]))
        graph.replay()
        self.assertEqual((doubled.tolist(), total.tolist()), ([2, 4, 6, 8], [1, 2, 3, 4]))

    def test_training_step_with_backward_and_optimizer(self):
        batches = [torch.randn(8, 16) for _ in range(5)]

        def train(captured):
            model = network()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
            x = torch.zeros(8, 16, device=DEVICE)

            def step():
                optimizer.zero_grad(set_to_none=False)
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            losses = []
            x.copy_(batches[0])
            step()
            if captured:
                graph, loss = self.capture(step)
            for batch in batches:
                x.copy_(batch)
                if captured:
                    graph.replay()
                else:
                    loss = step()
                losses.append(loss.item())
            return losses, [parameter.detach().cpu() for parameter in model.parameters()]

        (expected, wanted), (losses, found) = train(False), train(True)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)

    def test_recurrent_layers(self):
        lstm = torch.nn.LSTM(8, 16, 2).to(DEVICE)
        x = torch.randn(5, 3, 8, device=DEVICE)

        def step():
            lstm.zero_grad(set_to_none=False)
            loss = lstm(x)[0].square().mean()
            loss.backward()
            return loss

        step()
        graph, loss = self.capture(step)
        for _ in range(2):
            x.copy_(torch.randn(5, 3, 8))
            graph.replay()
            found = [loss.item(), lstm.weight_hh_l0.grad.cpu()]
            torch.testing.assert_close(found, [step().item(), lstm.weight_hh_l0.grad.cpu()], rtol=1e-4, atol=1e-6)

    def test_random_numbers_differ_between_replays(self):
        x = torch.ones(1000, device=DEVICE)
        graph, y = self.capture(lambda: torch.nn.functional.dropout(x, 0.5))
        torch.manual_seed(3)
        seen = []
        for _ in range(2):
            graph.replay()
            seen.append(y.cpu())
        self.assertFalse(torch.equal(*seen))
        torch.manual_seed(3)
        self.assertTrue(torch.equal(torch.nn.functional.dropout(x, 0.5).cpu(), seen[0]))

    def test_errors_in_a_capture_leave_a_usable_device(self):
        x = torch.ones(3, device=DEVICE)
        graph = torch.claystone.Graph()
        waits = [torch.claystone.synchronize] if OPENCL else [] # there is nothing to wait for on the CPU device
        for bad in (lambda: (x + 1).item(), lambda: x.cpu(), lambda: x.copy_(torch.ones(3)), lambda: 1 / 0, *waits):
            with self.assertRaises((RuntimeError, ZeroDivisionError)):
                with torch.claystone.graph(graph):
                    y = x * 2
                    bad()
            self.assertFalse(torch.claystone.is_current_stream_capturing())
            self.assertEqual((x + 1).tolist(), [2, 2, 2])
            del y
        with torch.claystone.graph(graph): # the same object captures after failures
            self.assertTrue(torch.claystone.is_current_stream_capturing())
            captured, other = torch.accelerator.current_stream(), torch.Stream()
            if hasattr(other, "is_capturing"):
                with other: # the captured stream stays the one of the capture's beginning
                    self.assertEqual((captured.is_capturing(), other.is_capturing()), (True, False))
            y = x * 2
        self.assertFalse(hasattr(other, "is_capturing") and captured.is_capturing())
        with self.assertRaisesRegex(RuntimeError, "has a capture"):
            graph.capture_begin()
        graph.replay()
        self.assertEqual(y.tolist(), [2, 2, 2])
        graph.reset()
        with self.assertRaisesRegex(RuntimeError, "no captured graph"):
            graph.replay()

    def test_memory_of_the_pool_is_kept(self):
        x = torch.ones(1 << 18, device=DEVICE)
        graph, y = self.capture(lambda: ((x + 1).cumsum(0) * 2).sum())
        reserved = torch.claystone.memory_reserved()
        torch.claystone.empty_cache()
        others = [torch.full((1 << 18,), 7.0, device=DEVICE) for _ in range(8)] # gets none of the graph's memory
        graph.replay()
        eager = ((x + 1).cumsum(0) * 2).sum()
        torch.testing.assert_close(y, eager, rtol=0, atol=0)
        self.assertTrue(all(torch.equal(other, others[0]) for other in others))
        self.assertEqual(others[0].unique().tolist(), [7.0])
        del others, graph, y, eager
        torch.claystone.empty_cache()
        self.assertLess(torch.claystone.memory_reserved(), reserved)

    def test_graphs_share_a_pool(self):
        x = torch.ones(1 << 18, device=DEVICE)
        handle = torch.claystone.graph_pool_handle()
        first, y = self.capture(lambda: (x + 1).cumsum(0).sum(), pool=handle)
        reserved = torch.claystone.memory_reserved()
        second, z = self.capture(lambda: (x + 2).cumsum(0).sum(), pool=first.pool())
        third, w = self.capture(lambda: (x + 3).cumsum(0).sum(), pool=handle)
        self.assertEqual(first.pool(), second.pool())
        if OPENCL: # graphs of the CPU device keep the memory of all intermediate results
            self.assertEqual(torch.claystone.memory_reserved(), reserved)
        for graph in (first, second, third):
            graph.replay()
        n = 1 << 18
        torch.testing.assert_close(torch.stack([y, z, w]).cpu(), torch.tensor([2.0, 3.0, 4.0]) * (n * (n + 1) / 2), rtol=1e-3, atol=0)
        pool = torch.claystone.MemPool()
        fourth, v = self.capture(lambda: x.sum(), pool=pool)
        self.assertEqual((fourth.pool(), pool.use_count()), (pool.id, 2))
        fourth.reset()
        self.assertEqual(pool.use_count(), 1)

    def test_streams(self):
        x, stream = torch.ones(1 << 16, device=DEVICE), torch.claystone.Stream()
        graph, y = self.capture(lambda: x * 3, stream=stream)
        for value in (1.0, 2.0):
            x.fill_(value) # on the default stream, which the replay on its own stream waits for
            graph.replay()
            self.assertEqual((y + 0).unique().tolist(), [3 * value])

    def test_other_threads_run_normally(self):
        x = torch.ones(4, device=DEVICE)
        seen = []

        def compute():
            thread = threading.Thread(target=lambda: seen.append((x + 1).tolist()))
            thread.start()
            thread.join()
            return x * 5

        graph, y = self.capture(compute)
        self.assertEqual(seen, [[2, 2, 2, 2]])
        graph.replay()
        self.assertEqual(y.tolist(), [5, 5, 5, 5])

    def test_graphed_callables(self):
        model = network()
        eager = copy.deepcopy(model)
        graphed = torch.claystone.make_graphed_callables(model, (torch.randn(8, 16, device=DEVICE, requires_grad=True),))
        for _ in range(3):
            a = torch.randn(8, 16, device=DEVICE, requires_grad=True)
            b = a.detach().clone().requires_grad_()
            (graphed(a).square().sum() + a.sum()).backward()
            (eager(b).square().sum() + b.sum()).backward()
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True): # summed over three backward passes
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
        first, second = torch.claystone.make_graphed_callables(
            (torch.sin, torch.exp), tuple((torch.zeros(4, device=DEVICE, requires_grad=True),) for _ in range(2)))
        x = torch.linspace(0, 1, 4, device=DEVICE, requires_grad=True)
        y = second(first(x))
        y.sum().backward()
        torch.testing.assert_close(x.grad, x.cos() * y.detach(), check_device=False)

    @unittest.skipUnless(hasattr(torch.accelerator, "Graph"), "this PyTorch has no graphs of accelerators")
    def test_graphs_of_the_accelerator(self):
        x = torch.zeros(2000, device=DEVICE)
        graph, stream = torch.accelerator.Graph(), torch.Stream()
        with stream, graph:
            x += 1
        stream.synchronize()
        self.assertEqual(x.sum().item(), 0)
        graph.replay()
        graph.replay()
        self.assertEqual(x.sum().item(), 4000)
        other = torch.accelerator.Graph(keep_graph=True, pool=graph.pool())
        other.enable_debug_mode()
        with stream, other:
            y = x * 2
        other.instantiate()
        other.replay()
        self.assertEqual((y.sum().item(), other.pool()), (8000, graph.pool()))
        other.reset()


if __name__ == "__main__":
    unittest.main()
