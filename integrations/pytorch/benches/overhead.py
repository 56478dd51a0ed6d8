#!/usr/bin/env python3
"""Measures the host time of an operator on tensors of few elements: through PyTorch on claystone, and by claystone's C API alone.

    python benches/overhead.py [--rounds 30] [--only add]

All columns are measured in turns in one process; the figures are medians, in microseconds. Needs a C compiler. `adapter` is the difference
of the first two columns, so it includes PyTorch's own dispatch and Python, which `CPU` shows for PyTorch's CPU."""

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import claystone_torch

here = Path(__file__).resolve().parent
package = Path(claystone_torch.__file__).resolve().parent


class Value(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("number", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class Argument(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tag", ctypes.c_int32), ("length", ctypes.c_size_t), ("value", Value)]


class Call(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tensors", ctypes.c_void_p), ("tensor_count", ctypes.c_size_t),
                ("arguments", ctypes.c_void_p), ("argument_count", ctypes.c_size_t)]


BOOL, INT, FLOAT, INTS = 1, 2, 3, 4  # values of ClaystoneTag


def library():
    built = Path(tempfile.mkdtemp()) / "calls.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", here / "calls.c", f"-I{here.parents[1] / 'capi/include'}",
                    f"-L{package}", "-lclaystone_capi", f"-Wl,-rpath,{package}", "-o", built], check=True)
    calls = ctypes.CDLL(str(built))
    calls.filled.restype, calls.seconds_per_call.restype = ctypes.c_void_p, ctypes.c_double
    calls.filled.argtypes = [ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t, ctypes.c_double]
    return calls


def own_call(calls, device, name, shapes, arguments):
    """Returns a function that measures the seconds of one claystone call."""
    handles = [calls.filled(device, (ctypes.c_int64 * len(shape))(*shape), len(shape), 0.5) for shape in shapes]
    tensors = (ctypes.c_void_p * len(handles))(*handles)
    given, kept = (Argument * len(arguments))(), []
    for place, value in zip(given, arguments):
        if isinstance(value, bool):
            place.tag, place.value.integer = BOOL, value
        elif isinstance(value, int):
            place.tag, place.value.integer = INT, value
        elif isinstance(value, float):
            place.tag, place.value.number = FLOAT, value
        else:
            kept.append((ctypes.c_int64 * len(value))(*value))
            place.tag, place.length, place.value.pointer = INTS, len(value), ctypes.addressof(kept[-1])
    call = Call(name.encode(), ctypes.addressof(tensors), len(handles), ctypes.addressof(given), len(arguments))
    kept += [tensors, given]
    return lambda count, _kept=kept: calls.seconds_per_call(ctypes.byref(call), count)


# Title, shapes, PyTorch's function, and claystone's operation with its arguments; None if PyTorch calls no operation.
CASES = [
    ("add", [(4, 4), (4, 4)], torch.add, "add", []),
    ("mul by a number", [(4, 4)], lambda a: torch.mul(a, 2.0), "mul_scalar", [2.0]),
    ("relu", [(4, 4)], torch.relu, "relu", []),
    ("matmul", [(4, 4), (4, 4)], torch.matmul, "mm", []),
    ("view, transpose, select", [(4, 4)], lambda a: a.view(2, 8).t()[1], None, []),
    ("sum", [(4, 4)], torch.sum, "sum", []),
    ("softmax", [(4, 4)], lambda a: torch.softmax(a, 1), "softmax", [1]),
    ("layer_norm", [(4, 4), (4,), (4,)], lambda a, w, b: F.layer_norm(a, (4,), w, b), "layer_norm", [(4,), 1e-5]),
    ("linear", [(4, 4), (4, 4), (4,)], F.linear, "linear", []),
]


def seconds_of(function, tensors, count):
    begun = time.perf_counter()
    for _ in range(count):
        function(*tensors)
    return (time.perf_counter() - begun) / count


def in_place(tensors, count):
    return seconds_of(torch.Tensor.add_, tensors, count)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    calls, number = library(), -1 if os.environ.get("CLAYSTONE_TORCH_DEVICE") == "cpu" else 0  # CLAYSTONE_CPU is -1
    measured = {}
    for title, shapes, function, name, given in CASES:
        if arguments.only not in title:
            continue
        tensors = {device: [torch.full(shape, 0.5, device=device) for shape in shapes] for device in ("claystone", "cpu")}
        leaves = {device: [t.clone().requires_grad_() for t in given_tensors] for device, given_tensors in tensors.items()}
        measured[title] = {
            "through PyTorch": lambda n, f=function, t=tensors: seconds_of(f, t["claystone"], n),
            "claystone": own_call(calls, number, name, shapes, given) if name else lambda n: 0.0,
            "recorded": lambda n, f=function, t=leaves: seconds_of(f, t["claystone"], n),
            "CPU": lambda n, f=function, t=tensors: seconds_of(f, t["cpu"], n),
            "CPU, recorded": lambda n, f=function, t=leaves: seconds_of(f, t["cpu"], n),
        }
    found = {title: {column: [] for column in columns} for title, columns in measured.items()}
    for _ in range(arguments.rounds):
        for title, columns in measured.items():
            for column, run in columns.items():
                found[title][column].append(run(arguments.calls))
                torch.claystone.synchronize()
    print(f"claystone:0 is {torch.claystone.get_device_name(0)}")
    print("| operator | through PyTorch | claystone | adapter | recorded | CPU | CPU, recorded |\n|---|---|---|---|---|---|---|")
    for title, columns in found.items():
        us = {column: 1e6 * statistics.median(times) for column, times in columns.items()}
        adapter = us["through PyTorch"] - us["claystone"]
        print(f"| {title} | {us['through PyTorch']:.2f} | {us['claystone']:.2f} | {adapter:.2f} | {us['recorded']:.2f} | "
              f"{us['CPU']:.2f} | {us['CPU, recorded']:.2f} |")
    if claystone_torch.fallbacks():
        print("on the CPU ran:", claystone_torch.fallbacks())


if __name__ == "__main__":
    main()
