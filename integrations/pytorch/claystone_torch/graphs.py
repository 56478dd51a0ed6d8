"""Graphs: work that is captured once and replayed, under the names of torch.cuda's graphs."""

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import _C, host_graph

__all__ = ["Graph", "graph", "graph_pool_handle", "is_current_stream_capturing", "make_graphed_callables"]


def _pool_id(pool):
    return None if pool is None else tuple(getattr(pool, "id", pool))


def graph_pool_handle():
    """The id of a memory pool that graphs may share. The first capture with the id makes the pool."""
    return _C.reserve_pool_id()


def is_current_stream_capturing():
    """Whether this thread is capturing a graph."""
    return _C.is_capturing() or host_graph.is_capturing()


class Graph:
    """Work of the device that is captured once and replayed: `torch.cuda.CUDAGraph`. The context manager `torch.claystone.graph` is the
    usual way to capture.

    A capture records the kernels, fills and copies that this thread submits to the current stream, without running them. Tensors made
    meanwhile have no values before the first `replay()`. A replay submits the recorded commands in one call, in the order of the current
    stream, and computes on the tensors that the capture used: to change an input, write to its tensor with `copy_`. Each replay draws new
    random numbers. Memory allocated during the capture comes from a private pool, which lives as long as the graph.

    Reads of values (`item()`, `cpu()`, operators on PyTorch's CPU), copies from the host, waits, events and work on other streams raise
    RuntimeError during a capture. Backward passes run on the capturing thread.

    On claystone's CPU device, which runs work at once, a graph is a list of operators' calls. A capture also runs the calls and then
    undoes their changes, a replay takes the time of the calls, and the memory of intermediate results is kept.
    """

    def __init__(self, keep_graph=False):
        self._graph = _C.Graph() if torch.claystone.is_opencl() else host_graph.HostGraph()

    def capture_begin(self, pool=None, capture_error_mode="global"):
        """Begins a capture on the current stream. `pool` is an id from graph_pool_handle() or `pool()`, or a MemPool; graphs that share a
        pool are replayed one after another in the order of their captures. Every error mode captures this thread's work only.
        """
        self._graph.capture_begin(_pool_id(pool))

    def capture_end(self):
        """Ends the capture, on the thread that began it. Raises RuntimeError if this thread is not capturing the graph."""
        self._graph.capture_end()

    def capture_abandon(self):
        """Ends the capture without a graph: nothing has run."""
        self._graph.capture_abandon()

    def instantiate(self):
        """Does nothing: a graph is ready when its capture ends."""

    def replay(self):
        """Submits the captured work and returns without waiting. Raises RuntimeError without a capture."""
        self._graph.replay()

    def reset(self):
        """Releases the captured work and its memory, after replays in progress. Another capture may follow."""
        self._graph.reset()

    def pool(self):
        """The id of the graph's memory pool, for captures that share it."""
        return self._graph.pool()

    def commands(self):
        """The number of commands of a replay: kernels, fills and copies."""
        return self._graph.commands()

    def enable_debug_mode(self):
        """Does nothing: debug_dump always works."""

    def debug_dump(self, debug_path):
        """Writes the graph's device, number of commands and bytes of memory to a text file."""
        self._graph.debug_dump(str(debug_path))


class graph:
    """A context manager that captures the work of its block into a graph (`torch.cuda.graph`).

        graph = torch.claystone.Graph()
        with torch.claystone.graph(graph):
            y = model(x)
        x.copy_(batch)
        graph.replay()

    Run the block's work once before, so that lazily made tensors, such as the state of an optimiser, exist. `pool` is as for
    `Graph.capture_begin`, `stream` the stream to capture on, by default the current one. If the block raises an error, nothing has run and
    the graph is empty.
    """

    def __init__(self, claystone_graph, pool=None, stream=None, capture_error_mode="global"):
        self._graph, self._pool = claystone_graph, pool
        self._stream = torch.claystone.stream(stream)

    def __enter__(self):
        before = torch.claystone.current_stream()
        self._stream.__enter__()
        try:
            now = torch.claystone.current_stream()
            if now != before:
                now.wait_stream(before)
            self._graph.capture_begin(self._pool)
        except BaseException:
            self._stream.__exit__()
            raise

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self._graph.capture_end()
            else:
                self._graph.capture_abandon()
        finally:
            self._stream.__exit__()


