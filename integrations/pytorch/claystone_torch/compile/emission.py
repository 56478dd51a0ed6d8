"""Emission: turns a graph of aten operators into the instructions of a CompiledGraph."""

import operator

import torch

from .. import _C
from . import rewrites
from .formulas import is_tensor, value_of
from .fusion import Fusion, may_alias, mutated_inputs, program_of, shape_key, stride_key, written_inputs


def emit(gm, capture=False):
    """Compiles a graph. Returns a function of a list of arguments, which it empties.

    With `capture`, OpenCL devices capture the graph's commands at the second call and replay them from then on.
    """
    rewrites.apply(gm.graph)
    return _Emission(gm).emit(capture)


class _Emission:
    def __init__(self, gm):
        self.gm, self.graph = gm, gm.graph
        self.slots = {}
        self.attributes = {}  # of the graph, which are no tensors
        self.instructions = []  # (method, arguments, results, uses)
        self.sizes = {}  # from expressions of dynamic shapes to slots

    def emit(self, capture):
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self.slot(node)
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.attribute(node)
        fusion = Fusion(self.graph)
        for unit in fusion.ordered():
            self.unit(unit, fusion)
        results = [self.entry(value) for value in output.args[0]]
        kept = {slot for kind, slot in results if kind == "slot"}
        changed = written_inputs(self.graph)
        written = [i for i, node in enumerate(placeholders) if node in changed]
        compiled = _C.CompiledGraph(len(self.slots), len(placeholders), written if capture else None)
        for (method, arguments, written, _), freed in zip(self.instructions, self.last_uses(kept, len(placeholders))):
            getattr(compiled, method)(*arguments, written, freed)
        compiled.set_outputs(results)
        return compiled.run

    def slot(self, key):
        return self.slots.setdefault(key, len(self.slots))

    def last_uses(self, kept, inputs):
        """The slots to empty after each instruction."""
        seen, freed = set(kept), []
        for _, _, written, uses in reversed(self.instructions):
            last = {slot for slot in [*uses, *written] if slot not in seen}
            seen |= last
            freed.append(sorted(last))
        return reversed(freed)

    def add(self, method, arguments, written, uses):
        self.instructions.append((method, arguments, written, uses))

    def entry(self, value):
        """An argument for C++."""
        if isinstance(value, torch.fx.Node):
            return "slot", self.slots[value]
        if isinstance(value, (list, tuple)) and any(isinstance(one, torch.fx.Node) for one in value):
            return "list", [self.entry(one) for one in value]
        return "constant", value

    def attribute(self, node):
        value = self.gm
        for name in node.target.split("."):
            value = getattr(value, name)
        if isinstance(value, torch.Tensor):
            self.add("add_python", [lambda: value, []], [self.slot(node)], [])
        else:
            self.attributes[node] = value

    def unit(self, unit, fusion):
        members = set(unit.nodes)
        if unit.recipes and self.is_worth_a_formula(unit):
            return self.formula(unit, lambda node: fusion.is_output(node, members))
        for node in unit.nodes:
            if node not in self.slots:  # items of several results have slots already
                self.call(node)

    @staticmethod
    def is_worth_a_formula(unit):
        """Whether a unit runs as a formula. Single copies and casts have kernels of their own."""
        (first,) = [unit.nodes[0]] if len(unit.nodes) == 1 else [None]
        if first is None:
            return True
        made = unit.recipes[first]
        return bool(made.lines) and Fusion.computes_as(made.kind, made.tensors(), [first])

    # ---- operators

    def call(self, node):
        if not isinstance(node.target, torch._ops.OpOverload) or any(operand in self.attributes for operand in node.all_input_nodes):
            return self.python(node)
        schema = node.target._schema
        if len(schema.returns) == 1 and not str(schema.returns[0].type).startswith(("Tensor", "List[Tensor", "Optional[Tensor")):
            return self.python(node)  # sizes of dynamic shapes
        given = dict(zip((parameter.name for parameter in schema.arguments), node.args)) | node.kwargs
        arguments = [self.entry(given.get(parameter.name, parameter.default_value)) for parameter in schema.arguments]
        uses = [self.slots[operand] for operand in node.all_input_nodes]
        if len(schema.returns) > 1:
            written = self.items(node, len(schema.returns))
        elif schema.returns and isinstance(schema.returns[0].type, torch.ListType):
            written = self.items(node, len(value_of(node)))
        else:
            written = [self.slot(node)] if schema.returns else []
        value = value_of(node)
        values = [] if may_alias(node) else list(value) if isinstance(value, (list, tuple)) else [value]
        strides = [self.strides(one) for one in values]
        uses += [number[1] for one in strides if one for number in one if isinstance(number, tuple)]
        self.add("add_operator", [schema.name, schema.overload_name, arguments, strides], written, uses)

    def strides(self, value):
        """The strides that the rest of the graph expects of a result; None if it is no tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        return [self.size(stride) for stride in value.stride()] if value.device.type == "claystone" else []

    def items(self, node, count):
        """Slots of the results of a node with several results."""
        written = [self.slot((node, i)) for i in range(count)]
        for user in node.users:
            if user.target is operator.getitem:
                self.slots[user] = written[user.args[1]]
        return written

    def python(self, node):
        """Calls a function in Python: arithmetic of sizes, higher-order operators."""
        operands = [operand for operand in node.all_input_nodes if operand not in self.attributes]
        target, args, kwargs = node.target, node.args, node.kwargs

        def call(*values):
            known = {**self.attributes, **dict(zip(operands, values))}
            given = torch.fx.node.map_arg((args, kwargs), lambda n: known[n])
            return target(*given[0], **given[1])

        slots = [self.slots[operand] for operand in operands]
        several = isinstance(value_of(node), (list, tuple))
        written = self.items(node, len(value_of(node))) if several else [self.slot(node)]
        self.add("add_python", [call, slots], written, slots)

    # ---- formulas

    def formula(self, unit, is_output):
        program, inputs, scalars, outputs = program_of(unit, is_output)
        results = []
        for node in outputs:
            value = value_of(node)
            if mutated_inputs(node):
                results.append(([], [], value.dtype, self.slots[node.args[0]]))
            else:
                results.append(([self.size(n) for n in value.shape], [self.size(n) for n in value.stride()], value.dtype, None))
        uses = [self.slots[operand] for operand in [*inputs, *scalars]]
        uses += [result[3] for result in results if result[3] is not None]
        uses += [number[1] for result in results for number in [*result[0], *result[1]] if isinstance(number, tuple)]
        device = value_of(outputs[0]).device.index or 0
        written = [self.slot(node) for node in outputs]
        self.add("add_formula", [program, [self.slots[x] for x in inputs], [self.slots[x] for x in scalars], results, device], written, uses)

    def size(self, size):
        """A size or stride: a number, or ("slot", index) for a size of a dynamic shape."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if expression not in self.sizes:
            self.sizes[expression] = self.computed_size(expression)
        return "slot", self.sizes[expression]

    def computed_size(self, expression):
        from torch.utils._sympy.printers import PythonPrinter

        symbols = sorted(expression.free_symbols, key=str)
        slots = [self.symbol(symbol) for symbol in symbols]
        if expression in symbols:
            return slots[0]
        text = f"lambda {', '.join(str(symbol) for symbol in symbols)}: {PythonPrinter().doprint(expression)}"
        import math

        slot = self.slot(expression)
        self.add("add_python", [eval(text, {"math": math, "torch": torch, "min": min, "max": max}), slots], [slot], slots)
        return slot

    def symbol(self, symbol):
        """The slot of a symbol: an argument of the graph, or a size of one of its tensors."""
        if symbol in self.sizes:
            return self.sizes[symbol]
        for node in self.graph.nodes:
            value = value_of(node)
            if node.op == "placeholder" and isinstance(value, torch.SymInt) and value.node.expr == symbol:
                self.sizes[symbol] = self.slots[node]
                return self.slots[node]
        for node in self.graph.nodes:
            value = value_of(node)
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(shape_key(value)):
                if size == symbol:
                    slot = self.sizes[symbol] = self.slot(symbol)
                    self.add("add_python", [lambda tensor, dim=dim: tensor.size(dim), [self.slots[node]]], [slot], [self.slots[node]])
                    return slot
        raise RuntimeError(f"the graph has no argument with the size {symbol}")
