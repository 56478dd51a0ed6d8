"""PyTorch's device "claystone": any OpenCL device, or the CPU by claystone.

    import torch, claystone_torch
    x = torch.randn(3, 4, device="claystone")
"""

import atexit
import time
import tomllib
from importlib import resources

import torch

from ._built_with import TORCH as _built_with

if torch.__version__.split(".")[:2] != _built_with.split("."):
    raise ImportError(
        f"this claystone_torch was built with torch {_built_with}, and torch {torch.__version__} is installed: "
        f"install the wheel for that torch, or build claystone_torch again")

from . import _C, compile, composed, device, modules
from .dry import dry_run
from .host_graph import HostGraph
from .table import rows as _rows

torch.utils.rename_privateuse1_backend("claystone")
torch._register_device_module("claystone", device)
_C.register_graphs(HostGraph) # under the device's final name
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True)

modules.install()
composed.install()
compile.install()
if device.device_count() == 1:
    # Backward passes of this thread stay on it. PyTorch's thread for the device costs a change of threads for each pass, and with one
    # device nothing runs beside it.
    torch.autograd.set_multithreading_enabled(False)


@atexit.register
def _at_exit():
    # PyTorch's backward threads may still be freeing the last graph, which needs the interpreter. If the interpreter shuts down
    # meanwhile, the process ends with "terminate called without an active exception".
    time.sleep(0.02)


_operators = tomllib.loads(resources.files(__name__).joinpath("operators.toml").read_text())
for _reason, _names in _operators.pop("host").items():
    _C.add_host_operators(_names, _reason)
_table = _rows(_operators)
_unknown = [name for name, alternatives in _table if not _C.add_row(name, alternatives)]  # older PyTorch lacks some operators
_overloads = sorted(set(_C.register_rows()))


def fallbacks():
    """The operators that ran on PyTorch's CPU so far: a dict from name with overload to the number of calls and the latest reason."""
    return _C.fallbacks()


def reset_fallbacks():
    """Empties the list that fallbacks() returns."""
    _C.reset_fallbacks()


def overloads_with_rows():
    """The operators, with their overloads, that claystone computes: all that have a row in operators.toml."""
    return list(_overloads)
