"""A pass of Inductor's: what is cast and gathered is cast into its place in the gather's result.

Otherwise the cast is a buffer by itself until the gather is over, and is copied to its place. Eager does the same, in
`collectives.all_gather`. The gather stays one of Inductor's collectives, since those alone does it keep in the order of
the graph, and all ranks must have one order. It is done late, when the graph may say that memory is written to.
"""

from __future__ import annotations

import torch
from torch import fx

from . import collectives

_aten = torch.ops.aten
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)


# Opaque: a compiler would make forward's and backward's casts of one shard together, and so keep what backward gathers
# into from forward on.
@torch.library.custom_op("mfsdp_fn::cast_in_place", mutates_args=())
def cast_in_place(local: torch.Tensor, dtype: torch.dtype, size: int, rank: int) -> torch.Tensor:
    """Memory for an even gather over `size` ranks, with this rank's part in it, cast."""
    return collectives.cast_in_place(local, dtype, size, rank)[0]


@cast_in_place.register_fake
def _(local: torch.Tensor, dtype: torch.dtype, size: int, rank: int) -> torch.Tensor:
    return local.new_empty(local.shape[0] * size, dtype=dtype)


# What it is in a graph.
OPERATION = torch.ops.mfsdp_fn.cast_in_place.default

# A gather into memory that exists.
INTO = torch.ops._c10d_functional.all_gather_into_tensor_out.default


def cast_into_gathered(graph: fx.Graph) -> int:
    """Join every cast with the gather that alone reads it; gives the number of gathers changed.

    Gathers of CPU tensors are changed without a cast too: Gloo runs a gather that allocates its result as a coalesced
    one, which is not safe (see `collectives._even_gather`).
    """
    count = 0
    for gather in list(graph.nodes):
        sent = gather.args[0] if gather.target is _GATHER else None
        if not isinstance(sent, fx.Node):
            continue
        value, (_, size, name) = sent.meta["val"], gather.args
        if value.dim() != 1 or not isinstance(value.shape[0], int):
            continue
        local = sent.all_input_nodes[0] if sent.target in _CASTS and len(sent.users) == 1 else sent
        if value.dtype == local.meta["val"].dtype:
            local = sent
        if local is sent and value.device.type != "cpu":
            continue
        assert isinstance(size, int)
        assert isinstance(name, str)
        rank = collectives.rank_in(name)
        start = rank * value.shape[0]
        with graph.inserting_before(gather):
            whole = graph.call_function(OPERATION, (local, value.dtype, size, rank))
            own = graph.call_function(_aten.slice.Tensor, (whole, 0, start, start + value.shape[0]))
            new = graph.call_function(INTO, (own, size, name), {"out": whole})
        whole.meta, new.meta = dict(gather.meta), dict(gather.meta)
        own.meta = dict(sent.meta)
        gather.replace_all_uses_with(new)
        graph.erase_node(gather)
        if local is not sent:
            graph.erase_node(sent)
        count += 1
    return count
