"""`shard`: from a tree of whole tensors to this rank's flat buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import collectives, tree
from .errors import StateError, bad
from .grouping import tie_key
from .mesh import AbstractMesh
from .model_weights import sync_model_weights
from .placement import Replicate
from .spec import LeafSpec, ShardSpec
from .state import ShardState
from .tensor_parallel import check_as_planned, local_of

InitFn = Callable[[str, torch.Tensor], torch.Tensor]


def shard(params: Any, spec: ShardSpec, *, init_fn: InitFn | None = None) -> ShardState:
    """This rank's part of `params`, copied into one flat buffer a group.

    Each rank takes its rows from its own `params`. Where the optimizer placement replicates over an axis, that
    axis' first rank wins (one broadcast a group over it), so replicas start equal. With parameters replicated and
    optimizer state sharded (zero1, zero2), compute weights come from one all-gather a group.

    Args:
        params: the tree that was planned: same structure, shapes, dtypes, `requires_grad` and ties.
        spec: its plan.
        init_fn: ``init_fn(path, meta_tensor)`` returns the whole value of a meta tensor, one at a time; of a DTensor
            a DTensor that lies the same way.

    Raises:
        StateError: a leaf that differs from the plan (its path named), a meta tensor without `init_fn`.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.arange(6.0).reshape(3, 2).requires_grad_()}
    >>> spec = mf.plan(params, mf.AbstractMesh((2,), ("dp",), rank=1), mf.zero3())
    >>> mf.shard(params, spec).main[0]
    tensor([4., 5., 0., 0.])
    """
    if not isinstance(spec, ShardSpec):
        raise StateError(bad("spec", f"a {type(spec).__name__}", "a ShardSpec", "make one with plan(params, …)"))
    leaves = tree.flatten_like(spec.template, params, "params", spec.namespace)
    _check_leaves(leaves, spec)
    if init_fn is not None and not any(leaf.is_meta for leaf in leaves.values()):
        raise StateError(
            bad(
                "init_fn",
                "a function",
                "None when no parameter is a meta tensor",
                "leave it out, or build the model under torch.device('meta')",
            )
        )
    main = [torch.zeros(group.main_range.size, dtype=group.dtypes.main, device=spec.device) for group in spec.groups]
    local = [group.local_views(buffer, group.main_range) for group, buffer in zip(spec.groups, main, strict=True)]
    for number, leaf in _first_leaves(spec):
        view = local[leaf.group].get(leaf.index)
        given = leaves[number]
        value = local_of(_initial(leaf, given, init_fn) if given.is_meta else given.detach())
        if view is None:
            continue
        if not leaf.shape:
            view.copy_(value)
            continue
        group = spec.groups[leaf.group]
        row = group.layout.row_shape(leaf.index)
        first = max(group.main_range.start - group.views[leaf.index][0], 0) // row.numel()
        view.copy_(value.reshape(-1, *row)[first : first + len(view)])
    if not isinstance(spec.mesh, AbstractMesh):
        _equalise_replicas(spec, main)
    state = ShardState(main=tuple(main), compute=(None,) * len(main), spec=spec)
    if isinstance(spec.mesh, AbstractMesh) and any(group.sync_gathers for group in spec.groups):
        raise StateError(
            bad(
                "spec",
                "an AbstractMesh with replicated parameters over sharded main weights",
                "a DeviceMesh, since compute weights are gathered",
                "plan with zero3() or ddp(), or a real mesh",
            )
        )
    return sync_model_weights(state)


def _first_leaves(spec: ShardSpec) -> list[tuple[int, Any]]:
    """(number, leaf) of every tensor once: tied leaves under their first path."""
    first: dict[tuple[int, int], tuple[int, Any]] = {}
    for number, leaf in enumerate(spec.leaves):
        first.setdefault((leaf.group, leaf.index), (number, leaf))
    return list(first.values())


def _check_leaves(leaves: dict[int, Any], spec: ShardSpec) -> None:
    ties: dict[tuple[Any, ...], tuple[int, int]] = {}
    owner: dict[tuple[int, int], tuple[Any, ...]] = {}
    for number, leaf in enumerate(spec.leaves):
        tensor = leaves.get(number)
        if not isinstance(tensor, torch.Tensor):
            raise StateError(
                bad("params", f"{tensor!r} at {leaf.path!r}", "a tensor", "give the tree that was planned")
            )
        check_as_planned(tensor, leaf.parallel, "params", leaf.path)
        got = (tuple(local_of(tensor).shape), tensor.dtype)
        if got != (tuple(leaf.shape), leaf.dtype):
            raise StateError(
                bad(
                    "params",
                    f"{got} at {leaf.path!r}",
                    f"{(tuple(leaf.shape), leaf.dtype)}, as planned",
                    "plan again",
                )
            )
        if tensor.requires_grad != leaf.requires_grad:
            raise StateError(
                bad(
                    "params",
                    f"requires_grad={tensor.requires_grad} at {leaf.path!r}",
                    f"{leaf.requires_grad}, as planned",
                    "plan again: trainability is part of the plan",
                )
            )
        key, slot = tie_key(tensor), (leaf.group, leaf.index)
        if ties.setdefault(key, slot) != slot or owner.setdefault(slot, key) != key:
            raise StateError(
                bad(
                    "params",
                    f"a tensor at {leaf.path!r} that is tied otherwise than planned",
                    "the ties that were planned",
                    "plan again after tying or untying",
                )
            )


def _initial(leaf: LeafSpec, meta: torch.Tensor, init_fn: InitFn | None) -> torch.Tensor:
    path = leaf.path
    if init_fn is None:
        raise StateError(
            bad(
                "params",
                f"a meta tensor at {path!r}",
                "a tensor with values",
                "pass init_fn=lambda path, tensor: …",
            )
        )
    value = init_fn(path, meta)
    if not isinstance(value, torch.Tensor) or value.is_meta or value.shape != meta.shape:
        got = f"{tuple(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)
        raise StateError(
            bad(
                "init_fn",
                f"{got} for {path!r}",
                f"a tensor of shape {tuple(meta.shape)} with values",
                "return the whole parameter",
            )
        )
    check_as_planned(value, leaf.parallel, "init_fn", path)
    return value.detach()


def _equalise_replicas(spec: ShardSpec, main: list[torch.Tensor]) -> None:
    """Replicas take the values of their axis' first rank."""
    for number, group in enumerate(spec.groups):
        for axis, placement in zip(group.axes, group.placements.optimizer, strict=True):
            if isinstance(placement, Replicate) and axis.size > 1 and main[number].numel():
                main[number] = collectives.broadcast(main[number], axis).wait()
