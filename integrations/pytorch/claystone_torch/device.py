"""The module torch.claystone: the functions that PyTorch and its users expect of a device module."""

import json
import pickle

import torch

from . import _C


def _index(device):
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "claystone":
        raise ValueError(f"expected a device claystone, got {device}")
    return current_device() if device.index is None else device.index


def _device(device):
    return torch.device("claystone", _index(device))


def is_available():
    """Always true: without OpenCL, the device is claystone's CPU device."""
    return True


def is_initialized():
    return True


def _is_in_bad_fork():
    """Whether this process was forked after claystone was loaded, as DataLoader workers are. Such a process cannot use the device."""
    return _C.is_forked()


def init():
    """Does nothing: the device needs no initialisation."""


def device_count():
    """The number of OpenCL devices, or 1 for claystone's CPU device if there are none."""
    return _C.device_count()


def current_device():
    return torch.accelerator.current_device_index()


def set_device(device):
    torch.accelerator.set_device_index(_index(device))


class device:
    """A context manager that selects the current device."""

    def __init__(self, device):
        self.index = _index(device)

    def __enter__(self):
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_):
        set_device(self.before)


def get_device_name(device=None):
    return _C.device_name(_index(device))


def is_opencl(device=None):
    """Whether a device is an OpenCL device, and not claystone's CPU device."""
    return _C.is_opencl(_index(device))


def synchronize(device=None):
    """Waits until all work submitted to the device is complete; raises errors that kernels reported meanwhile."""
    _C.synchronize(_index(device))


def launch_count():
    """The number of launches of this process so far: kernels on OpenCL devices, operations on the CPU device. Copies and fills do not count."""
    return _C.launch_count()


# ---- streams and events: torch.Stream and torch.Event under their names in torch.cuda

def Stream(device=None, priority=0):
    """A torch.Stream, whose work runs in order. Each device has 32 streams of each priority, which are returned in turn.

    Priorities are hints for the driver: below 0 is more urgent, above 0 less.
    """
    return torch.Stream(device=_device(device), priority=priority)


def Event(enable_timing=False, blocking=False, interprocess=False):
    """A torch.Event: a point in a stream's work. With `enable_timing`, elapsed_time returns the milliseconds between two events."""
    return torch.Event(device="claystone", enable_timing=enable_timing)


def current_stream(device=None):
    return torch.accelerator.current_stream(_device(device))


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=current_stream().device_type)


def set_stream(stream):
    """Makes a stream and its device current for this thread; None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """A context manager that makes a stream and its device current; None changes nothing."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.device = current_device()
            self.before = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *_):
        if self.stream is not None:
            set_stream(self.before)
            set_device(self.device)


def stream(stream):
    return StreamContext(stream)


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


# ---- random numbers: all devices share one generator

def manual_seed(seed):
    _C.seed(int(seed) & 0xFFFFFFFFFFFFFFFF)


manual_seed_all = manual_seed


def seed():
    manual_seed(torch.seed())


seed_all = seed


def initial_seed():
    return _C.initial_seed()


def get_rng_state(device="claystone"):
    numbers = torch.tensor(_C.rng_state(), dtype=torch.uint64)
    return numbers.view(torch.uint8)


def set_rng_state(new_state, device="claystone"):
    _C.set_rng_state(*new_state.cpu().contiguous().view(torch.uint64).tolist())


def get_rng_state_all():
    return [get_rng_state()]


def set_rng_state_all(new_states):
    set_rng_state(new_states[0])


# ---- memory: as in torch.cuda

def memory_stats(device=None):
    """The allocator's statistics under the names of torch.cuda.memory_stats. A tensor's memory is allocated at its first use."""
    return json.loads(_C.memory_stats(_index(device)))


def memory_allocated(device=None):
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device=None):
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device=None):
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device=None):
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device=None):
    _C.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device=None):
    _C.reset_accumulated_memory_stats(_index(device))


def empty_cache():
    for index in range(device_count()):
        _C.empty_cache(index)


def set_per_process_memory_fraction(fraction, device=None):
    _C.set_memory_fraction(_index(device), fraction)


def mem_get_info(device=None):
    """Free and total bytes. OpenCL does not report free memory, so memory that this process has not reserved counts as free."""
    total = _C.device_memory(_index(device))
    return max(0, total - memory_reserved(device)), total


def memory_snapshot(device=None):
    """The allocator's segments and blocks as a list of segments, as in torch.cuda.memory_snapshot."""
    return pickle.loads(_C.memory_snapshot(_index(device), True))["segments"]


def _record_memory_history(enabled="all", max_entries=100000, stacks=False, device=None):
    _C.memory_record_history(_index(device), max_entries if enabled else 0, stacks)


class PeakMemory:
    """The most memory of a device in use within a `with` statement, in bytes: `allocated`, `reserved` and `requested`. Outer statements
    and max_memory_allocated are as without the statement.

        with torch.claystone.PeakMemory() as peak:
            loss = step()
        print(peak.allocated)
    """

    allocated = reserved = requested = None

    def __init__(self, device=None):
        self._device = device

    def __enter__(self):
        self._scope = _C.PeakScope(_index(self._device))
        return self

    def __exit__(self, *_):
        self.allocated, self.reserved, self.requested = self._scope.read()
        self._scope.end()


def _snapshot_on_oom(filename="memory.pickle", device=None):
    """Saves a snapshot with call stacks when an allocation fails for lack of memory, before the error is raised. None ends this."""
    _C.memory_snapshot_on_oom(_index(device), None if filename is None else str(filename))


def _dump_snapshot(filename="dump_snapshot.pickle", device=None):
    """Writes a snapshot for PyTorch's memory viewer, https://pytorch.org/memory_viz."""
    with open(filename, "wb") as file:
        file.write(_C.memory_snapshot(_index(device), True))
