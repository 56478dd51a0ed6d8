"""Changes to PyTorch's modules that `module.to("claystone")` needs."""

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors


def _apply(self, function, recurse=True):
    """Module._apply for lazy modules: PyTorch's swapping conversion does not support parameters without a shape."""
    lazy = [(tensors, name) for tensors in (self._parameters, self._buffers) for name, tensor in tensors.items() if is_lazy(tensor)]
    apart = [tensors[name] for tensors, name in lazy]
    for tensors, name in lazy:
        tensors[name] = None
    try:
        super(LazyModuleMixin, self)._apply(function, recurse)
        for tensor in apart:
            moved = function(tensor.data)
            swap_tensors(tensor, type(tensor)(tensor.requires_grad, device=moved.device, dtype=moved.dtype))
    finally:
        for (tensors, name), tensor in zip(lazy, apart):
            tensors[name] = tensor
    return self


def install():
    # Module.to() cannot change a CPU parameter into one of this device in place and would create a new one. Two layers that share a
    # weight would then no longer share it. Swapping keeps the parameter object.
    torch.__future__.set_swap_module_params_on_conversion(True)
    LazyModuleMixin._apply = _apply
