"""Fusion: which nodes of a graph become one formula, and in which order units run.

A unit is one node, or several nodes that become one formula. Nodes are merged if they have one shape and compute in one type, and if no
other unit has to run between them.
"""

import heapq

import torch

from .formulas import Line, is_number, is_tensor, kind_of, recipe, value_of

aten = torch.ops.aten

# Limits of one launch: tensors and lines of a formula.
MAX_TENSORS = 24
MAX_LINES = 96
KINDS = "bifd"


def shape_key(value):
    """The shape for comparisons: sizes as numbers, or the expressions of dynamic sizes."""
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in value.shape)


def stride_key(value):
    return tuple(stride.node.expr if isinstance(stride, torch.SymInt) else stride for stride in value.stride())


def mutated_inputs(node):
    """The arguments that the node's operator writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = list(node.args[3:5]) if node.target is aten.native_batch_norm.default else []  # its schema does not name its statistics
    for i, parameter in enumerate(node.target._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            argument = node.args[i] if i < len(node.args) else node.kwargs.get(parameter.name)
            written += argument if isinstance(argument, (list, tuple)) else [argument]
    return [argument for argument in written if isinstance(argument, torch.fx.Node)]


def may_alias(node):
    """Whether the node's result may share memory with an argument."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any(value.alias_info is not None for value in node.target._schema.returns)
    return True


def is_random(node):
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


class Unit:
    """Nodes that run together. `recipes` has a recipe for each node of a formula; it is empty for a unit that is one operator."""

    def __init__(self, node, position, made):
        self.nodes, self.position = [node], position
        self.recipes = {node: made} if made else {}
        self.before = set()  # nodes that run earlier and are not members
        self.after = set()

    @property
    def kind(self):
        return max((made.kind for made in self.recipes.values()), key=KINDS.index)

    @property
    def place(self):
        """The device and the shape, which all nodes of a formula have in common."""
        value = value_of(self.nodes[0])
        return value.device, shape_key(value)


def roots_of(graph):
    """A dict from inputs and views to the input or result that each is a view of."""
    roots = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            roots[node] = node
        elif node.op == "call_function" and may_alias(node) and node.all_input_nodes:
            roots[node] = roots.get(node.all_input_nodes[0], node.all_input_nodes[0])
    return roots


def written_inputs(graph):
    """The inputs and results that the graph's operators write after they were made."""
    roots = roots_of(graph)
    return {roots.get(operand, operand) for node in graph.nodes for operand in mutated_inputs(node)}


def dependencies(graph):
    """A dict from node to the nodes that must run before it: operands, and readers of memory that the node overwrites."""
    before = {}
    roots = roots_of(graph)
    last_random = None
    readers = {}
    writers = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        needed = {operand for operand in node.all_input_nodes}
        written = {roots.get(operand, operand) for operand in mutated_inputs(node)}
        read = {roots.get(operand, operand) for operand in node.all_input_nodes}
        for memory in written:
            needed |= readers.get(memory, set())
        for memory in read | written:
            needed |= writers.get(memory, set())
        for memory in written:
            writers[memory] = {node}
        for memory in read - written:
            readers.setdefault(memory, set()).add(node)
        if is_random(node):
            needed |= {last_random} if last_random else set()
            last_random = node
        needed.discard(node)
        before[node] = {operand for operand in needed if operand.op not in ("placeholder", "get_attr")}
    return before


