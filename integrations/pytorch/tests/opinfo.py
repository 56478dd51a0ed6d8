#!/usr/bin/env python3
"""Compares claystone with PyTorch's CPU on PyTorch's own samples of every operator.

    opinfo.py                                all entries of torch.testing._internal's op_db in f32, forward and backward
    opinfo.py --dtype float16 int64 --entries 'nn.functional.*'
    opinfo.py --dtype errors                 the calls that must raise, with PyTorch's exception and message
    opinfo.py --json results.json            adds the results of these dtypes to the file
    opinfo.py --dtype --json results.json --write-table coverage.md    runs nothing, and writes a table of the results in the file

Tolerances are those of PyTorch's own device tests:
- float32, complex64: 1e-4, absolute and relative. `test_compare_cpu` of PyTorch's test_ops.py, which compares a device with the CPU in one
  dtype of an entry, float32 if it has that, uses 1e-3; PyTorch's XPU tests used 1e-4.
- other dtypes: those of `torch.testing.assert_close`, which `TestCase.assertEqual` uses: float16 1e-3 relative, bfloat16 1.6e-2, both 1e-5
  absolute.
- An entry's own `toleranceOverride` and `precisionOverride` widen both, if they are for tests that compare values of a device
  (DEVICE_TESTS), not for compilers and decompositions.
- A float16 or bfloat16 result beyond the tolerance passes if it is as close to the f64 result as that of PyTorch's CPU: `test_python_ref`.
- Errors are matched as in `test_errors`.

Entries run in separate processes: an entry that crashes or hangs is a line of the table, and the next entries still run. The last line has the
counts; the exit status is 1 if an entry crashed, hung, or was wrong in more samples than known_failures.toml allows.
"""

import argparse
import fnmatch
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import isolated

# PyTorch's test classes that compare values of a device.
DEVICE_TESTS = {None, "TestCommon", "TestConsistency", "TestUnaryUfuncs", "TestBinaryUfuncsDevice", "TestReductions", "TestMasked"}
# Of equal elements, which are rare in f32, any may come first: their indices and gradients are unspecified.
TIES = {"argsort", "kthvalue", "max.reduction_with_dim", "median", "min.reduction_with_dim", "mode", "nanmedian", "sort", "topk"}
# Operators with random or unspecified values: only the shapes and dtypes of their results are compared.
RANDOM = {
    "bernoulli", "cauchy", "empty", "empty_like", "empty_permuted", "empty_strided", "exponential", "geometric", "log_normal", "multinomial", "nn.functional.multi_head_attention_forward",
    "new_empty", "new_empty_strided", "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.rrelu", "normal", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "svd_lowrank", "pca_lowrank", "uniform",
}


def entries(patterns):
    from torch.testing._internal.common_methods_invocations import op_db

    for position, op in enumerate(op_db):
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            yield position, name, op


def moved(value, device):
    import torch

    def move(x):
        if isinstance(x, torch.Tensor):
            return x.detach().to(device).requires_grad_(x.requires_grad)
        if isinstance(x, torch.device) or (isinstance(x, str) and x == "cpu"):
            return torch.device(device)
        if isinstance(x, torch.Generator):
            return torch.Generator(device).manual_seed(x.initial_seed())
        return x

    return torch.utils._pytree.tree_map(move, value)


