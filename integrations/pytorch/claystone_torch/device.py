"""The module torch.claystone: the functions that PyTorch and its users expect of a device module."""

import torch

from . import _C, memory
from .graphs import *
from .index import index_of as _index
from .memory import *


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
