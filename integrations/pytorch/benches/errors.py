#!/usr/bin/env python3
"""Compares rounding errors of f32 matrix products on claystone with those of PyTorch's CPU.

    python benches/errors.py

Prints the ratio of both root mean square errors against f64, for products of an m x k and a k x 256 matrix of normal numbers: a row of the table
for each m, a column for each k. In rows marked "columns", the second matrix is stored column by column."""

import torch

import claystone_torch  # noqa: F401

ROWS = [1, 4, 7, 64, 256]
DEPTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
COLUMNS = 256


def error(product, exact):
    return (product.double() - exact).square().mean().sqrt().item()


def ratio(m, k, by_columns):
    """Returns claystone's error divided by PyTorch's, as a mean of enough products for 64 rows."""
    ours, theirs = 0.0, 0.0
    for _ in range(-(-64 // m)):
        a, b = torch.randn(m, k), torch.randn(COLUMNS, k).t() if by_columns else torch.randn(k, COLUMNS)
        exact = a.double() @ b.double()
        ours += error((a.to("claystone") @ b.to("claystone")).cpu(), exact)
        theirs += error(a @ b, exact)
    return ours / theirs


def main():
    torch.manual_seed(0)
    print(f"claystone:0 is {torch.claystone.get_device_name(0)}, PyTorch {torch.__version__}")
    print("| m | " + " | ".join(f"k = {k:,}" for k in DEPTHS) + " |")
    print("|---" * (len(DEPTHS) + 1) + "|", flush=True)
    for m, by_columns in [(m, by_columns) for m in ROWS for by_columns in (False, True)]:
        cells = [f"{ratio(m, k, by_columns):.2f}" for k in DEPTHS]
        print(f"| {m}{', columns' if by_columns else ''} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
