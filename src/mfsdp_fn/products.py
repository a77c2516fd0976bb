"""A pass for graphs that will be compiled to kernels: weight gradients are multiplied into the packed buffer.

Otherwise each is written in the compute dtype, read again and written into the buffer in the wire's. The products move
down to where their unit is packed, so that what they multiply lives until then and the gradients by themselves never
exist.
"""

from __future__ import annotations

import torch
from torch import fx

from .packing import OPERATION, PRODUCTS_OPERATION

_aten = torch.ops.aten

_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_HALVES = (torch.bfloat16, torch.float16)


def multiply_into_packed(graph: fx.Graph) -> int:
    """Give every pack the factors of its parts that are matrix products; gives the number of these."""
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
    found = [_factors(part, dtype) if isinstance(part, fx.Node) else None for part in parts]
    if not any(found):
        return 0
    others = [(part, at) for part, at, factors in zip(parts, offsets, found, strict=True) if factors is None]
    products = [(*factors, at) for at, factors in zip(offsets, found, strict=True) if factors is not None]
    with graph.inserting_before(pack):
        lefts, rights = [], []
        for product, transposed, _ in products:
            left, right = product.args
            if transposed:
                left, right = (graph.call_function(_aten.permute.default, (m, [1, 0])) for m in (right, left))
                for new, old in ((left, product.args[1]), (right, product.args[0])):
                    assert isinstance(old, fx.Node)
                    new.meta["val"] = old.meta["val"].permute(1, 0)
            lefts.append(left)
            rights.append(right)
        new = graph.call_function(
            PRODUCTS_OPERATION,
            (
                [part for part, _ in others],
                [at for _, at in others],
                lefts,
                rights,
                [at for _, _, at in products],
                gaps,
                size,
                dtype,
            ),
        )
    new.meta = dict(pack.meta)
    pack.replace_all_uses_with(new)
    graph.erase_node(pack)
    return len(products)


def _factors(part: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, bool] | None:
    """The product that `part` holds, and whether transposed, if nothing else reads it."""
    node, transposed = part, False
    while len(node.users) == 1:
        if node.target is _aten.mm.default:
            return (node, transposed) if _fits(node, dtype) else None
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        if node.target is _aten.t.default or (node.target is _aten.permute.default and node.args[1] == [1, 0]):
            transposed = not transposed
        elif node.target not in _RESHAPES or transposed:  # the order of elements must be the product's
            return None
        node = source
    return None


def _fits(product: fx.Node, dtype: torch.dtype) -> bool:
    value = product.meta["val"]
    return value.dtype == dtype or (value.is_cuda and value.dtype in _HALVES and dtype == torch.float32)
