"""Operators that AOTAutograd replaces by others while it traces: operators on lists of tensors, which fuse better one by one."""

import functools

import torch

aten = torch.ops.aten

# Arguments that the operators on single tensors take by name only.
BY_NAME = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
RENAMED = {
    ("maximum", "Scalar"): "clamp_min", ("maximum", "ScalarList"): "clamp_min", ("minimum", "Scalar"): "clamp_max",
    ("minimum", "ScalarList"): "clamp_max", ("clamp_min", "List"): "maximum", ("clamp_max", "List"): "minimum"}
NOT_ELEMENTWISE = ("norm", "max", "powsum", "copy", "zero")


def _one_by_one(operator, name):
    parameters = [parameter.name for parameter in operator._schema.arguments]
    by_name = BY_NAME.get(name)

    def each(*arguments, **named):
        given = dict(zip(parameters, arguments)) | named
        if by_name == "value" and "scalars" in given:
            given["value"] = given.pop("scalars")
        lists = [value for value in given.values() if isinstance(value, (list, tuple))]
        results = []
        for i in range(len(lists[0])):
            own = {key: value[i] if isinstance(value, (list, tuple)) else value for key, value in given.items()}
            numbers = {by_name: own.pop(by_name)} if by_name in own else {}
            results.append(getattr(aten, name)(*own.values(), **numbers))
        return results

    return each


@functools.cache
def table():
    found = {}
    for packet_name in torch._C._dispatch_get_all_op_names():
        if not packet_name.startswith("aten::_foreach_"):
            continue
        full, _, overload = packet_name.removeprefix("aten::").partition(".")
        name = full.removeprefix("_foreach_")
        if name.endswith("_") or overload.endswith("out") or name in NOT_ELEMENTWISE or name in ("addcmul", "addcdiv") and overload == "Tensor":
            continue
        name = RENAMED.get((name, overload), name)
        if hasattr(aten, name):
            operator = getattr(getattr(aten, full), overload or "default")
            found[operator] = _one_by_one(operator, name)
    return found
