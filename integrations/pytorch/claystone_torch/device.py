"""What is torch.claystone: the functions that PyTorch and its users expect of a device's module."""

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
    """Whether there is a device: always, as claystone's CPU device stands in where there is no OpenCL."""
    return True


def is_initialized():
    return True


def _is_in_bad_fork():
    """Whether this process was forked off one that had the device: workers of a DataLoader, for which there is none."""
    return _C.is_forked()


def init():
    """Nothing has to be initialised."""


def device_count():
    """How many devices there are: OpenCL's, or 1 where there is none."""
    return _C.device_count()


def current_device():
    return torch.accelerator.current_device_index()


def set_device(device):
    torch.accelerator.set_device_index(_index(device))


class device:
    """A context in which another device is the current one."""

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
    """Whether a device is OpenCL's; where there is none, claystone's CPU stands in."""
    return _C.is_opencl(_index(device))


def synchronize(device=None):
    """Waits until everything submitted to the device is done; raises what kernels found wrong meanwhile."""
    _C.synchronize(_index(device))


# ---- streams and events: torch.Stream and torch.Event under the names that they have in torch.cuda

def Stream(device=None, priority=0):
    """A torch.Stream: what is submitted to it runs in order. There are 32 of each priority on a device, given in turn.

    Priorities are hints for the driver: below 0 is urgent, above 0 has time.
    """
    return torch.Stream(device=_device(device), priority=priority)


def Event(enable_timing=False, blocking=False, interprocess=False):
    """A torch.Event: a point in a stream's work. With `enable_timing`, elapsed_time gives the milliseconds between two."""
    return torch.Event(device="claystone", enable_timing=enable_timing)


def current_stream(device=None):
    return torch.accelerator.current_stream(_device(device))


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=current_stream().device_type)


def set_stream(stream):
    """Makes a stream, and its device, the current one of this thread; None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """A context in which a stream, and its device, is the current one; of None nothing changes."""

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


# ---- random numbers: one generator serves all devices

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
    """The allocator's statistics under the names of torch.cuda.memory_stats. A tensor's memory is taken when it is first used."""
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
    """Free and total bytes. OpenCL does not say what is free: here it is what this process does not hold."""
    total = _C.device_memory(_index(device))
    return max(0, total - memory_reserved(device)), total


def memory_snapshot(device=None):
    """What the allocator holds, as in torch.cuda.memory_snapshot: a list of segments."""
    return pickle.loads(_C.memory_snapshot(_index(device), True))["segments"]


def _record_memory_history(enabled="all", max_entries=100000, stacks=False, device=None):
    _C.memory_record_history(_index(device), max_entries if enabled else 0, stacks)


def _dump_snapshot(filename="dump_snapshot.pickle", device=None):
    """Writes a snapshot for PyTorch's memory viewer, https://pytorch.org/memory_viz."""
    with open(filename, "wb") as file:
        file.write(_C.memory_snapshot(_index(device), True))
