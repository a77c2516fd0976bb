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
from collections.abc import Mapping
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


def recompute(graph: fx.Graph, regathered: Mapping[fx.Node, fx.Node]) -> int:
    """Let backward compute again what is cheap; gives the number of values that forward need not keep.

    Runs after `graph.regather`, which says what backward has (`regathered`) of forward's weights. What is computed
    again differs between ranks, as their batches do; so it reads weights where backward has them, and no gather is
    made or moved for it.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    backward = [place[node] for node in graph.nodes if is_backward(node)]
    turns: dict[int, list[fx.Node]] = {}  # where a backward starts, and the forward before it
    for node in list(graph.nodes):
        later = bisect.bisect_right(backward, place[node])
        if not is_backward(node) and later < len(backward):
            turns.setdefault(backward[later], []).append(node)
    return sum(_Turn(graph, place, regathered, start, forward).run() for start, forward in turns.items())


@dataclasses.dataclass
class _Way:
    """How backward comes by a value: at what cost in bytes, what is stored for it and what is computed again.

    `depth` is the length of the longest chain that leads to it, `after` the place of the last weight in one.
    """

    cost: float
    stored: tuple[fx.Node, ...] = ()
    again: tuple[fx.Node, ...] = ()
    depth: int = 0
    after: int = -1


class _Turn:
    """One forward and its backward, which starts at place `start`."""

    def __init__(
        self,
        graph: fx.Graph,
        place: dict[fx.Node, int],
        regathered: Mapping[fx.Node, fx.Node],
        start: int,
        forward: list[fx.Node],
    ) -> None:
        self.graph, self.regathered, self.start = graph, regathered, start
        self.place = place  # of the nodes that were there before the pass
        self.forward = forward
        self.inside = set(forward)
        self.stored: set[fx.Node] = set()
        self.again: dict[fx.Node, _Way] = {}  # how others come by what is computed again

    def run(self) -> int:
        read = [node for node in self.forward if not is_view(node) and self._late(node)]
        # First what must be stored in any case, so that it counts as free for all others.
        self.stored.update(node for node in read if not _is_cheap(node) or self._stays(node))
        for node in read:
            if node in self.stored or node in self.again:
                continue
            way = self._inputs(node, 0)
            first = min(self.place[reader] for reader in self._late(node))
            if way.cost < _bytes(node) and way.depth < _LONGEST and way.after < first:
                self.stored.update(way.stored)
                for one in (*way.again, node):
                    self.again.setdefault(one, _Way(0, depth=way.depth + (one is node), after=way.after))
            else:
                self.stored.add(node)
        self._rewrite()
        return len(self.again)

    def _late(self, node: fx.Node) -> list[fx.Node]:
        """Who reads the node after forward, under any of its names."""
        names = [node]
        for name in names:
            names += [user for user in name.users if user in self.inside and is_view(user) and user not in names]
        return [user for name in names for user in name.users if self.place.get(user, -1) >= self.start]

    def _stays(self, node: fx.Node) -> bool:
        """Whether something but a backward's arithmetic reads it later: it leaves the call, or is gathered."""
        return any(not is_backward(user) or _is_given(user) for user in self._late(node))

    def _way(self, node: fx.Node, depth: int) -> _Way:
        if node in self.stored or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            return _Way(0)
        if node in self.again:
            return self.again[node]
        if node in self.regathered:
            return _Way(0, after=self.place[self.regathered[node]])
        if node not in self.inside:
            return _Way(0 if node.op in ("placeholder", "get_attr") else math.inf)
        if node.op in ("placeholder", "get_attr"):
            return _Way(0 if not _is_written(node) else math.inf)
        if is_view(node):
            way = self._inputs(node, depth)
            return dataclasses.replace(way, again=(*way.again, node)) if self._is_copied(node, way) else way
        if _is_given(node):
            return _Way(math.inf)
        store = _Way(_bytes(node), stored=(node,))
        if not _is_cheap(node) or depth >= _LONGEST:
            return store
        way = self._inputs(node, depth + 1)
        if way.cost >= store.cost or way.depth >= _LONGEST:
            return store  # of two that cost the same, the one nearer to backward
        return dataclasses.replace(way, again=(*way.again, node), depth=way.depth + 1)

    def _is_copied(self, view: fx.Node, way: _Way) -> bool:
        """Whether the view is one of something that backward has another copy of."""
        root = self._root(view)
        return root in self.again or root in self.regathered or root in way.again

    def _inputs(self, node: fx.Node, depth: int) -> _Way:
        ways = [self._way(needed, depth) for needed in node.all_input_nodes]
        return _Way(
            sum(way.cost for way in ways),
            tuple(dict.fromkeys(one for way in ways for one in way.stored)),
            tuple(dict.fromkeys(one for way in ways for one in way.again)),
            max((way.depth for way in ways), default=0),
            max((way.after for way in ways), default=-1),
        )

    def _rewrite(self) -> None:
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node, before: fx.Node) -> fx.Node:
            if node in self.regathered and node not in self.stored:
                return self.regathered[node]
            if node not in copies:
                if self._root(node) not in self.again and not self._is_of_weights(node):
                    return node
                inputs = {needed: copied(needed, before) for needed in node.all_input_nodes}
                with self.graph.inserting_before(before):
                    copies[node] = copy = self.graph.node_copy(node, inputs.__getitem__)
                copy.meta["custom"] = {**(node.meta.get("custom") or {}), "phase": "backward"}
            return copies[node]

        readers = {reader for node in self.again for reader in self._late(node)}
        for reader in sorted(readers, key=self.place.__getitem__):
            new = {needed: copied(needed, reader) for needed in reader.all_input_nodes}
            reader.args = map_arg(reader.args, new.__getitem__)
            reader.kwargs = map_arg(reader.kwargs, new.__getitem__)

    def _is_of_weights(self, node: fx.Node) -> bool:
        return node in self.inside and self._root(node) in self.regathered

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