class Fusion:
    def __init__(self, graph):
        self.unit_of = {}
        self.index = {node: i for i, node in enumerate(graph.nodes)}
        before = dependencies(graph)
        for position, node in enumerate(graph.nodes):
            if node.op != "call_function":
                continue
            unit = Unit(node, position, self._recipe(node))
            unit.before = set(before[node])
            self.unit_of[node] = unit
            for other in unit.before:
                self.unit_of[other].after.add(node)
        self.merge_all()

    def _recipe(self, node):
        made = recipe(node)
        if made is None:
            return None
        value = value_of(node)
        if mutated_inputs(node):
            # A copy into an input of the graph: the formula writes that input.
            target = node.args[0]
            if node.target is not aten.copy_.default or target.op != "placeholder" or value_of(target).device.type != "claystone":
                return None
        return made

    def merge_all(self):
        for node in list(self.unit_of):
            unit = self.unit_of[node]
            if not unit.recipes:
                continue
            for operand in sorted(unit.before, key=lambda n: -self.unit_of[n].position):
                self.try_merge(self.unit_of[operand], self.unit_of[node])
            # Formulas that read the same tensors share their loads.
            for operand in self.unit_of[node].recipes[node].tensors():
                for other in operand.users:
                    if other in self.unit_of and self.unit_of[other].recipes and self.unit_of[other].position < self.unit_of[node].position:
                        self.try_merge(self.unit_of[other], self.unit_of[node])

        self.merge_independent()

    def merge_independent(self):
        """Merges formulas that read nothing of each other: those that only change inputs of the graph, such as an optimiser's steps for
        parameters of one shape, and those of tensors without dims, such as its step counts.
        """
        open_units = {}  # from device, shape and kind
        for unit in list({id(unit): unit for unit in self.unit_of.values()}.values()):
            if unit.recipes and (unit.place[1] == () or all(mutated_inputs(node) or not self.is_output(node, set(unit.nodes)) for node in unit.nodes)):
                key = unit.place, unit.kind
                if key in open_units:
                    self.try_merge(open_units[key], unit)
                open_units[key] = unit

    def try_merge(self, first, second):
        if first is second or not first.recipes or not second.recipes or first.place != second.place or not self.fits(first, second):
            return
        if self.is_path_around(first, second) or self.is_path_around(second, first):
            return
        second.nodes = sorted(first.nodes + second.nodes, key=self.index.get)
        second.recipes |= first.recipes
        second.before |= first.before
        second.after |= first.after
        second.position = max(first.position, second.position)
        members = set(second.nodes)
        second.before -= members
        second.after -= members
        for node in first.nodes:
            self.unit_of[node] = second

    def fits(self, first, second):
        kinds = {first.kind, second.kind} - {"b"}
        if len(kinds) > 1:
            return False
        kind = kinds.pop() if kinds else "b"
        members = set(first.nodes) | set(second.nodes)
        recipes = {**first.recipes, **second.recipes}
        tensors = {tensor for made in recipes.values() for tensor in made.tensors()}
        # Within a formula a value has the type of the computation: integers narrower than i64 would not wrap around.
        for tensor in tensors & members:
            dtype = value_of(tensor).dtype
            if dtype != torch.bool and (kind_of(dtype) != kind or kind == "i" and dtype != torch.int64):
                return False
        lines = sum(len(made.lines) for made in recipes.values())
        outputs = [node for node in members if self.is_output(node, members)]
        return lines <= MAX_LINES and len(tensors - members) + len(outputs) <= MAX_TENSORS and self.computes_as(kind, tensors - members, outputs)

    @staticmethod
    def computes_as(kind, inputs, outputs):
        """Whether claystone computes in this type: in the widest type of the inputs, or in that of the outputs if all inputs are integers."""
        floats = [{kind_of(value_of(tensor).dtype) for tensor in tensors} & {"f", "d"} for tensors in (inputs, outputs)]
        decisive = floats[0] or floats[1]
        return decisive == {kind} if kind in "fd" else not decisive

    def is_output(self, node, members):
        return bool(mutated_inputs(node)) or any(user not in members for user in node.users)

    def is_path_around(self, first, second):
        """Whether another unit runs after `first` and before `second`."""
        seen, stack = set(), [unit for unit in self.units_after(first) if unit is not second]
        while stack:
            unit = stack.pop()
            if id(unit) in seen:
                continue
            seen.add(id(unit))
            for later in self.units_after(unit):
                if later is second:
                    return True
                stack.append(later)
        return False

    def units_after(self, unit):
        return {id(other): other for other in (self.unit_of[node] for node in unit.after) if other is not unit}.values()

    def ordered(self):
        """The units in an order in which each runs after those it depends on."""
        units = {id(unit): unit for unit in self.unit_of.values()}
        waiting = {key: {id(self.unit_of[node]) for node in unit.before} for key, unit in units.items()}
        ready = [(unit.position, key) for key, unit in units.items() if not waiting[key]]
        heapq.heapify(ready)
        done = []
        while ready:
            _, key = heapq.heappop(ready)
            done.append(units[key])
            for node in units[key].after:
                later = id(self.unit_of[node])
                if key in waiting[later]:
                    waiting[later].discard(key)
                    if not waiting[later]:
                        heapq.heappush(ready, (units[later].position, later))
        assert len(done) == len(units), "fused units depend on each other in a circle"
        return done


def program_of(unit, is_output):
    """The text of a unit's formula, and its tensors, numbers and results: (program, inputs, scalars, outputs)."""
    inputs, scalars, lines, names = [], [], [], {}

    def numbered(list_, node, letter):
        if node not in list_:
            list_.append(node)
        return f"{letter}{list_.index(node)}"

    def word(operand, own):
        if isinstance(operand, Line):
            return own[operand.index]
        if isinstance(operand, float):
            return repr(operand)
        if operand in names:
            return names[operand]
        if is_tensor(operand) and not is_number(operand):
            return numbered(inputs, operand, "x")
        return numbered(scalars, operand, "s")

    for node in unit.nodes:
        made, own = unit.recipes[node], []
        for operation, operands in made.lines:
            lines.append(" ".join([operation, *(word(operand, own) for operand in operands)]))
            own.append(f"v{len(lines) - 1}")
        names[node] = word(made.result, own)
    outputs = [node for node in unit.nodes if is_output(node)]
    lines.append(" ".join(["return", *(names[node] for node in outputs)]))
    return "\n".join(lines), inputs, scalars, outputs