def compute(op, sample, device):
    """The results of an operator and the gradients of its inputs."""
    import torch

    arguments, options = moved((sample.input, *sample.args), device), moved(sample.kwargs, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = op(*arguments, **options)
        if sample.output_process_fn_grad is not None:
            processed = sample.output_process_fn_grad(result)
        flat = [x for x in torch.utils._pytree.tree_leaves(processed) if isinstance(x, torch.Tensor) and x.requires_grad]
        inputs = [x for x in torch.utils._pytree.tree_leaves((arguments, options)) if isinstance(x, torch.Tensor) and x.requires_grad]
        gradients = ()
        if flat and inputs:
            ones = [moved(torch.linspace(0.5, 1.5, x.numel()).to(x.dtype).view(x.shape), device) for x in flat]
            gradients = torch.autograd.grad(flat, inputs, ones, allow_unused=True)
    return result, gradients


def overrides(op, dtype):
    """The widest absolute and relative tolerance that an entry requests for device tests."""
    from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
    from torch.testing._internal.opinfo.core import DecorateInfo

    atol, rtol = 0, 0
    for info in op.decorators:
        if isinstance(info, DecorateInfo):
            if info.cls_name not in DEVICE_TESTS or (info.dtypes is not None and dtype not in info.dtypes):
                continue
        for one in info.decorators if isinstance(info, DecorateInfo) else [info]:
            if isinstance(one, toleranceOverride) and dtype in one.d:
                atol, rtol = max(atol, one.d[dtype].atol), max(rtol, one.d[dtype].rtol)
            elif isinstance(one, precisionOverride) and dtype in one.d:
                atol = max(atol, one.d[dtype])
    return atol, rtol


def tolerances(result_dtype, wider):
    import torch
    from torch.testing._comparison import default_tolerances

    rtol, atol = (1e-4, 1e-4) if result_dtype in (torch.float32, torch.complex64) else default_tolerances(result_dtype)
    return max(atol, wider[0]), max(rtol, wider[1])


def check(found, expected, only_kind, exact, ties, wider):
    """Raises if two trees of results differ. `exact` is the f64 result or None; `wider` is the entry's own tolerance."""
    import torch

    def leaves(tree):
        plain = lambda x: x.detach().resolve_conj().resolve_neg().cpu() if isinstance(x, torch.Tensor) else x
        return torch.utils._pytree.tree_leaves(torch.utils._pytree.tree_map(plain, tree))

    a, b = leaves(found), leaves(expected)
    c = leaves(exact) if exact is not None else b
    assert len(a) == len(b), f"{len(a)} results, not {len(b)}"
    for x, y, z in zip(a, b, c):
        if not isinstance(y, torch.Tensor):
            if isinstance(y, (bool, int, float, complex)) and not only_kind:
                assert x == y or x != x and y != y or abs(x - y) <= 1e-4 * max(1, abs(y)), f"{x}, not {y}"
            continue
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{x.dtype} {tuple(x.shape)}, not {y.dtype} {tuple(y.shape)}"
        if only_kind or (ties and not y.is_floating_point()):
            continue
        if y.layout != torch.strided:
            x, y, z = x.to_dense(), y.to_dense(), z.to_dense()
        tolerance = tolerances(y.dtype, wider)
        try:
            torch.testing.assert_close(x, y, atol=tolerance[0], rtol=tolerance[1], equal_nan=True)
        except AssertionError:
            # In float16 and bfloat16, PyTorch's own result may be the less exact one.
            if exact is None or not y.is_floating_point():
                raise
            error = lambda t: (t.double() - z.double()).abs().nan_to_num(0).max().item()
            same_nan = torch.equal(x.isnan(), y.isnan())
            if not same_nan or error(x) > max(error(y), tolerance[0]):
                raise


def in_double(sample):
    import torch

    change = lambda x: x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    return sample.transform(change)


def compare(op, name, sample, found, expected, dtype):
    import torch

    only_kind = op.name in RANDOM or sample.kwargs.get("dropout_p", 0) > 0
    ties = name in TIES and dtype != torch.float32 and not sample.kwargs.get("stable", False)
    exact = None
    if dtype in (torch.float16, torch.bfloat16):
        try:
            exact = compute(op, in_double(sample), "cpu")
        except Exception:
            pass  # no f64 result
    for i in range(2):
        check(found[i], expected[i], only_kind or (ties and i == 1), exact and exact[i], ties, overrides(op, dtype))


def expects_errors(op):
    """Whether PyTorch's own error test of an entry runs and is expected to pass."""
    import torch

    test = lambda: None
    for decorator in op.get_decorators("TestCommon", "test_errors", "cpu", torch.float32, {}):
        test = decorator(test)
    return not getattr(test, "__unittest_skip__", False) and not getattr(test, "__unittest_expecting_failure__", False)


def run_errors(op, name, limit):
    """Runs the calls that must raise, and checks for the exception and message that the entry names."""
    import re

    import torch

    result = {"passed": 0, "failed": 0, "skipped": 0, "no_row": [], "refused": {}, "failures": []}
    if op.error_inputs_func is None or not expects_errors(op):
        return None
    for number, one in zip(range(limit), op.error_inputs("claystone")):
        sample = one.sample_input
        try:
            returned = op(sample.input, *sample.args, **sample.kwargs)
            torch.claystone.synchronize()
            failure = None if returned is NotImplemented else "nothing is raised"  # for which Python raises
        except Exception as error:
            right = isinstance(error, one.error_type) and re.search(one.error_regex, str(error))
            failure = None if right else f"{type(error).__name__}: {' '.join(str(error).split())}"
        if failure is None:
            result["passed"] += 1
        else:
            result["failed"] += 1
            if len(result["failures"]) < 3:
                result["failures"].append(f"sample {number}: {failure[:150]}, not {getattr(one.error_type, '__name__', one.error_type)}: {one.error_regex}"[:400])
    return result


def run_entry(op, name, dtype_name, limit):
    import torch

    import claystone_torch

    if dtype_name == "errors":
        return run_errors(op, name, limit)
    dtype = getattr(torch, dtype_name)
    result = {"passed": 0, "failed": 0, "skipped": 0, "no_row": [], "refused": {}, "failures": []}
    if dtype not in op.dtypes:
        return None
    differentiable = op.supports_autograd and dtype.is_floating_point and dtype in op.backward_dtypes
    torch.manual_seed(0)
    try:
        samples = list(zip(range(limit), op.sample_inputs("cpu", dtype, requires_grad=differentiable)))
    except Exception as error:
        return {**result, "failures": [f"no samples: {error}"[:200]]}
    claystone_torch.reset_fallbacks()
    for number, sample in samples:
        try:
            expected = compute(op, sample, "cpu")
        except Exception:
            result["skipped"] += 1  # PyTorch's CPU does not support the sample
            continue
        try:
            found = compute(op, sample, "claystone")
            compare(op, name, sample, found, expected, dtype)
            result["passed"] += 1
        except Exception as error:
            result["failed"] += 1
            if len(result["failures"]) < 3:
                result["failures"].append(f"sample {number}: {type(error).__name__}: {' '.join(str(error).split())}"[:300])
    for fallback, (_, reason) in claystone_torch.fallbacks().items():
        if "no row" in reason:
            result["no_row"].append(fallback)
        else:
            result["refused"][fallback] = reason
    return result


def kind(result):
    if result["failed"]:
        return "crash" if isolated.crashed(result) else "fails"
    if result["no_row"]:
        return "fallback"
    return "partly" if result["refused"] else "row" if result["passed"] else "none"


def table(results, dtype):
    known = isolated.known_failures("opinfo")
    counts, samples, of_rows, unknown = Counter(), Counter(), Counter(), []
    print(f"{'entry':56} {'kind':9} passed failed  {dtype}")
    for name in sorted(results):
        result = results[name]
        what = kind(result)
        counts[what] += 1
        samples.update(passed=result["passed"], failed=result["failed"])
        if not result["no_row"]:
            of_rows.update(passed=result["passed"], failed=result["failed"])
        note = "; ".join(result["failures"][:1]) or ", ".join(result["no_row"]) or "; ".join(f"{n}: {r}" for n, r in result["refused"].items())
        print(f"{name:56} {what:9} {result['passed']:6} {result['failed']:6}  {note[:150]}")
        if what == "crash" or result["failed"] > max(known.get(name, 0), known.get(f"{dtype}:{name}", 0)):
            unknown.append(name)
    share = 100 * of_rows["passed"] / max(1, of_rows.total())
    print(f"\n{dtype}: {len(results)} entries: " + ", ".join(f"{n} {what}" for what, n in counts.most_common()))
    print(f"samples: {samples['passed']} pass, {samples['failed']} fail; of entries whose operators all have rows "
          f"{of_rows['passed']} pass, {of_rows['failed']} fail: {share:.1f} %")
    if unknown:
        print("fail more often than known_failures.toml allows: " + ", ".join(unknown))
    return not unknown


def write_table(runs, path):
    """Writes a table of all entries with their outcome for each dtype."""
    dtypes = [d for d in ("float32", "float16", "bfloat16", "int64", "bool", "errors") if d in runs]
    lines = [
        "# PyTorch's database of operators on claystone", "",
        "Each entry of `op_db`, for each dtype: `row` (claystone computed all samples), `partly` (claystone refused some calls, which ran on PyTorch's CPU),",
        "`fallback` (uses an operator without a row), `none` (PyTorch's CPU supports no sample), `fails a/b` (a of b samples; the reasons are in",
        "[known_failures.toml](known_failures.toml)), empty (not for this dtype). `errors` are calls that must raise. Written by",
        "`opinfo.py --write-table`.", "",
        "| entry | " + " | ".join(dtypes) + " | without a row |", "|---" * (2 + len(dtypes)) + "|",
    ]

    def cell(result, dtype):
        if result is None:
            return ""
        what = kind(result)
        if what == "fails":
            return f"fails {result['failed']}/{result['failed'] + result['passed']}"
        return "raises" if dtype == "errors" and what == "row" else what

    for name in sorted({name for results in runs.values() for name in results}):
        found = {d: runs[d].get(name) for d in dtypes}
        missing = sorted({operator for result in found.values() if result for operator in result["no_row"]})
        lines.append(f"| {name} | " + " | ".join(cell(found[d], d) for d in dtypes) + f" | {' '.join(missing)} |")
    path.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="*", default=["float32"], help="dtypes and `errors`, run in order")
    parser.add_argument("--samples", type=int, default=1000, help="maximum number per entry")
    isolated.add_options(parser)
    parser.add_argument("--json", help="a file in which the results of these dtypes are replaced")
    parser.add_argument("--write-table", help="a file for a table of all results, including those in --json")
    arguments = parser.parse_args()
    if arguments.worker:
        warnings.simplefilter("ignore")
        compute = lambda op, name: run_entry(op, name, arguments.dtype[0], arguments.samples)
        return isolated.worker(arguments, entries(arguments.entries), compute)
    kept = Path(arguments.json) if arguments.json else None
    runs = json.loads(kept.read_text()) if kept and kept.exists() else {}
    good = True
    for dtype in arguments.dtype:
        begun = time.time()
        results = isolated.run(__file__, ["--dtype", dtype, "--samples", str(arguments.samples)], arguments)
        good &= table(results, dtype)
        print(f"{time.time() - begun:.0f} s")
        runs[dtype] = results
        if kept:
            kept.write_text(json.dumps(runs, indent=1, sort_keys=True))
    if arguments.write_table:
        write_table(runs, Path(arguments.write_table))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
