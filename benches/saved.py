"""Helpers for the PyTorch side of benches of training steps: loading the saved tensors, timing steps and comparing losses."""

import json
import struct
import time

import torch

DTYPES = {"F32": torch.float32, "I64": torch.int64}


def tensors(path):
    """Reads the tensors of a safetensors file: the length of a JSON header, the header, and the bytes."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    return {
        name: torch.frombuffer(data[slice(*at["data_offsets"])], dtype=DTYPES[at["dtype"]]).reshape(at["shape"])
        for name, at in header.items()
    }


WARM = 10  # untimed steps


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(step, steps, theirs):
    losses = [step(number) for number in range(WARM)]
    wait()
    start = time.perf_counter()
    losses += [step(number) for number in range(WARM, WARM + steps)]
    wait()
    ms = (time.perf_counter() - start) / steps * 1e3
    losses = torch.stack(losses).cpu().float()
    print(f"{ms:.3f} ms a step; losses {losses[0]:.4f} to {losses[-1]:.4f}")
    if torch.cuda.is_available():
        print_saved_on_cpu(step, steps, ms)
    if theirs is not None:
        apart = ((losses - theirs[: len(losses)]) / losses).abs().max()
        print(f"losses of {len(losses)} steps are apart by at most {apart:.2%}")


def print_saved_on_cpu(step, steps, without):
    """Repeats the steps with what backward needs in pinned memory of the host; prints both peaks, in bytes, and the ratio of times."""
    peaks = [torch.cuda.max_memory_allocated()]
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        for number in range(2):
            step(number)
        wait()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        repetitions = min(steps, 5)
        for number in range(repetitions):
            step(number)
        wait()
    ms = (time.perf_counter() - start) / repetitions * 1e3
    peaks.append(torch.cuda.max_memory_allocated())
    print(f"save_on_cpu: {ms:.3f} ms a step, {ms / without:.3f} of the time without; peaks {peaks[0]} and {peaks[1]} bytes")
