"""PyTorch's device "claystone": any OpenCL device, or the CPU by claystone.

    import torch, claystone_torch
    x = torch.randn(3, 4, device="claystone")
"""

import atexit
import time
import tomllib
from importlib import resources

import torch

from . import _C, device, modules
from .table import rows as _rows

torch.utils.rename_privateuse1_backend("claystone")
torch._register_device_module("claystone", device)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True)

modules.install()


@atexit.register
def _at_exit():
    # Threads of PyTorch's backward may still be giving back the last graph, which needs the interpreter: it ends the process with
    # "terminate called without an active exception" where it stops meanwhile.
    time.sleep(0.02)


_table = _rows(tomllib.loads(resources.files(__name__).joinpath("operators.toml").read_text()))
_unknown = [name for name, alternatives in _table if not _C.add_row(name, alternatives)]  # older PyTorch lacks some operators
_overloads = sorted(set(_C.register_rows()))


def fallbacks():
    """What ran on the CPU so far: a dict from the operator's name with its overload to how often, and why the latest time."""
    return _C.fallbacks()


def reset_fallbacks():
    """Forgets what fallbacks() lists."""
    _C.reset_fallbacks()


def overloads_with_rows():
    """The operators, with their overloads, that claystone computes: every one that a row of operators.toml is for."""
    return list(_overloads)
