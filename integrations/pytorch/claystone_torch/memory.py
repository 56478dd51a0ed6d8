"""Memory of the device, under the names of torch.cuda.memory. Sizes are bytes. A `device` argument is an index, a torch.device or None for
the current device; RuntimeError if there is no such device. A tensor's memory is allocated at its first use."""

import contextlib
import ctypes
import json
import pickle
import threading

import torch
from torch._utils import _augment_memory_snapshot_stack_traces

from . import _C
from .index import index_of

__all__ = [
    "CUDAPluggableAllocator", "MemPool", "PeakMemory", "PluggableAllocator", "attach_out_of_memory_observer", "caching_allocator_disabled",
    "caching_allocator_enable", "change_current_allocator", "empty_cache", "empty_host_cache", "get_allocator_backend", "get_per_process_memory_fraction", "host_memory_stats", "host_memory_stats_as_nested_dict",
    "max_memory_allocated", "max_memory_cached", "max_memory_reserved", "mem_get_info", "memory_allocated", "memory_cached",
    "memory_reserved", "memory_snapshot", "memory_stats", "memory_stats_as_nested_dict", "memory_summary",
    "reset_accumulated_host_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_peak_host_memory_stats", "reset_peak_memory_stats", "set_per_process_memory_fraction", "use_mem_pool", "_dump_snapshot",
    "_get_memory_metadata", "_record_memory_history", "_set_memory_metadata", "_snapshot", "_snapshot_on_oom",
]


# ---- statistics

def memory_stats(device=None):
    """The allocator's statistics under the names of torch.cuda.memory_stats, such as "allocated_bytes.all.current"."""
    return _C.memory_stats(index_of(device))


def memory_stats_as_nested_dict(device=None):
    """memory_stats as dicts of dicts, such as stats["allocated_bytes"]["all"]["current"]."""
    return _nested(memory_stats(device))


def _nested(flat):
    result = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        place = result
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return result


def memory_allocated(device=None):
    """The bytes of memory in use by tensors."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device=None):
    """The most bytes in use by tensors since the start or reset_peak_memory_stats()."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device=None):
    """The bytes that the allocator holds from the driver."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device=None):
    """The most bytes held from the driver since the start or reset_peak_memory_stats()."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device=None):
    """Sets every peak to the current value."""
    _C.reset_peak_memory_stats(index_of(device))


def reset_accumulated_memory_stats(device=None):
    """Sets the sums and counts, such as "allocated_bytes.all.allocated" and "num_ooms", to zero."""
    _C.reset_accumulated_memory_stats(index_of(device))


# Deprecated names of torch.cuda.
memory_cached, max_memory_cached = memory_reserved, max_memory_reserved
reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def mem_get_info(device=None):
    """Free and total bytes. OpenCL does not report free memory, so memory that this process has not reserved counts as free."""
    return _C.memory_info(index_of(device))


