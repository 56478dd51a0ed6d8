"""Formulas of operators: what one node of a graph contributes to a fused launch.

The formulas come from the same rows of operators.toml as the kernels. A row's program is evaluated with the node's arguments: conditions
and dtypes are known when the graph is compiled, tensors become operands, and claystone's operations become lines of the formula.
"""

import ast
import functools
import math
import tomllib
from dataclasses import dataclass
from importlib import resources

import torch

from .. import _C
from ..table import rows

aten = torch.ops.aten

# Formulas of operators that have no elementwise row. `same` is the operand itself, converted to the dtype of the result.
MORE = {
    "add.Scalar": [{"if": "alpha == 1", "do": "add(self, other)"}, "add_alpha(self, other, alpha)"],
    "sub.Scalar": [{"if": "alpha == 1", "do": "sub(self, other)"}, "sub_alpha(self, other, alpha)"],
    "mul.Scalar": "mul(self, other)",
    "div.Scalar": "div(self, other)",
    "rsub.Scalar": [{"if": "alpha == 1", "do": "rsub_scalar(self, other)"}],
    "remainder.Scalar": "remainder(self, other)",
    "fmod.Scalar": "fmod(self, other)",
    "where.ScalarSelf": "where_cond(condition, self, other)",
    "where.ScalarOther": "where_cond(condition, self, other)",
    "pow.Tensor_Scalar": [
        {"if": "exponent == -1", "do": "reciprocal(self)"}, {"if": "exponent == -0.5", "do": "rsqrt(self)"},
        {"if": "exponent == 0.5", "do": "sqrt(self)"}, "pow_scalar(self, exponent)"],
    "fill.Scalar": "same(value)",
    "_to_copy": "same(self)",
    "clone": "same(self)",
    "copy": "same(src)",
    "copy_": "same(src)",
}
OF_BOOLS = {
    "bitwise_not": "logical_not(self)",
    "bitwise_and.Tensor": "logical_and(self, other)",
    "bitwise_or.Tensor": "logical_or(self, other)",
    "bitwise_xor.Tensor": "logical_xor(self, other)",
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
GREATEST_EXACT = 2**53


class NoFormula(Exception):
    """The node is not part of a formula: it runs as an operator."""


@dataclass(frozen=True)
class Operation:
    """The operations that formulas may contain: how many tensors and numbers they take, and of which dtypes."""

    tensors: int
    scalars: int
    dtypes: str


@functools.cache
def operations():
    lines = (line.split() for line in _C.formula_operations().splitlines())
    return {name: Operation(int(tensors), int(scalars), dtypes) for name, tensors, scalars, dtypes in lines}


@functools.cache
def programs():
    """A dict from operator to its programs, as (condition, program) in Python's syntax trees."""
    table = tomllib.loads(resources.files("claystone_torch").joinpath("operators.toml").read_text())
    table = {section: table[section] for section in table if section.startswith("elementwise") or section == "activations"}
    found = {}
    for name, given in [*rows(table), *rows({"elementwise": MORE})]:
        try:
            found[name] = [(_parsed(condition), _parsed(program)) for condition, program, *_ in given]
        except SyntaxError:
            continue  # assignments and choices: not one formula
    return found


def _parsed(text):
    return ast.parse(text.strip(), mode="eval").body if text else None


def name_of(target):
    """The operator's name as in operators.toml, or None if the target is no operator of aten."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    if target is torch.ops.prims.convert_element_type.default:
        return "_to_copy"
    name = target._schema.name.split("::")[1]
    return name if target._overloadname == "default" else f"{name}.{target._overloadname}"


def kind_of(dtype):
    """b for bool, i for integers, f for floats that compute in f32, d for f64. Other dtypes have no formulas."""
    if dtype == torch.bool:
        return "b"
    if dtype in (torch.float32, torch.float16, torch.bfloat16):
        return "f"
    if dtype == torch.float64:
        return "d"
    if dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        return "i"
    raise NoFormula


def value_of(node):
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else None


def is_tensor(value):
    return isinstance(value_of(value), torch.Tensor)


def is_number(value):
    """Whether an argument is a number: of Python, a size of a dynamic shape, or a tensor of the CPU without dims."""
    if is_tensor(value):
        return value_of(value).device.type == "cpu" and value_of(value).dim() == 0
    return isinstance(value, (int, float, bool)) or isinstance(value_of(value), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


@dataclass
class Recipe:
    """The lines of one node's formula. An operand is a node (a tensor, or a number of the graph), a float, or the index of an earlier line."""

    lines: list  # of (operation, operands)
    result: object
    kind: str  # the type in which the formula computes, as kind_of

    def tensors(self):
        """The tensors that the formula reads, in order of their first use."""
        operands = [operand for _, operands in self.lines for operand in operands] + [self.result]
        return list(dict.fromkeys(x for x in operands if isinstance(x, torch.fx.Node) and not is_number(x)))

    def numbers(self):
        operands = [operand for _, operands in self.lines for operand in operands] + [self.result]
        return list(dict.fromkeys(x for x in operands if isinstance(x, torch.fx.Node) and is_number(x)))


@dataclass(frozen=True)
class Line:
    index: int


class _Evaluation:
    """Evaluates programs of rows for one node."""

    def __init__(self, node, arguments):
        self.node, self.arguments, self.lines = node, arguments, []

    def __call__(self, tree):
        method = getattr(self, "_" + type(tree).__name__.lower(), None)
        if method is None:
            raise NoFormula
        return method(tree)

    def _constant(self, tree):
        return tree.value

    def _name(self, tree):
        known = {"true": True, "false": False, "none": None}
        if tree.id in known:
            return known[tree.id]
        if tree.id not in self.arguments:
            raise NoFormula
        return self.arguments[tree.id]

    def _number(self, tree):
        value = self(tree)
        if isinstance(value, (torch.fx.Node, Line)):
            raise NoFormula  # a condition on a number that may change
        return value

    def _compare(self, tree):
        if len(tree.ops) != 1:
            raise NoFormula
        a, b = self._number(tree.left), self._number(tree.comparators[0])
        return {ast.Eq: lambda: a == b, ast.NotEq: lambda: a != b, ast.Lt: lambda: a < b, ast.Gt: lambda: a > b}[type(tree.ops[0])]()

    def _boolop(self, tree):
        values = (self(value) for value in tree.values)
        return all(values) if isinstance(tree.op, ast.And) else any(values)

    def _unaryop(self, tree):
        value = self._number(tree.operand)
        return not value if isinstance(tree.op, ast.Not) else -value

    def _binop(self, tree):
        a, b = self._number(tree.left), self._number(tree.right)
        return {ast.Add: lambda: a + b, ast.Sub: lambda: a - b, ast.Mult: lambda: a * b, ast.Div: lambda: a / b}[type(tree.op)]()

    def _list(self, tree):
        return [self(entry) for entry in tree.elts]

    def _subscript(self, tree):
        # gradient(operation(...), [gradient], [true])[0]
        call = tree.value
        if not (isinstance(call, ast.Call) and call.func.id == "gradient" and self(tree.slice) == 0):
            raise NoFormula
        operation, gradients, wanted = call.args
        (gradient,) = self(gradients)
        if self(wanted) != [True]:
            raise NoFormula
        slope = self._operation(operation.func.id, [self(argument) for argument in operation.args], "'0")
        return self._operation("mul", [gradient, slope])

    def _call(self, tree):
        if tree.keywords or not isinstance(tree.func, ast.Name):
            raise NoFormula
        name = tree.func.id
        if name in ("is_none", "is_tensor"):
            value = self(tree.args[0])
            return value is None if name == "is_none" else is_tensor(value) and not is_number(value)
        if name in ("is_bool", "is_float", "is_half"):
            dtype = self._dtype(self(tree.args[0]))
            return {"is_bool": dtype == torch.bool, "is_float": dtype.is_floating_point, "is_half": dtype in (torch.float16, torch.bfloat16)}[name]
        if name == "rank":
            return value_of(self(tree.args[0])).dim()
        if name == "dtype":
            return self._dtype(self(tree.args[0]))
        if name in ("cast", "wide"):  # within one kind, dtypes matter only for results
            value = self(tree.args[0])
            wanted = torch.float32 if name == "wide" else self(tree.args[1])
            if isinstance(value, torch.fx.Node) and kind_of(self._dtype(value)) != kind_of(wanted):
                raise NoFormula
            return value
        if name == "same":
            return self._same(self(tree.args[0]))
        return self._operation(name, [self(argument) for argument in tree.args])

    def _same(self, value):
        wanted = value_of(self.node).dtype
        if is_tensor(value) and wanted == torch.bool and self._dtype(value) != torch.bool:
            return self._operation("ne_scalar", [value, 0.0])
        if not is_tensor(value) and not wanted.is_floating_point:
            if isinstance(value, torch.fx.Node):
                raise NoFormula
            return bool(value) if wanted == torch.bool else int(value)
        return value

    @staticmethod
    def _dtype(value):
        if is_tensor(value):
            return value_of(value).dtype
        if isinstance(value, bool):
            return torch.bool
        if isinstance(value, (int, float)):
            return torch.int64 if isinstance(value, int) else torch.float64
        raise NoFormula

    def _operation(self, name, values, suffix=""):
        known = operations()
        second = values[1] if len(values) > 1 else None
        if name + "_scalar" in known and second is not None and not isinstance(second, Line) and is_number(second):
            name += "_scalar"
        if name.removesuffix("_scalar") in COMPARISONS and is_tensor(values[0]) and is_number(second):
            values[1] = self._rounded(second, self._dtype(values[0]))
        operation = known.get(name)
        if operation is None or len(values) != operation.tensors + operation.scalars:
            raise NoFormula
        self.lines.append((name + suffix, [self._operand(value) for value in values]))
        return Line(len(self.lines) - 1)

    @staticmethod
    def _rounded(number, dtype):
        """The number that a comparison with halves uses, rounded to their dtype."""
        if dtype not in (torch.float16, torch.bfloat16):
            return number
        if isinstance(number, torch.fx.Node):
            raise NoFormula
        return torch.tensor(number, dtype=dtype).item() if math.isfinite(number) else number

    @staticmethod
    def _operand(value):
        if isinstance(value, Line) or is_tensor(value) or isinstance(value, torch.fx.Node) and is_number(value):
            return value
        if isinstance(value, (bool, int, float)) and (isinstance(value, float) or abs(value) <= GREATEST_EXACT):
            return float(value)
        raise NoFormula


def _bound(node):
    """The node's arguments by name, with defaults."""
    parameters = node.target._schema.arguments
    bound = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    bound.update(zip((parameter.name for parameter in parameters), node.args))
    bound.update(node.kwargs)
    return bound


def recipe(node):
    """The recipe of a node of an operator, or None if the node has no formula."""
    name = name_of(node.target) if node.op == "call_function" else None
    value = value_of(node)
    if name is None or not isinstance(value, torch.Tensor) or value.device.type != "claystone" or value.layout != torch.strided:
        return None
    try:
        if name in OF_BOOLS and value.dtype == torch.bool:
            alternatives = [(None, _parsed(OF_BOOLS[name]))]
        else:
            alternatives = programs().get(name)
        if alternatives is None:
            return None
        if node.target is torch.ops.prims.convert_element_type.default:
            arguments = {"self": node.args[0]}
        else:
            arguments = _bound(node)
        for condition, program in alternatives:
            evaluation = _Evaluation(node, arguments)
            if condition is None or evaluation(condition):
                return _finished(node, evaluation, evaluation(program))
    except NoFormula:
        pass
    return None


def _finished(node, evaluation, result):
    if isinstance(result, (bool, int, float)):
        result = evaluation._operand(result)
    if not isinstance(result, (Line, float, torch.fx.Node)):
        raise NoFormula
    made = Recipe(evaluation.lines, result, "b")
    if any(value_of(tensor).device != value_of(node).device for tensor in made.tensors()):
        raise NoFormula
    dtypes = [value_of(tensor).dtype for tensor in made.tensors()] + [value_of(node).dtype]
    kinds = {kind_of(dtype) for dtype in dtypes}
    operands = [operand for _, operands in made.lines for operand in operands]
    fractions = any(isinstance(x, float) and (not math.isfinite(x) or x != int(x)) for x in operands)
    of_numbers = {kind_of(value_of(n).dtype) if is_tensor(n) else "f" if isinstance(value_of(n), torch.SymFloat) else "i" for n in made.numbers()}
    if "d" in kinds:
        made.kind = "d"
    elif "f" in kinds or fractions or of_numbers & {"f", "d"}:
        made.kind = "f"
    elif "i" in kinds or "i" in of_numbers:
        made.kind = "i"
    for name, _ in made.lines:
        dtypes = operations()[name.split("'")[0]].dtypes
        if dtypes == "integer" and made.kind != "i" or dtypes == "float" and made.kind not in "fd":
            raise NoFormula
    value = value_of(node)
    if value.dtype == torch.bool and made.lines and not _is_truth(made):
        raise NoFormula  # such as the sum of two bools, whose value within a formula would be 2
    return made


TRUTHS = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isposinf", "isneginf", "signbit", "isfinite", "isinf")


def _is_truth(made):
    if not isinstance(made.result, Line):
        return True
    name, operands = made.lines[made.result.index]
    name = name.removesuffix("_scalar")
    selects = name in ("where_cond", "masked_fill", "mul", "maximum", "minimum")
    return name in TRUTHS or selects and all(not isinstance(x, float) or x in (0.0, 1.0) for x in operands)
