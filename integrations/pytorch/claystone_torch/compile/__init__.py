"""The backend of torch.compile for tensors of this device: `torch.compile(model, backend="claystone")`.

AOTAutograd traces forward and backward graphs of aten operators. Chains of elementwise operators become formulas, each of them one launch
(`fusion.py`, `formulas.py`). All other operators run by their rows. A graph is one call into C++ (`csrc/compiled.cpp`), which drops each
value after its last use. Graphs without tensors of this device go to Inductor.
"""

import functools

import torch

from .emission import emit

CAPTURED = ("reduce-overhead", "max-autotune")
MODES = (None, "default", *CAPTURED, "max-autotune-no-cudagraphs")
_libraries = []  # keeps registrations


def _devices(gm, example_inputs):
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)] + [*gm.parameters(), *gm.buffers()]
    values = [node.meta.get("example_value", node.meta.get("val")) for node in gm.graph.nodes]
    return {x.device.type for x in [*tensors, *values] if isinstance(x, torch.Tensor)}


def compile_graph(gm, example_inputs, capture=False):
    """Compiles a graph of aten operators; the result takes its arguments as one list, which it empties."""
    run = emit(gm, capture)

    def compiled(arguments):
        return run(arguments)

    compiled._boxed_call = True
    return compiled


def backend(gm, example_inputs, *, mode=None, options=None, name=None):
    """The backend "claystone" of torch.compile.

    "reduce-overhead" and "max-autotune" replay the commands of each graph on OpenCL devices; all other modes compile alike. Raises
    ValueError for another mode, and for options, because there are none. A graph without tensors of this device is compiled by Inductor,
    with this mode and these options.
    """
    if "claystone" not in _devices(gm, example_inputs):
        return torch._TorchCompileInductorWrapper(mode, options, None)(gm, example_inputs)
    if mode not in MODES:
        raise ValueError(f"torch.compile for claystone: there is no mode {mode!r}, only {', '.join(map(str, MODES[1:]))}")
    if options:
        raise ValueError(f"torch.compile for claystone takes no options, but got {', '.join(sorted(options))}")
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    from .decompositions import table

    capture = mode in CAPTURED and torch.claystone.is_opencl()
    trace = aot_autograd(
        fw_compiler=functools.partial(compile_graph, capture=capture), partition_fn=min_cut_rematerialization_partition, decompositions=table(),
        keep_inference_input_mutations=True)
    return trace(gm, example_inputs)


def install():
    """Registers the backend at the first call of torch.compile, and makes it the default.

    Inductor's own hook for such devices, `_inductor_backend_init`, has to register code generators for Inductor's loops, which would replace
    claystone's kernels. A backend of Dynamo keeps the rows and their kernels, and is smaller.
    """
    original = torch.compile

    def compile(*arguments, **options):
        _register()
        return original(*arguments, **options)

    compile.__doc__, compile.__wrapped__, compile.__name__ = original.__doc__, original, "compile"
    torch.compile = compile


def _register():
    # torch._dynamo takes seconds to import, so that nothing is registered before torch.compile is called.
    from torch._dynamo.backends import registry

    if "claystone" not in registry._COMPILER_FNS:
        registry.register_backend(backend, name="claystone")
        keep_step_counts_on_device()
        describe_attention()
        if hasattr(registry, "set_default_backend") and registry.get_default_backend() == "inductor":
            registry.set_default_backend("claystone")


def keep_step_counts_on_device():
    """Makes Dynamo treat the step counts of new optimisers as it does for CUDA: as tensors of the device, which a captured graph can read.

    Claystone's CPU device captures nothing, so step counts stay numbers there, which are arguments of formulas.
    """
    from torch._dynamo.variables.optimizer import OptimizerVariable

    def is_new(optimiser, group):
        parameters = group.get("params", [])
        return "capturable" in group and all(p.device.type == "claystone" and p not in optimiser.state for p in parameters)

    if not torch.claystone.is_opencl():
        return
    if hasattr(OptimizerVariable, "_safe_to_set_capturable"):
        safe = OptimizerVariable._safe_to_set_capturable
        OptimizerVariable._safe_to_set_capturable = lambda self, group: safe(self, group) or is_new(self.value, group)
        return
    set_capturable = OptimizerVariable._set_capturable  # PyTorch before 2.15 changes the optimiser's own groups

    def set_for_all(self, tx):
        for group in self.value.param_groups:
            if is_new(self.value, group):
                group["capturable"] = True
        set_capturable(self, tx)

    OptimizerVariable._set_capturable = set_for_all


def describe_attention():
    """Tells tracing the results of attention's backward, as PyTorch does itself from 2.15 on."""
    name = "_scaled_dot_product_fused_attention_overrideable_backward"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
        return

    def gradients(gradient, query, key, value, bias, wanted, *rest, scale=None):
        return tuple(None if given is None else torch.empty_like(given) for given in (query, key, value, bias))

    library = torch.library.Library("aten", "IMPL")
    library.impl(name, gradients, "Meta")
    _libraries.append(library)
