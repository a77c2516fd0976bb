"""Passes over the graph of a whole step: gather again in backward, launch early, wait late.

Autograd inside a graph saves views of gathered weights from forward to backward, which would keep every unit's
weights alive. `regather` gives the backward its own gathers. `schedule` then moves each launch ahead of the compute it
can run beside and each wait behind it, in one order on every rank. Both work on ATen graphs with functional
collectives, whatever compiles them afterwards.

Why not the compiler's own means: tagging gathers for recompute misses weights that autograd saved through an untagged
transpose, and its overlap scheduler is absent on CPUs and differs between releases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import fx
from torch.fx.node import map_arg

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

GATHER = _c10d.all_gather_into_tensor.default
WAIT = _c10d.wait_tensor.default
REDUCTIONS = (_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default)
COLLECTIVES = (GATHER, *REDUCTIONS, _c10d.all_to_all_single.default, _c10d.broadcast.default)

# What gives a second name to the same memory.
VIEWS = frozenset(
    (
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.slice.Tensor,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.expand.default,
        _aten.as_strided.default,
        _aten.select.int,
        _aten.squeeze.dim,
        _aten.squeeze.default,
        _aten.unsqueeze.default,
        _aten.detach.default,
        _aten.alias.default,
        _aten.split_with_sizes.default,
        torch.ops.prims.view_of.default,
    )
)

# Key of the annotation that `traced.py` puts on gathers that backward makes again.
REGATHER = "mfsdp_fn.regather"


def is_backward(node: fx.Node) -> bool:
    """Whether the node was traced under the backward annotation."""
    return (node.meta.get("custom") or {}).get("phase") == "backward"


def _is_regathered(node: fx.Node) -> bool:
    return bool((node.meta.get("custom") or {}).get(REGATHER))


def _views_of(wait: fx.Node) -> list[fx.Node]:
    """`wait` and everything that is a view of it, in order."""
    found, queue = [wait], [wait]
    while queue:
        for user in queue.pop().users:
            if user.target in VIEWS and user not in found:
                found.append(user)
                queue.append(user)
    order = {node: place for place, node in enumerate(wait.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _users_in(nodes: Iterable[fx.Node], place: dict[fx.Node, int], start: int) -> list[fx.Node]:
    return [user for node in nodes for user in node.users if place[user] >= start and user.op != "output"]


def regather(graph: fx.Graph) -> int:
    """Let backward gather annotated weights again; gives the number of gathers added.

    For every annotated gather of the forward, the backward's uses of its views get views of a new gather of the same
    shard, placed before the first of them.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    start = next((place[node] for node in graph.nodes if is_backward(node)), None)
    if start is None:
        return 0
    added = 0
    for launch in [node for node in graph.nodes if node.target is GATHER and _is_regathered(node)]:
        if place[launch] >= start:
            continue
        for wait in [user for user in launch.users if user.target is WAIT]:
            forward = [node for node in _views_of(wait) if place[node] < start]
            users = _users_in(forward, place, start)
            if not users:
                continue
            _copy_for(graph, users, [launch, *forward], before=min(users, key=place.__getitem__))
            added += 1
    graph.eliminate_dead_code()
    return added


def _copy_for(graph: fx.Graph, users: list[fx.Node], nodes: list[fx.Node], *, before: fx.Node) -> None:
    """Give `users` copies of `nodes`, which stand in order."""
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        return copies.get(node, node)

    with graph.inserting_before(before):
        for node in nodes:
            copies[node] = graph.node_copy(node, copied)
            copies[node].meta["custom"] = {**(node.meta.get("custom") or {}), "phase": "backward"}
    for user in users:
        user.args = map_arg(user.args, copied)
        user.kwargs = map_arg(user.kwargs, copied)


def schedule(graph: fx.Graph) -> None:
    """Launch each gather one unit ahead, and wait for each reduction when the next one starts.

    A gather's launch moves in front of the wait before it (in graph order), so that it runs beside the compute that
    uses that one; only one is ahead at a time, as in eager. A reduction's wait moves down to where its result is used
    or, at the latest, to the next reduction, so that one input buffer is alive at a time.
    """
    waits = [
        node
        for node in graph.nodes
        if node.target is WAIT and isinstance(node.args[0], fx.Node) and node.args[0].target is GATHER
    ]
    for earlier, later in itertools.pairwise(waits):
        launch = later.args[0]
        assert isinstance(launch, fx.Node)
        _hoist(graph, launch, earlier)
    _sink_reduction_waits(graph)


def _hoist(graph: fx.Graph, launch: fx.Node, target: fx.Node) -> None:
    """Move `launch`, with whatever cheap it needs, in front of `target`, if nothing that it needs comes later."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    if place[launch] <= place[target]:
        return
    chain, queue = {launch}, [launch]
    while queue:
        for needed in queue.pop().all_input_nodes:
            if place[needed] >= place[target] and needed not in chain:  # also the target itself
                if needed.target in COLLECTIVES or needed.target is WAIT:
                    return  # depends on communication that has not happened there
                chain.add(needed)
                queue.append(needed)
    for node in sorted(chain, key=place.__getitem__):
        target.prepend(node)


def _sink_reduction_waits(graph: fx.Graph) -> None:
    reductions = [node for node in graph.nodes if node.target in REDUCTIONS]
    for launch, following in itertools.pairwise(reductions):
        place = {node: at for at, node in enumerate(graph.nodes)}
        dependent: list[fx.Node] = []
        for node in list(graph.nodes)[place[launch] + 1 : place[following]]:
            waits_here = node.target is WAIT and node.args[0] is launch
            if waits_here or any(needed in dependent for needed in node.all_input_nodes):
                dependent.append(node)
        if any(needed in dependent for needed in following.all_input_nodes):
            continue
        for node in dependent:
            following.prepend(node)
