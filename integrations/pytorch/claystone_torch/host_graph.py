"""Graphs of claystone's CPU device, which has no queue to record: calls of PyTorch's operators are recorded and repeated."""

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import _C

_of_thread = threading.local()
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


def is_capturing():
    """Whether this thread is capturing a graph of the CPU device."""
    return getattr(_of_thread, "graph", None) is not None


def _tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


def _written(func, args, kwargs):
    """The tensors that an operator writes to."""
    named = [(args[i] if i < len(args) else kwargs.get(argument.name), argument) for i, argument in enumerate(func._schema.arguments)]
    return _tensors([value for value, argument in named if argument.alias_info is not None and argument.alias_info.is_write])


class _Recorder(TorchDispatchMode):
    """Runs operators and records their calls. What they change of tensors from before is undone at the end of the capture."""

    def __init__(self):
        super().__init__()
        self.calls, self.inside, self.kept, self.before = [], set(), [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        here = [tensor for tensor in inputs if tensor.device.type == "claystone"]
        if here and any(tensor.device.type == "cpu" and tensor.dim() > 0 for tensor in inputs):
            raise RuntimeError(f"{func}: not while a graph is captured: its commands run later, when host memory may have changed")
        written = _written(func, args, kwargs)
        for tensor in written:
            address = _address(tensor)
            if address not in self.inside and address not in self.before:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                self.before[address] = whole, whole.clone()
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if here and (any(tensor.device.type == "cpu" for tensor in outputs) or isinstance(result, (bool, int, float, complex))):
            raise RuntimeError(f"{func}: not while a graph is captured: no values are computed yet that could be read")
        known = {_address(tensor) for tensor in here}
        made = [tensor.device.type == "claystone" and _address(tensor) not in known for tensor in outputs]
        self.inside.update(_address(tensor) for tensor, new in zip(outputs, made) if new)
        if written or any(made) and func not in _EMPTY:
            self.calls.append((func, args, kwargs, outputs, made))
        else:
            self.kept.append(outputs) # so that no other tensor gets their addresses during the capture
        return result


class HostGraph:
    """The methods of _C.Graph for the CPU device. Tensors that the graph computes keep their memory between replays."""

    def __init__(self):
        self._calls = self._pool = None

    def capture_begin(self, pool):
        if self._calls is not None:
            raise RuntimeError("claystone: this graph has a capture: call reset(), or make another graph")
        if is_capturing():
            raise RuntimeError("claystone: this thread is capturing a graph already")
        self._pool = _C.Pool(torch.accelerator.current_device_index(), False, False) if pool is None else _C.find_pool(pool)
        self._scope = _C.PoolScope(self._pool) # counts as a user of the pool as long as the graph has the pool
        self._scope.begin()
        self._random, self._threads = _C.rng_state(), torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False) # only this thread's calls are recorded
        self._recorder = _Recorder()
        self._recorder.__enter__()
        _of_thread.graph = self
        _C.capture_current_stream(True)

    def _end(self):
        if getattr(_of_thread, "graph", None) is not self:
            raise RuntimeError("claystone: this thread is not capturing this graph")
        _of_thread.graph = None
        _C.capture_current_stream(False)
        recorder, self._recorder = self._recorder, None
        recorder.__exit__(None, None, None)
        torch._C._set_multithreading_enabled(self._threads)
        self._scope.end()
        with torch._C._AutoDispatchBelowAutograd():
            for whole, contents in recorder.before.values():
                whole.copy_(contents)
        _C.set_rng_state(*self._random)
        return recorder.calls

    def capture_end(self):
        self._calls = self._end()

    def capture_abandon(self):
        self._end()
        self._pool = self._scope = None

    def replay(self):
        if self._calls is None:
            raise RuntimeError("claystone: there is no captured graph to replay")
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, outputs, made in self._calls:
                results = _tensors(func(*args, **kwargs))
                for tensor, result, new in zip(outputs, results, made):
                    if new:
                        _C.move_storage(tensor, result)

    def reset(self):
        self._calls = self._pool = self._scope = None

    def pool(self):
        if self._pool is None:
            raise RuntimeError("claystone: the graph has no memory pool before its capture")
        return self._pool.id()

    def commands(self):
        if self._calls is None:
            raise RuntimeError("claystone: there is no captured graph")
        return len(self._calls)

    def debug_dump(self, path):
        with open(path, "w") as file:
            file.writelines(f"{func}\n" for func, *_ in self._calls or ())
