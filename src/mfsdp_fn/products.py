"""A pass for graphs that will be compiled to kernels: weight gradients are computed into the packed buffer.

Otherwise each is written in the compute dtype, read again and written into the buffer in the wire's. What computes
them, matrix products and embeddings, moves down to where their unit is packed: what it reads lives until then, and the
gradients by themselves never exist. The mean over ranks goes along, where its factor rounds nothing: to scale a product
costs nothing, to scale what was reduced is a pass over it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from .graph import INFLIGHT, REDUCTIONS, WAIT
from .packing import OPERATION, PRODUCTS_OPERATION

_aten = torch.ops.aten

_LOOKUP = _aten.embedding_dense_backward.default
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_HALVES = (torch.bfloat16, torch.float16)


def compute_into_packed(graph: fx.Graph) -> int:
    """Give every pack what its parts that are matrix products or embeddings' are made of; gives the number of these."""
    count = 0
    for node in list(graph.nodes):
        if node.target is OPERATION:
            count += _rewrite(graph, node)
    if count:
        graph.eliminate_dead_code()
    return count


def _rewrite(graph: fx.Graph, pack: fx.Node) -> int:
    parts, offsets, gaps, size, dtype = pack.args
    assert isinstance(parts, (list, tuple))
    assert isinstance(offsets, (list, tuple))
    assert isinstance(dtype, torch.dtype)
    others: list[tuple[Any, Any]] = []
    products: list[tuple[fx.Node, fx.Node, Any]] = []
    tables: list[tuple[Any, Any, Any, Any]] = []
    for part, at in zip(parts, offsets, strict=True):
        assert isinstance(part, fx.Node)
        made = _made_by(part, dtype)
        if made is None:
            others.append((part, at))
        elif made[0].target is _LOOKUP:
            rows, numbers, length, *_ = made[0].args
            tables.append((rows, numbers, at, length))
        else:
            products.append((*_factors(graph, pack, *made), at))
    if not products and not tables:
        return 0
    arguments = [
        [item[n] for item in items] for items, width in ((others, 2), (products, 3), (tables, 4)) for n in range(width)
    ]
    mean = _mean_after(pack)
    scale = 1.0 if mean is None else mean.args[1]
    with graph.inserting_before(pack):
        new = graph.call_function(PRODUCTS_OPERATION, (*arguments, gaps, size, dtype, scale))
    if mean is not None:
        mean.replace_all_uses_with(mean.all_input_nodes[0])
    new.meta = dict(pack.meta)
    pack.replace_all_uses_with(new)
    graph.erase_node(pack)
    return len(products) + len(tables)


def _mean_after(pack: fx.Node) -> fx.Node | None:
    """The mean over ranks of what comes of `pack`, if its factor is a power of two: it may as well come first.

    Not another factor, which may be a large one.
    """
    node = pack
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is _aten.mul.Tensor:
            factor, ours = node.args[1], INFLIGHT in (node.meta.get("custom") or {})
            return node if ours and isinstance(factor, float) and math.frexp(factor)[0] == 0.5 else None
        if node.target not in (*REDUCTIONS, WAIT):
            return None
    return None


def _factors(graph: fx.Graph, pack: fx.Node, product: fx.Node, transposed: bool) -> tuple[fx.Node, fx.Node]:
    left, right = product.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return (_turned(graph, pack, right), _turned(graph, pack, left)) if transposed else (left, right)


def _turned(graph: fx.Graph, pack: fx.Node, matrix: fx.Node) -> fx.Node:
    with graph.inserting_before(pack):
        new = graph.call_function(_aten.permute.default, (matrix, [1, 0]))
    new.meta["val"] = matrix.meta["val"].permute(1, 0)
    return new


def _made_by(part: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, bool] | None:
    """The product or embedding gradient that `part` is, and whether transposed, if nothing else reads it."""
    node, transposed = part, False
    while len(node.users) == 1:
        if node.target is _aten.mm.default or (node.target is _LOOKUP and not transposed and _is_plain(node)):
            return (node, transposed) if _fits(node, dtype) else None
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        if node.target is _aten.t.default or (node.target is _aten.permute.default and node.args[1] == [1, 0]):
            transposed = not transposed
        elif node.target not in _RESHAPES or transposed:  # the order of elements must be what it was
            return None
        node = source
    return None


def _is_plain(lookup: fx.Node) -> bool:
    """Whether every row counts once for every time it was looked up."""
    _, _, _, padding, by_frequency = lookup.args
    return isinstance(padding, int) and padding == -1 and by_frequency is False


def _fits(made: fx.Node, dtype: torch.dtype) -> bool:
    value = made.meta["val"]
    if made.target is _LOOKUP and dtype in _HALVES:  # it sums in fp32 itself
        return False
    return value.dtype == dtype or (value.is_cuda and value.dtype in _HALVES and dtype == torch.float32)
