"""Passes over the graph of a whole step: gather again in backward, launch early, wait late.

Autograd inside a graph saves views of gathered weights from forward to backward, which would keep every unit's
weights alive. `regather` gives the backward its own gathers. `schedule` then moves each launch ahead of the compute it
can run beside and each wait behind it, in one order on every rank. Both work on ATen graphs with functional
collectives, whatever compiles them afterwards.

Why not the compiler's own means: tagging gathers for recompute misses weights that autograd saved through an untagged
transpose, and its overlap scheduler is absent on CPUs and differs between releases.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch.fx.node import map_arg

from . import casting, packing

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

GATHER = _c10d.all_gather_into_tensor.default
GATHERS = (GATHER, casting.INTO)
WAIT = _c10d.wait_tensor.default
REDUCTIONS = (_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default)
PACK = packing.OPERATION
COLLECTIVES = (GATHER, *REDUCTIONS, _c10d.all_to_all_single.default, _c10d.broadcast.default)

# What reads single elements of its input, elementwise in its output. Inductor writes views as reshapes.
_LOOKUPS = frozenset(
    (
        _aten.embedding.default,
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.gather.default,
        _aten.cat.default,  # of uneven segments without their padding
        _aten.reshape.default,
    )
)

# What gives a second name to memory and isn't declared as a view.
_ALIASES = frozenset((_aten._unsafe_view.default, torch.ops.prims.view_of.default, operator.getitem))

# Keys of the annotations that `traced.py` makes. On gathers of `unshard`: whether backward makes them again. On the
# reductions of its transpose: how many of their inputs may be alive at once.
REGATHER = "mfsdp_fn.regather"
INFLIGHT = "mfsdp_fn.inflight"


def is_backward(node: fx.Node) -> bool:
    """Whether the node was traced under the backward annotation."""
    return (node.meta.get("custom") or {}).get("phase") == "backward"


def is_view(node: fx.Node) -> bool:
    """Whether the node is a second name of its first input's memory, or one of its results.

    A reshape is none: it may copy.
    """
    if node.target in _ALIASES:
        return True
    return node.target is not _aten.reshape.default and bool(getattr(node.target, "is_view", False))


def _is_of_unshard(node: fx.Node) -> bool:
    return REGATHER in (node.meta.get("custom") or {})


def _is_regathered(node: fx.Node) -> bool:
    return bool((node.meta.get("custom") or {}).get(REGATHER))


def _regathered_parts(graph: fx.Graph) -> list[list[fx.Node]]:
    """The forward's annotated nodes (cast, gather, wait, views), those of one gathered group together, in order.

    Over one rank there is no gather; a cast alone is made again too. Views alone cost nothing.
    """
    part_of: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if not _is_regathered(node) or is_backward(node):
            continue
        part = [node]
        for needed in node.all_input_nodes:
            if needed in part_of and part_of[needed] is not part:
                part = [*part_of[needed], *part]
                for member in part:
                    part_of[member] = part
        part_of.setdefault(node, part)
    parts = {id(part): part for part in part_of.values()}.values()
    return [part for part in parts if any(not is_view(node) for node in part)]


def _with_views(part: list[fx.Node], place: dict[fx.Node, int], end: int) -> list[fx.Node]:
    """`part` and everything before `end` that is a view of it, in order."""
    found, queue = set(part), [*part]
    while queue:
        for user in queue.pop().users:
            if is_view(user) and user not in found and place[user] < end:
                found.add(user)
                queue.append(user)
    return sorted(found, key=place.__getitem__)


def regather(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Let backward gather annotated weights again; gives what backward has, by what forward has.

    The backward's uses of a forward gather's views get views of a new gather of the same shard, placed before the
    first of them. Several microbatches stand one after another: a forward's backward is the next one in the graph.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    backward = [place[node] for node in graph.nodes if is_backward(node)]
    found: dict[fx.Node, fx.Node] = {}
    for part in _regathered_parts(graph):
        later = bisect.bisect_right(backward, place[part[-1]])
        if later == len(backward):
            continue
        start = backward[later]
        forward = _with_views(part, place, start)
        users = {user for node in forward for user in node.users if place[user] >= start and user.op != "output"}
        if users:
            found.update(_copy_for(graph, users, forward, before=min(users, key=place.__getitem__)))
    graph.eliminate_dead_code()
    alive = set(graph.nodes)
    return {node: copy for node, copy in found.items() if node in alive and copy in alive}


def _copy_for(
    graph: fx.Graph, users: Iterable[fx.Node], nodes: list[fx.Node], *, before: fx.Node
) -> dict[fx.Node, fx.Node]:
    """Give `users` copies of `nodes`, which stand in order; gives the copies by what they are of."""
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
    return copies


def schedule(graph: fx.Graph) -> None:
    """Launch each gather one unit ahead, and wait for each reduction when the next one starts.

    A gather's launch moves in front of the wait before it (in graph order), so that it runs beside the compute that
    uses that one; only one is ahead at a time, as in eager. A reduction's wait moves down to where its result is used
    or, at the latest, to where the next one is packed, so that one input buffer is alive at a time; with
    `max_inflight_reductions` to where the one after as many is.

    Every rank must end with the same order of collectives, and its optimizer's part of the graph is its own: a rank
    that holds no element of a unit updates nothing there. So what may move never depends on what it is computed from:
    only gathers of `unshard` move, and only inside one forward and backward.
    """
    waits = [
        node
        for node in graph.nodes
        if node.target is WAIT and isinstance(node.args[0], fx.Node) and node.args[0].target is GATHER
    ]
    for earlier, later in itertools.pairwise(waits):
        before, launch = earlier.args[0], later.args[0]
        assert isinstance(before, fx.Node)
        assert isinstance(launch, fx.Node)
        if _is_of_unshard(before) and _is_of_unshard(launch) and not _is_of_a_later_call(graph, earlier, launch):
            _hoist(graph, launch, earlier)
    _sink_reduction_waits(graph)


def _is_of_a_later_call(graph: fx.Graph, earlier: fx.Node, launch: fx.Node) -> bool:
    """Whether a backward stands between the two: an update may, too."""
    if is_backward(launch):
        return False
    between = itertools.takewhile(
        lambda node: node is not launch, itertools.dropwhile(lambda node: node is not earlier, graph.nodes)
    )
    return any(is_backward(node) for node in between)


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
    for number, launch in enumerate(reductions):
        alive = (launch.meta.get("custom") or {}).get(INFLIGHT, 1)
        if number + alive >= len(reductions):
            continue
        following = reductions[number + alive]
        target = _packing_of(following)
        place = {node: at for at, node in enumerate(graph.nodes)}
        dependent: list[fx.Node] = []
        for node in list(graph.nodes)[place[launch] + 1 : place[target]]:
            waits_here = node.target is WAIT and node.args[0] is launch
            if waits_here or any(needed in dependent for needed in node.all_input_nodes):
                if node.target in COLLECTIVES:  # launches stay where they are, on every rank
                    target = node
                    break
                dependent.append(node)
        if any(needed in dependent for needed in target.all_input_nodes):
            continue
        for node in dependent:
            target.prepend(node)


def _packing_of(reduction: fx.Node) -> fx.Node:
    """What allocates a reduction's input: the one before must be over by then, for one input to be alive at a time."""
    node = reduction.all_input_nodes[0]
    while len(node.all_input_nodes) == 1 and node.target not in COLLECTIVES and node.target is not WAIT:
        if node.target is PACK:
            return node
        node = node.all_input_nodes[0]
    return node if node.target is PACK else reduction


def weights_read_late(graph: fx.Graph) -> list[fx.Node]:
    """What forward computes elementwise from gathered weights and backward reads.

    A compiler would rather compute it again from the forward's weights, an embedding for example, and so keep them.
    """
    waits = [node for node in graph.nodes if node.target is WAIT and not is_backward(node)]
    gathered = [node for node in waits if isinstance(node.args[0], fx.Node) and node.args[0].target in GATHERS]
    derived, queue, found = set(gathered), gathered, []
    while queue:
        for user in queue.pop().users:
            if user in derived or is_backward(user) or not _is_read_through(user):
                continue
            derived.add(user)
            if not is_view(user) and any(is_backward(reader) for reader in user.users):
                found.append(user)
            else:
                queue.append(user)
    return found


def _is_read_through(node: fx.Node) -> bool:
    """Whether a compiler computes the node where it is read."""
    tags = getattr(node.target, "tags", ())
    return is_view(node) or node.target in _LOOKUPS or torch.Tag.pointwise in tags
