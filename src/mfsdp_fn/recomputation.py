"""A pass over the graph of a whole step: what is cheap to compute is computed again in backward, not stored.

A graph with forward and backward in it has no partitioner that would choose what lives from one to the other; what
autograd saves, lives. Here elementwise results (activations, norms, casts) that backward reads are computed again from
what it reads anyway, or from something smaller. No product, no attention and no communication is done twice, and no
random number is drawn twice. Chen et al., *Training deep nets with sublinear memory cost* (2016), is where the idea is
from; unlike `torch.compile`'s partitioner this looks at one value at a time and solves no cut.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .graph import COLLECTIVES, REGATHER, WAIT, is_backward, is_view

_aten = torch.ops.aten

# Cheap though not elementwise: one pass over the input. Those that a release lacks are left out.
_CHEAP = frozenset(
    getattr(_aten, name).default
    for name in ("_to_copy", "clone", "native_layer_norm", "_fused_rms_norm")
    if hasattr(_aten, name)
)

_LONGEST = 8  # how many results may be computed one from the other: longer chains would all be alive at once


def recompute(graph: fx.Graph) -> int:
    """Let backward compute again what is cheap; gives the number of values that forward need not keep.

    Runs before `graph.regather`: copies read forward's weights, whose uses in backward get gathers of their own there.
    A unit's weights are read only if backward gathers them anyway.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    backward = [place[node] for node in graph.nodes if is_backward(node)]
    turns: dict[int, list[fx.Node]] = {}  # where a backward starts, and the forward before it
    for node in list(graph.nodes):
        later = bisect.bisect_right(backward, place[node])
        if not is_backward(node) and later < len(backward):
            turns.setdefault(backward[later], []).append(node)
    return sum(_Turn(graph, place, start, forward).run() for start, forward in turns.items())


@dataclasses.dataclass
class _Way:
    """How backward comes by a value: at what cost in bytes, what is stored for it and what is computed again."""

    cost: float
    stored: tuple[fx.Node, ...] = ()
    again: tuple[fx.Node, ...] = ()
    depth: int = 0


class _Turn:
    """One forward and its backward, which starts at place `start`."""

    def __init__(self, graph: fx.Graph, place: dict[fx.Node, int], start: int, forward: list[fx.Node]) -> None:
        self.graph, self.start = graph, start
        self.place = place  # of the nodes that were there before the pass
        self.forward = forward
        self.inside = set(forward)
        self.stored: set[fx.Node] = set()
        self.again: dict[fx.Node, int] = {}  # to the length of the chain that ends in it

    def run(self) -> int:
        read = [node for node in self.forward if not is_view(node) and self._is_read_late(node)]
        # First what must be stored in any case, so that it counts as free for all others.
        self.stored.update(node for node in read if not _is_cheap(node) or self._stays(node))
        for node in read:
            if node not in self.stored and node not in self.again:
                way = self._inputs(node, 0)
                if way.cost < _bytes(node) and way.depth < _LONGEST:
                    self.stored.update(way.stored)
                    for number in way.again:
                        self.again.setdefault(number, way.depth)
                    self.again[node] = way.depth + 1
                else:
                    self.stored.add(node)
        self._rewrite()
        return len(self.again)

    def _late(self, node: fx.Node) -> list[fx.Node]:
        """Who reads the node after forward."""
        return [user for user in node.users if self.place.get(user, -1) >= self.start]

    def _names(self, node: fx.Node) -> list[fx.Node]:
        """The node and what in this forward is a name of its memory or a part of it."""
        found = [node]
        for one in found:
            found += [user for user in one.users if user in self.inside and is_view(user) and user not in found]
        return found

    def _is_read_late(self, node: fx.Node) -> bool:
        return any(self._late(name) for name in self._names(node))

    def _stays(self, node: fx.Node) -> bool:
        """Whether something but a backward reads it later: it leaves the call, for example."""
        return any(not is_backward(user) for name in self._names(node) for user in self._late(name))

    def _way(self, node: fx.Node, depth: int) -> _Way:
        if node in self.stored or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            return _Way(0)
        if node in self.again:
            return _Way(0, depth=self.again[node])
        if node not in self.inside:
            return _Way(0 if node.op in ("placeholder", "get_attr") else math.inf)
        if node.op in ("placeholder", "get_attr"):
            return _Way(0 if not _is_written(node) else math.inf)
        if is_view(node):
            way = self._inputs(node, depth)
            return dataclasses.replace(way, again=(*way.again, node)) if way.again else way
        if _is_given(node):
            return _Way(math.inf)
        store = _Way(_bytes(node), stored=(node,))
        if not _is_cheap(node) or depth >= _LONGEST:
            return store
        way = self._inputs(node, depth + 1)
        if way.cost >= store.cost or way.depth >= _LONGEST:
            return store  # of two that cost the same, the one nearer to backward
        return _Way(way.cost, way.stored, (*way.again, node), way.depth + 1)

    def _inputs(self, node: fx.Node, depth: int) -> _Way:
        ways = [self._way(needed, depth) for needed in node.all_input_nodes]
        return _Way(
            sum(way.cost for way in ways),
            tuple(dict.fromkeys(one for way in ways for one in way.stored)),
            tuple(dict.fromkeys(one for way in ways for one in way.again)),
            max((way.depth for way in ways), default=0),
        )

    def _rewrite(self) -> None:
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node, before: fx.Node) -> fx.Node:
            if node in copies:
                return copies[node]
            is_part = node in self.again or (node in self.inside and is_view(node) and self._root(node) in self.again)
            if not is_part:
                return node
            inputs = {needed: copied(needed, before) for needed in node.all_input_nodes}
            with self.graph.inserting_before(before):
                copies[node] = copy = self.graph.node_copy(node, inputs.__getitem__)
            copy.meta["custom"] = {**(node.meta.get("custom") or {}), "phase": "backward"}
            return copy

        readers = {user for node in self.forward for user in self._late(node) if is_backward(user)}
        for reader in sorted(readers, key=self.place.__getitem__):
            new = {needed: copied(needed, reader) for needed in reader.all_input_nodes}
            reader.args = map_arg(reader.args, new.__getitem__)
            reader.kwargs = map_arg(reader.kwargs, new.__getitem__)

    def _root(self, node: fx.Node) -> fx.Node:
        while is_view(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node


def _is_given(node: fx.Node) -> bool:
    """Whether the node is communication, or a weight: forward's are not kept."""
    return node.target in (*COLLECTIVES, WAIT) or REGATHER in (node.meta.get("custom") or {})


def _is_cheap(node: fx.Node) -> bool:
    if node.op != "call_function" or _is_given(node):
        return False
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    return node.target in _CHEAP or torch.Tag.pointwise in tags


def _is_written(node: fx.Node) -> bool:
    """Whether the graph writes to an input: later readers would see another value."""
    schemas = ((user, getattr(user.target, "_schema", None)) for user in node.users)
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and value is node
        for user, schema in schemas
        if schema is not None
        for argument, value in zip(schema.arguments, user.args, strict=False)
    )


def _bytes(node: fx.Node) -> int:
    return _bytes_of(node.meta.get("val"))


def _bytes_of(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes_of, value))
    if not isinstance(value, torch.Tensor):
        return 0
    # A size that is not known counts as one: what is compared mostly has the same ones.
    return value.dtype.itemsize * math.prod(size for size in value.shape if isinstance(size, int))