def memory_summary(device=None, abbreviated=False):
    """A table of the statistics as text. With `abbreviated`, without the rows of the pools of small and of large requests."""
    index = index_of(device)
    stats = memory_stats(index)
    rows = [[f"claystone:{index}", "current", "peak", "allocated", "freed"]]

    def add(title, name, show):
        rows.append([title, *(show(stats[f"{name}.{value}"]) for value in ("current", "peak", "allocated", "freed"))])

    pools = ["all"] if abbreviated else ["all", "large_pool", "small_pool"]
    for name in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes", "allocation", "active",
                 "segment", "inactive_split"):
        for pool in pools:
            title = name.replace("_", " ") if pool == "all" else "  " + pool.replace("_", " ")
            add(title, f"{name}.{pool}", _size if "bytes" in name else str)
    for name in ("oversize_allocations", "oversize_segments"):
        add(name.replace("_", " "), name, str)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [" | ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]) for row in rows]
    lines.insert(1, "-+-".join("-" * width for width in widths))
    lines.append(f"out of memory: {stats['num_ooms']}, retries after releasing memory: {stats['num_alloc_retries']}")
    return "\n".join(lines) + "\n"


def _size(nbytes):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 10000:
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return f"{nbytes} TiB"


# ---- pinned host memory: one sum for all devices

def host_memory_stats():
    """The statistics of pinned memory under the names of torch.cuda.host_memory_stats, times in microseconds. All zeros for devices that
    share the host's memory and need no pinned memory."""
    return _C.pinned_memory_stats()


def host_memory_stats_as_nested_dict():
    """host_memory_stats as dicts of dicts."""
    return _nested(host_memory_stats())


def reset_peak_host_memory_stats():
    """Sets the peaks of host_memory_stats to the current values."""
    _C.reset_peak_pinned_memory_stats()


def reset_accumulated_host_memory_stats():
    """Sets the sums, times and counts of host_memory_stats to zero."""
    _C.reset_accumulated_pinned_memory_stats()


def empty_host_cache():
    """Returns pinned memory that nothing uses to the driver."""
    _C.empty_pinned_cache()


# ---- the allocator

def empty_cache():
    """Returns the unused segments of all devices to the driver, except those of private pools."""
    for index in range(_C.device_count()):
        _C.empty_cache(index)


_fractions = {}


def set_per_process_memory_fraction(fraction, device=None):
    """Limits the allocator to a fraction, 0 to 1, of the device's memory. Memory already reserved is kept. TypeError unless `fraction` is
    a float, ValueError if the fraction is out of range."""
    if not isinstance(fraction, float):
        raise TypeError("the fraction of the memory is a float")
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction of the memory is between 0 and 1, not {fraction}")
    index = index_of(device)
    _C.set_memory_fraction(index, fraction)
    _fractions[index] = fraction


def get_per_process_memory_fraction(device=None):
    """The fraction of the device's memory that the allocator may use: as set here or in CLAYSTONE_ALLOC_CONF, else 1."""
    index = index_of(device)
    return _fractions.get(index, float(_settings(index).get("per_process_memory_fraction", 1.0)))


def _settings(index):
    return pickle.loads(_C.memory_snapshot(index, True))["allocator_settings"]


def get_allocator_backend():
    """The allocator's kind by `backend` in CLAYSTONE_ALLOC_CONF: "native" (claystone's caching allocator), "pool" or "direct"."""
    backend = _settings(index_of(None)).get("backend", "caching")
    return "native" if backend == "caching" else backend


_caching = True


def caching_allocator_enable(value=True):
    """Enables or disables the caching of freed memory on all devices. While caching is disabled, each allocation is one of the driver's,
    and statistics, limits and pools are those of that allocator."""
    global _caching
    _caching = bool(value)
    for index in range(_C.device_count()):
        _C.enable_caching(index, _caching)


@contextlib.contextmanager
def caching_allocator_disabled():
    """A context manager that disables the caching of freed memory."""
    before = _caching
    caching_allocator_enable(False)
    try:
        yield
    finally:
        caching_allocator_enable(before)


class PluggableAllocator:
    """An allocator for `change_current_allocator`: two functions of a shared library, with the types that
    `torch.cuda.memory.CUDAPluggableAllocator` documents. The stream that they get is null. OSError without such a library,
    AttributeError without such functions.
    """

    def __init__(self, path_to_so_file, alloc_fn_name, free_fn_name):
        self._library = ctypes.CDLL(path_to_so_file)
        self._functions = [ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value for name in (alloc_fn_name, free_fn_name)]


CUDAPluggableAllocator = PluggableAllocator


def change_current_allocator(allocator):
    """Takes the memory of claystone's CPU device from a PluggableAllocator from now on. Its memory is cached and divided as configured,
    and memory in use stays with the earlier allocator. RuntimeError on OpenCL devices, whose memory has no addresses."""
    _allocators.append(allocator) # the library stays loaded
    _C.set_allocator(index_of(None), *allocator._functions)


_allocators = []


def attach_out_of_memory_observer(observer):
    """Calls `observer(device, requested, allowed, free)` when an allocation fails, before torch.OutOfMemoryError is raised: the device's
    index, and bytes. Observers stay as long as the process. The allocating thread calls them; errors they raise are printed."""
    for index in range(_C.device_count()):
        _C.attach_oom_observer(index, observer)


# ---- private pools

class MemPool:
    """A private pool of the current device's memory: its memory serves only allocations inside `use_mem_pool` with the pool and captures
    of graphs into the pool. When nothing refers to the pool any more, its memory joins the device's; tensors in it stay valid.

    With `use_on_oom`, allocations outside take the pool's free memory before they fail. With `no_split`, every allocation gets a segment
    of its own. TypeError for an `allocator`: all pools of a device have its allocator.
    """

    def __init__(self, allocator=None, use_on_oom=False, no_split=False):
        if allocator is not None:
            raise TypeError("a pool has the allocator of its device: see change_current_allocator")
        self.device = index_of(None)
        self._pool = _C.Pool(self.device, use_on_oom, no_split)

    @property
    def id(self):
        """The pool's id, as in the snapshots' "segment_pool_id"."""
        return self._pool.id()

    def use_count(self):
        """The number of users of the pool: 1 for this object, and 1 for each graph and each `use_mem_pool` in progress."""
        return self._pool.use_count()

    def stats(self):
        """The pool's memory as a dict: segments, reserved_bytes, allocations, allocated_bytes and active_bytes."""
        return self._pool.stats()

    def empty_cache(self):
        """Returns the pool's unused segments to the driver."""
        self._pool.empty_cache()

    def snapshot(self, include_traces=True):
        """The pool's segments and blocks as a list, as memory_snapshot returns them."""
        return memory_snapshot(self.id, include_traces)


@contextlib.contextmanager
def use_mem_pool(pool, device=None):
    """A context manager in which this thread's allocations on the pool's device come from the pool. Backward passes allocate on another
    thread and are not affected. ValueError if `device` is not the pool's."""
    if device is not None and index_of(device) != pool.device:
        raise ValueError(f"the pool belongs to claystone:{pool.device}")
    scope = _C.PoolScope(pool._pool)
    scope.begin()
    try:
        yield
    finally:
        scope.end()


# ---- histories and snapshots

_skipped = frozenset()
_metadata = set()
_of_thread = threading.local()


def _record_memory_history(enabled="all", context="all", stacks="python", max_entries=100000, device=None, clear_history=False,
                           compile_context=False, global_record_annotations=False, skip_actions=None, record_pinned_host_memory=False,
                           record_cuda=True):
    """Starts to record the allocator's events for snapshots, or stops with `enabled` None.

    `enabled` is "state" for the origin of live memory, or "all" for the latest `max_entries` events too. `context` says which entries have
    an origin: None, "state" (live memory), "alloc" (also events that allocate) or "all". An origin is the names of PyTorch's operators and,
    with stacks="all", frames of native code. `clear_history` discards earlier events; stopping does too. Snapshots leave out the
    events in `skip_actions`. `device` is the device to record, by default all; record_cuda=False records none.
    `record_pinned_host_memory` records the memory that pin_memory() allocates, without origins. Names of operators and annotations are
    always recorded, whatever `compile_context` and `global_record_annotations` say. ValueError for another value of an argument.
    """
    global _skipped
    recordings, contexts = {None: 0, False: 0, "state": 1, "all": 2, True: 2}, {None: 0, "state": 1, "alloc": 2, "all": 3}
    if enabled not in recordings or context not in contexts or stacks not in ("python", "all"):
        raise ValueError(f"cannot record with enabled={enabled!r}, context={context!r}, stacks={stacks!r}")
    recording = recordings[enabled] if record_cuda else 0
    _skipped = frozenset(skip_actions or ())
    for index in range(_C.device_count()) if device is None else [index_of(device)]:
        _C.memory_record_history(
            index, recording, contexts[context], stacks == "all", clear_history or recording == 0, min(max_entries, 1 << 24))
    pinned = recordings[enabled] if record_pinned_host_memory else 0
    _C.record_pinned_history(max_entries if pinned == 2 else pinned, clear_history or pinned == 0)


def _set_memory_metadata(metadata):
    """Sets a text, or a dict that becomes JSON, which this thread's later events carry as "user_metadata" in snapshots; "" removes it.
    Texts are kept until the process ends."""
    text = json.dumps(metadata, separators=(",", ":")) if isinstance(metadata, dict) else metadata
    _C.memory_set_context(text)
    _of_thread.metadata = text
    if text:
        _metadata.add(text)


def _get_memory_metadata():
    """The text that _set_memory_metadata set on this thread, or ""."""
    return getattr(_of_thread, "metadata", "")


def _with_metadata(entry):
    names = entry["compile_context"]
    outer = max((text for text in _metadata if names == text or names.startswith(text + "/")), key=len, default="")
    rest = names[len(outer):].lstrip("/") if outer else names
    return {**entry, "user_metadata": outer, "compile_context": rest or "N/A"}


def _host_segment(address, nbytes):
    block = {"address": address, "size": nbytes, "requested_size": nbytes, "state": "active_allocated", "frames": []}
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), nbytes)
    return {"device": -1, "address": address, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
            "frames": [], "blocks": [block], **sizes}


