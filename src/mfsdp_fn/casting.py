"""A pass for graphs that will be compiled to kernels: what is cast and gathered is cast into the gather's result.

Otherwise the cast is a buffer by itself until the gather is over, and is copied to its place in the result. Eager
does the same, in `collectives.all_gather`.
"""

from __future__ import annotations

import torch
from torch import fx

from . import collectives

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_aten = torch.ops.aten
_CAST = _aten._to_copy.default


@torch.library.custom_op("mfsdp_fn::cast_and_gather", mutates_args=())
def cast_and_gather(local: torch.Tensor, dtype: torch.dtype, size: int, rank: int, name: str) -> torch.Tensor:
    """An even all-gather over the group `name`, to be waited for, of `local` in another dtype."""
    return collectives.cast_and_gather(local, dtype, size, rank, name)


@cast_and_gather.register_fake
def _(local: torch.Tensor, dtype: torch.dtype, size: int, rank: int, name: str) -> torch.Tensor:
    return local.new_empty(local.shape[0] * size, dtype=dtype)


# What it is in a graph.
OPERATION = torch.ops.mfsdp_fn.cast_and_gather.default


def cast_into_gathered(graph: fx.Graph) -> int:
    """Join every cast with the gather that alone reads it; gives their number."""
    count = 0
    for gather in list(graph.nodes):
        cast = gather.args[0] if gather.target is _GATHER else None
        if not isinstance(cast, fx.Node) or cast.target is not _CAST or len(cast.users) != 1:
            continue
        if set(cast.kwargs) != {"dtype"} or cast.meta["val"].dim() != 1:
            continue
        _, size, name = gather.args
        assert isinstance(name, str)
        rank = collectives.rank_in(name)
        with graph.inserting_before(gather):
            new = graph.call_function(OPERATION, (cast.args[0], cast.kwargs["dtype"], size, rank, name))
        new.meta = dict(gather.meta)
        gather.replace_all_uses_with(new)
        graph.erase_node(gather)
        graph.erase_node(cast)
        count += 1
    return count