class _Graphed:
    """The graphs of a callable's forward and backward for inputs of one shape."""

    def __init__(self, function, inputs, parameters, warmups, allow_unused, pool):
        self.parameters = parameters
        self.inputs, self.structure_in = tree_flatten(inputs)
        trained = [tensor for tensor in (*self.inputs, *parameters) if tensor.requires_grad]
        for _ in range(warmups):
            outputs = [output for output in tree_flatten(function(*inputs))[0] if output.requires_grad]
            if outputs and trained:
                torch.autograd.grad(outputs, trained, [torch.empty_like(output) for output in outputs], allow_unused=allow_unused)
        self.trained, self.allow_unused, self.gradients = trained, allow_unused, []
        self.forward, self.backward = Graph(), Graph()
        with graph(self.forward, pool):
            self.outputs, self.structure_out = tree_flatten(function(*inputs))

    def capture_backward(self, pool):
        differentiable = [output for output in self.outputs if output.requires_grad]
        self.incoming = [torch.zeros_like(output) for output in differentiable]
        if differentiable and self.trained:
            with graph(self.backward, pool):
                self.gradients = torch.autograd.grad(differentiable, self.trained, self.incoming, allow_unused=self.allow_unused)

    def __call__(self, *inputs):
        tensors, structure = tree_flatten(inputs)
        if structure != self.structure_in:
            raise ValueError("the arguments of a graphed callable have the structure of its sample arguments")
        return tree_unflatten(list(_Replay.apply(self, *tensors, *self.parameters)), self.structure_out)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graphed, *tensors):
        ctx.graphed = graphed
        for own, given in zip(graphed.inputs, tensors):
            if own.data_ptr() != given.data_ptr():
                own.detach().copy_(given)
        graphed.forward.replay()
        outputs = tuple(output.detach() for output in graphed.outputs)
        ctx.mark_non_differentiable(*(output for output, own in zip(outputs, graphed.outputs) if not own.requires_grad))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        graphed = ctx.graphed
        given = [gradient for gradient, output in zip(gradients, graphed.outputs) if output.requires_grad]
        for own, gradient in zip(graphed.incoming, given):
            own.copy_(gradient)
        graphed.backward.replay()
        found = iter(graphed.gradients)
        wanted = (*graphed.inputs, *graphed.parameters)
        # The graph's own tensors, of which `grad` becomes a copy: another tensor on the same memory could become `grad` itself.
        return None, *(next(found) if tensor.requires_grad else None for tensor in wanted)


def make_graphed_callables(callables, sample_args, num_warmup_iters=3, allow_unused_input=False, pool=None):
    """Returns versions of functions or modules whose forward and backward are replays of graphs (`torch.cuda.make_graphed_callables`).

    `callables` is one or a tuple, `sample_args` a tuple of tensors for each. Later calls take tensors of the same shapes, dtypes,
    devices and requires_grad. A module stays the same object: its forward becomes the graphed one while it is in the mode, training or
    evaluation, of the capture. Raises RuntimeError for work that cannot be captured.
    """
    single = not isinstance(callables, tuple)
    callables, sample_args = ((callables,), (sample_args,)) if single else (callables, sample_args)
    pool = graph_pool_handle() if pool is None else pool
    graphed = []
    for function, arguments in zip(callables, sample_args, strict=True):
        parameters = tuple(function.parameters()) if isinstance(function, torch.nn.Module) else ()
        graphed.append(_Graphed(function, arguments, parameters, num_warmup_iters, allow_unused_input, pool))
    for one in reversed(graphed): # the order of the replays
        one.capture_backward(pool)
    results = [
        _with_forward(function, one) if isinstance(function, torch.nn.Module) else one for function, one in zip(callables, graphed)]
    return results[0] if single else tuple(results)


def _with_forward(module, graphed):
    eager, mode = module.forward, module.training

    def forward(*arguments, **keywords):
        return graphed(*arguments) if module.training == mode and not keywords else eager(*arguments, **keywords)

    module.forward = forward
    return module
