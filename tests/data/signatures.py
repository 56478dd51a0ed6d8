#!/usr/bin/env python3
"""Writes signatures.txt: PyTorch's parameters and defaults of the operations in docs/operations.md, one line per overload.
For tests/operations/calls.rs. Needs torch."""

import inspect
import pathlib
import re

import torch

here = pathlib.Path(__file__).parent
page = (here / "../../docs/operations.md").read_text()
names = sorted({line.split("|")[2].strip(" `") for line in page.splitlines() if line.startswith("| `")})
schemas = {}
for schema in torch._C._jit_get_all_schemas():
    schemas.setdefault(schema.name.removeprefix("aten::"), []).append(schema)


def value(default):
    if isinstance(default, list) and default and all(x == default[0] for x in default):
        default = default[0]
    return str(default).replace(" ", "")


def overloads(name):
    last = name.split(".")[-1]
    function = getattr(torch.nn.functional, last, None) if "functional" in name else getattr(torch, name, None)
    try:
        parameters = inspect.signature(function).parameters.values()
        if not any(p.kind == p.VAR_POSITIONAL for p in parameters):
            none = inspect.Parameter.empty
            yield [p.name if p.default is none else f"{p.name}={value(p.default)}" for p in parameters]
    except (TypeError, ValueError):
        pass
    for schema in schemas.get(name.replace("linalg.", "linalg_") if "linalg." in name else last, []):
        if "Dimname" in str(schema) or any(a.is_out for a in schema.arguments):
            continue
        if schema.arguments[0].name == "a" and name != "tensordot":
            continue  # of Python's numbers
        own = [("input" if a.name == "self" else a.name, a) for a in schema.arguments]
        yield [f"{n}={value(a.default_value)}" if a.has_default_value() else n for n, a in own]


ignored = re.compile(r"^(size_average|reduce|layout|pin_memory|memory_format|generator|_stacklevel|inplace|sparse)(=|$)")
lines = []
for name in names:
    if "__" in name:
        continue  # subscripts
    for parameters in overloads(name):
        line = f"{name}: {' '.join(p for p in parameters if p == 'reduce' or not ignored.match(p))}"
        if line not in lines:
            lines.append(line)
(here / "signatures.txt").write_text("\n".join(lines) + "\n")
