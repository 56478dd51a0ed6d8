"""Dry runs: a program runs without device memory, and a report says how much it needs."""

import json

import torch

from . import _C

_PARAMETER, _GRADIENT, _OPTIMIZER_STATE, _SAVED = range(4)


class dry_run:
    """Runs a `with` block on simulated memory, and reports how much device memory the block needs.

        with claystone_torch.dry_run(24 << 30) as run:
            model = Net().to("claystone")
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            run.watch(model, optimizer)
            step(model, optimizer)
        print(run)

    `capacity` is the number of bytes to compare with, by default each device's own memory. The block begins before the first tensor of
    the device. Tensors in the block have no bytes, and no kernel runs. Values that are read are zeros. Tensors that were made in the block
    stay without bytes after it. All threads of the process take part.

    After the block, `report` is a dict: in `report["devices"]`, the entry of each device has `peak_allocated`, `peak_reserved`,
    `smallest_device`, `fits`, and `roles` with the bytes at the peak by role. `report["assumed"]` lists the values that were read.
    """

    report = None

    def __init__(self, capacity=None):
        self._capacity = 2**64 - 1 if capacity is None else capacity
        self._watched = []
        self._handles = []

    def watch(self, model, optimizer=None):
        """Counts the parameters and gradients of a model and the state of an optimizer under their roles. Call it when both are on the
        device. Without this call they count as temporary or saved memory."""
        parameters = list(model.parameters())
        self._watched.append((parameters, optimizer))
        self._mark()
        for parameter in filter(lambda parameter: parameter.requires_grad, parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(lambda p: _C.set_role(p.grad, _GRADIENT)))
        if optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._mark()))

    def _mark(self):
        for parameters, optimizer in self._watched:
            for parameter in parameters:
                _C.set_role(parameter, _PARAMETER)
            states = [] if optimizer is None else optimizer.state.values()
            for value in (value for state in states for value in state.values() if isinstance(value, torch.Tensor)):
                _C.set_role(value, _OPTIMIZER_STATE)

    def __enter__(self):
        _C.dry_run_begin(self._capacity)

        def save(tensor):
            _C.set_role(tensor, _SAVED)
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self._hooks.__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        text, self._text = _C.dry_run_end()
        self.report = json.loads(text)

    def __str__(self):
        return "a dry run in progress" if self.report is None else self._text
