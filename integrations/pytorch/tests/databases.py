#!/usr/bin/env python3
"""Compares claystone with PyTorch's CPU on the modules and optimizers of PyTorch's test databases.

    databases.py                        both databases, a line per entry
    databases.py --entries 'nn.Conv*'   some entries

A module computes every input of its entry in `module_db`, in training and in evaluation mode, forward and backward with equal weights. An
optimizer takes five steps of a small network for every input of its entry in `optim_db`, parameter by parameter, and with `foreach` and `fused` if
it has them; error inputs must raise the exception that the entry names. Results, gradients, parameters and states must equal those of PyTorch's CPU
within 1e-4. Entries run in separate processes, as in opinfo.py. The exit status is 1 if an entry crashed, hung, or was wrong in more inputs than
known_failures.toml allows.
"""

import argparse
import copy
import fnmatch
import functools
import sys
import warnings
from collections import Counter

import torch
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import claystone_torch
import isolated
from opinfo import moved

TOLERANCE = 1e-4
STEPS = 5
# Modules whose results in training mode are random: only shapes and dtypes are compared.
RANDOM = ("Dropout", "AlphaDropout", "FeatureAlphaDropout", "FractionalMaxPool", "RReLU")


def same(found, expected, only_kind=False):
    a, b = torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected)
    assert len(a) == len(b), f"{len(a)} results, not {len(b)}"
    for x, y in zip(a, b):
        if not isinstance(y, torch.Tensor):
            assert x == y, f"{x}, not {y}"
            continue
        x, y = x.detach().cpu(), y.detach().cpu()
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{x.dtype} {tuple(x.shape)}, not {y.dtype} {tuple(y.shape)}"
        if not only_kind:
            torch.testing.assert_close(x, y, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


def gradients(module, inputs, result):
    results = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = [*module.parameters(), *(x for x in torch.utils._pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor))]
    wanted = [x for x in leaves if x.requires_grad]
    if not results or not wanted:
        return []
    weights = [torch.linspace(0.5, 1.5, x.numel()).view(x.shape).to(x.device, x.dtype) for x in results]
    return torch.autograd.grad(results, wanted, weights, allow_unused=True)


def modules(info):
    # The inputs of fractional pooling contain f64 random samples.
    is_f64 = info.module_cls.__name__.startswith("FractionalMaxPool") or torch.float32 not in info.dtypes
    dtype = torch.float64 if is_f64 else torch.float32
    for training in (True, False):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for number, one in enumerate(inputs):

            def compute(number=number, one=one, training=training):
                if one.forward_input is None:
                    return False  # an input for tests of the constructor
                make = one.constructor_input
                torch.manual_seed(number)
                try:
                    module = info.module_cls(*make.args, **make.kwargs, **({"dtype": dtype} if takes_dtype(info, make) else {})).train(training)
                    theirs = copy.deepcopy(module)
                    given = moved((one.forward_input.args, one.forward_input.kwargs), "cpu")
                    expected = theirs(*given[0], **given[1])
                    expected_gradients = gradients(theirs, given, expected)
                except Exception:
                    return False  # PyTorch's CPU does not support the input
                ours = copy.deepcopy(module).to("claystone")
                given = moved(given, "claystone")
                claystone_torch.reset_fallbacks()
                if any(is_lazy(x) for x in ours.parameters()):
                    ours(*given[0], **given[1])  # initialises the lazy weights
                    ours.load_state_dict(theirs.state_dict())
                found = ours(*given[0], **given[1])
                only_kind = training and info.module_cls.__name__.startswith(RANDOM)
                same(found, expected, only_kind)
                same(gradients(ours, given, found), expected_gradients, only_kind)
                return True

            yield f"{'training' if training else 'evaluation'} {number} {one.desc}".strip(), compute


def takes_dtype(info, make):
    # Modules with weights take a dtype, others do not; a dtype among the constructor's arguments is kept.
    import inspect

    return "dtype" in inspect.signature(info.module_cls).parameters and "dtype" not in make.kwargs


def optimisers(info):
    for number, one in enumerate(info.optim_inputs_func(device="cpu")):
        for way in ("single", *(way for way in ("foreach", "fused") if way in info.supported_impls)):

            def compute(one=one, way=way):
                if one.params is not None and not isinstance(one.params, list):
                    return False
                expected = train(info, one, "single", "cpu")
                claystone_torch.reset_fallbacks()
                same(train(info, one, way, "claystone"), expected)
                return True

            yield f"{way} {number} {one.desc}".strip(), compute
    if info.optim_error_inputs_func is None:
        return
    for number, one in enumerate(info.optim_error_inputs_func(device="claystone", dtype=torch.float32)):
        if one.error_on != OptimizerErrorEnum.CONSTRUCTION_ERROR:
            continue

        def refuse(one=one):
            given = one.optimizer_error_input
            try:
                info.optim_cls(given.params, **given.kwargs)
            except one.error_type as error:
                assert one.error_regex in str(error), f"says {str(error)!r}, not {one.error_regex!r}"
                return True
            raise AssertionError(f"does not raise {one.error_regex!r}")

        yield f"error {number}", refuse


