"""What `module.to("claystone")` needs that PyTorch does not have for other devices by itself."""

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors


def _apply(self, function, recurse=True):
    """Module._apply of lazy modules. Where conversions swap tensors, it makes an empty parameter of one that has no shape yet."""
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
    # To .to(), a parameter on this device is not what one on the CPU can become, and modules would get new ones: weights that two layers
    # share would be two. Swapping keeps the parameter that there is.
    torch.__future__.set_swap_module_params_on_conversion(True)
    LazyModuleMixin._apply = _apply