def _host_entries(allocates, address, nbytes, time_us):
    actions = ("alloc",) if allocates else ("free_requested", "free_completed")
    return [{"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time_us, "frames": [], "compile_context": "N/A",
             "user_metadata": ""} for action in actions if action not in _skipped]


def _snapshot(device=None, augment_with_fx_traces=False, include_traces=True):
    """The segments, blocks and recorded events of all devices, or of one, as the dict of torch.cuda.memory._snapshot()."""
    result = {}
    for index in range(_C.device_count()) if device is None else [index_of(device)]:
        one = pickle.loads(_C.memory_snapshot(index, True))
        traces = one.pop("device_traces")
        entries = [_with_metadata(entry) for trace in traces for entry in trace if entry["action"] not in _skipped] if include_traces else []
        for segment in one["segments"]:
            segment["device"] = index
        if not result:
            result = {**one, "device_traces": [[] for _ in range(_C.device_count())]}
        else:
            result["segments"] += one["segments"]
        result["device_traces"][index] = entries
    result["host_segments"] = [_host_segment(address, nbytes) for address, nbytes in _C.pinned_blocks()]
    result["host_traces"] = [entry for event in _C.pinned_history() if include_traces for entry in _host_entries(*event)]
    return _augment_memory_snapshot_stack_traces(result) if augment_with_fx_traces else result


def memory_snapshot(mempool_id=None, include_traces=True):
    """The segments of all devices, or of one private pool, with their blocks, as in torch.cuda.memory_snapshot. Segments have no events,
    so `include_traces` only tells whether these are collected meanwhile."""
    segments = _snapshot(include_traces=include_traces)["segments"]
    return [segment for segment in segments if mempool_id in (None, (0, 0)) or tuple(segment["segment_pool_id"]) == tuple(mempool_id)]


def _dump_snapshot(filename="dump_snapshot.pickle", augment_with_fx_traces=False):
    """Writes a snapshot for PyTorch's memory viewer, https://pytorch.org/memory_viz."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(augment_with_fx_traces=augment_with_fx_traces), file)


def _snapshot_on_oom(filename="memory.pickle", device=None):
    """Saves a snapshot with call stacks when an allocation fails for lack of memory, before the error is raised. None ends this."""
    _C.memory_snapshot_on_oom(index_of(device), None if filename is None else str(filename))


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
        self._scope = _C.PeakScope(index_of(self._device))
        return self

    def __exit__(self, *_):
        self.allocated, self.reserved, self.requested = self._scope.read()
        self._scope.end()