def train(info, one, way, device):
    """The parameters and the optimizer's state after STEPS steps."""
    torch.manual_seed(0)
    # Matrices only, because Muon takes nothing else.
    # L-BFGS runs in f64, because in f32 rounding errors decide its path.
    dtype = torch.float64 if info.optim_cls is torch.optim.LBFGS else torch.float32
    tensors = [torch.randn(8, 5) / 2, torch.randn(3, 8) / 2, torch.randn(16, 5), torch.randn(16, 3)]
    *weights, x, y = (tensor.to(device, dtype) for tensor in tensors)
    weights = [torch.nn.Parameter(w) for w in weights]
    options = moved(copy.deepcopy(one.kwargs), device)
    if way != "single":
        options[way] = True
    elif "foreach" in info.supported_impls:
        options["foreach"] = False
    optimiser = info.optim_cls(weights, **options)

    def step():
        optimiser.zero_grad()
        loss = ((x @ weights[0].t()).tanh() @ weights[1].t() - y).square().mean()
        loss = -loss if one.kwargs.get("maximize") else loss
        loss.backward()
        if info.only_supports_sparse_grads:
            for w in weights:
                w.grad = w.grad.to_sparse()
        return loss

    for _ in range(STEPS):
        if info.step_requires_closure:
            optimiser.step(step)
        else:
            step()
            optimiser.step()
    state = {i: {key: value for key, value in optimiser.state[w].items() if isinstance(value, torch.Tensor)} for i, w in enumerate(weights)}
    return weights, state


DATABASES = {
    "modules": (module_db, lambda info: info.name, modules),
    "optimisers": (optim_db, lambda info: info.optim_cls.__name__, optimisers),
}


def entries(patterns):
    """Yields the position of each entry, the names of its database and the entry, and a function that yields its cases."""
    every = ((title, name_of(info), cases_of, info) for title, (database, name_of, cases_of) in DATABASES.items() for info in database)
    for position, (title, name, cases_of, info) in enumerate(every):
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            yield position, f"{title} {name}", functools.partial(cases_of, info)


def run_entry(cases, _):
    result = {"passed": 0, "failed": 0, "skipped": 0, "on_cpu": {}, "failures": []}
    for label, compute in cases():
        try:
            result["passed" if compute() else "skipped"] += 1
        except Exception as error:
            result["failed"] += 1
            result["failures"].append(f"{label}: {type(error).__name__}: {' '.join(str(error).split())}")
        result["on_cpu"].update({operator: why for operator, (_, why) in claystone_torch.fallbacks().items()})
    claystone_torch.reset_fallbacks()
    return result


def table(title, results):
    known = isolated.known_failures(title)
    counts, samples, unknown = Counter(), Counter(), []
    for name, result in results.items():
        crashed, on_cpu = isolated.crashed(result), result.get("on_cpu")
        kind = "crash" if crashed else "fails" if result["failed"] else "fallback" if on_cpu else "claystone" if result["passed"] else "none"
        counts[kind] += 1
        samples.update({what: result[what] for what in ("passed", "failed", "skipped")})
        if crashed or result["failed"] > known.get(name, 0):
            unknown.append(name)
        note = result["failures"][0] if result["failures"] else "; ".join(f"{operator}: {why}" for operator, why in sorted(on_cpu.items()))
        print(f"{name:44} {kind:9} {result['passed']:5} {result['failed']:5}  {note[:190]}")
    print(f"\n{title}: {counts.total()} entries: " + ", ".join(f"{n} {what}" for what, n in counts.most_common()))
    print(f"inputs: {samples['passed']} pass, {samples['failed']} fail, {samples['skipped']} are skipped")
    if unknown:
        print("fail more often than known_failures.toml allows: " + ", ".join(unknown))
    print(flush=True)
    return not unknown


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    isolated.add_options(parser)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.worker:
        return isolated.worker(arguments, entries(arguments.entries), run_entry)
    results = isolated.run(__file__, [], arguments)
    good = True
    # A worker that ended between two entries belongs to neither database.
    for name in [name for name in results if name.startswith("worker ")]:
        print(f"{name}: {results.pop(name)['failures'][0]}")
        good = False
    for title in DATABASES:
        good &= table(title, {name.removeprefix(f"{title} "): results[name] for name in sorted(results) if name.startswith(f"{title} ")})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
