"""Rewrites of a graph before fusion."""

import operator

import torch

aten = torch.ops.aten


def apply(graph):
    remove_aliases(graph)
    update_running_statistics_in_place(graph)
    graph.eliminate_dead_code()


def remove_aliases(graph):
    """Replaces detach and alias by their operands: within a compiled graph nothing tells them apart."""
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default) and node.users:
            if any(user.op == "output" for user in node.users):
                continue
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def update_running_statistics_in_place(graph):
    """Lets batch normalisation update its running statistics, instead of copying them afterwards."""
    for node in list(graph.nodes):
        if node.target is not aten._native_batch_norm_legit_functional.default:
            continue
        statistics = node.args[3:5]
        updates = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        copies = []
        for i, statistic in enumerate(statistics):
            update = updates.get(3 + i)
            users = list(update.users) if update is not None else []
            if len(users) != 1 or users[0].target is not aten.copy_.default or users[0].args[0] is not statistic or set(statistic.users) != {node, users[0]}:
                break
            copies.append((users[0], update))
        if len(copies) < 2:
            continue
        for statistic, (copy, update) in zip(statistics, copies):
            copy.replace_all_uses_with(statistic)
            graph.erase_node(copy)
            graph.erase_node(update)
        node.target = aten.native_batch_norm.default  # it writes the statistics
