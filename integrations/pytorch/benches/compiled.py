#!/usr/bin/env python3
"""Compares training with torch.compile and without on claystone: losses, launches, and reserved memory.

    python benches/compiled.py [--steps 20] [--only gpt2-small,resnet50]

Prints for each network the largest relative difference of the losses of all steps, the launches of a step without and with compilation, and
for the compiled steps the peak of allocated and of reserved memory in MiB: from the network's allocation on, and in steps after
`empty_cache()`."""

import argparse
import gc

import torch

import claystone_torch
from steps import CASES, FULL_SIZE, Run, launches

MIB = 1 << 20


def peaks():
    return torch.claystone.max_memory_allocated(), torch.claystone.max_memory_reserved()


def forget():
    gc.collect()
    torch.claystone.empty_cache()
    torch.claystone.reset_peak_memory_stats()


def train(case, steps, compile):
    """Returns the losses, the launches of a step, and the peaks of the whole run and of later steps."""
    forget()
    run = Run("claystone", *case, "default" if compile else None)
    torch.manual_seed(1)
    losses = [run.step() for _ in range(steps)]
    whole = peaks()
    forget()
    run.step(), run.step()
    return losses, launches(run.step), whole, peaks()


def main():
    cases = CASES | FULL_SIZE
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default=",".join(cases))
    arguments = parser.parse_args()
    print(f"claystone:0 is {torch.claystone.get_device_name(0)}")
    print("| network | losses differ by | launches | compiled | whole run: allocated | reserved | ratio | steps: allocated | reserved | ratio |")
    print("|---" * 10 + "|", flush=True)
    for name in arguments.only.split(","):
        found, after, *memory = train(cases[name], arguments.steps, True)
        expected, before, *_ = train(cases[name], arguments.steps, False)
        apart = max(abs(a - b) / abs(a) for a, b in zip(expected, found))
        cells = [f"{allocated / MIB:.1f} | {reserved / MIB:.1f} | {reserved / allocated:.3f}" for allocated, reserved in memory]
        print(f"| {name} | {apart:.1e} | {before} | {after} | " + " | ".join(cells) + " |", flush=True)
    print("on the CPU ran:", claystone_torch.fallbacks() or "nothing")


if __name__ == "__main__":
    main()
