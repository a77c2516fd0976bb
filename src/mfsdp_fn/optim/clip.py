"""Gradient norms over all ranks, and clipping by them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import collectives, tree
from ..checks import check_flag, shown
from ..errors import MfsdpError, StateError, bad
from ..state import ShardState, check_state, tree_map
from ..state import donate as mark_donated
from .base import check_finished

_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ has it too


def global_norm(grads: Any, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients, as one vector; each element counts once, wherever it lies.

    Over each axis that gradients are sharded over: one all-gather of one number a rank. Every rank combines them in
    the same order, so all have the same value, bit for bit, and a NaN or infinity on one rank reaches all. Nothing
    waits for the device. With meshes or placements by unit the all-gathers are over every axis of the default mesh:
    units on a smaller mesh are different tensors in each of its cells, and all of them count; of replicas the first.

    Args:
        grads: finished gradients, or a pytree of several ShardStates: then the norm over all.
        norm_type: a positive number, or infinity for the largest magnitude.

    Returns:
        A 0-D tensor: float32, or float64 if a gradient is.

    Raises:
        StateError: gradients that still accumulate or were donated.
        MfsdpError: another `norm_type`.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.tensor([3.0, -4.0], requires_grad=True)}
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp()))
    >>> global_norm(state), global_norm(state, float("inf"))
    (tensor(5.), tensor(4.))
    """
    return _norm_of_all(_split(grads)[0], _check_norm_type(norm_type))


def clip_by_global_norm(
    grads: Any, max_norm: float | torch.Tensor, *, norm_type: float = 2.0, donate: bool = False
) -> tuple[Any, torch.Tensor]:
    """Gradients scaled down to a global norm of at most `max_norm`, and the norm they had.

    As `torch.nn.utils.clip_grad_norm_` on the unsharded model: the factor is ``max_norm / (norm + 1e-6)``, at most
    1. A norm that isn't finite makes gradients that aren't, on every rank alike: look at the norm. Communicates what
    `global_norm` does.

    Args:
        grads: finished gradients, or a pytree of several ShardStates.
        max_norm: a number >= 0 or a 0-D tensor; infinity only measures.
        norm_type: a positive number, or infinity.
        donate: scale in place; `grads` can't be used again.

    Returns:
        The gradients, in the structure and dtypes given, and the norm before clipping, a 0-D tensor.

    Raises:
        StateError: gradients that still accumulate or were donated.
        MfsdpError: another `norm_type`, `max_norm` or `donate`.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.tensor([3.0, -4.0], requires_grad=True)}
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp()))
    >>> clipped, norm = clip_by_global_norm(state, 1.0)
    >>> clipped.main[0], norm
    (tensor([ 0.6000, -0.8000]), tensor(5.))
    """
    states, template = _split(grads)
    norm_type = _check_norm_type(norm_type)
    _check_max_norm(max_norm)
    check_flag("donate", donate)
    norm = _norm_of_all(states, norm_type)
    factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
    scale = torch.Tensor.mul_ if donate else torch.mul
    clipped = [tree_map(lambda buffer: scale(buffer, factor), state) for state in states]
    if donate:
        mark_donated("clip_by_global_norm", *states)
    return tree.build(template, clipped), norm


def _split(grads: Any) -> tuple[list[ShardState], tree.Template]:
    states, paths, template = tree.flatten(grads, is_leaf=lambda node: isinstance(node, ShardState))
    for state, path in zip(states, paths, strict=True):
        argument = ".".join(("grads", *path))
        check_state(state, argument)
        check_finished(state, argument)
    if not states:
        raise StateError(bad("grads", "no state", "a ShardState, or a pytree of them", "pass value_and_grad's grads"))
    return states, template


def _norm_of_all(states: list[ShardState], norm_type: float) -> torch.Tensor:
    norms = [_norm(state, norm_type) for state in states]
    dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
    return _combine([norm.to(dtype) for norm in norms], norm_type)


def _norm(grads: ShardState, norm_type: float) -> torch.Tensor:
    """The norm of one state, over all ranks."""
    spec = grads.spec
    dtypes = (buffer.dtype for group, buffer in zip(spec.groups, grads.main, strict=True) if group.requires_grad)
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    parts = [
        torch.linalg.vector_norm(buffer[start:stop], norm_type, dtype=dtype)
        for runs, buffer in zip(spec.norm_parts, grads.main, strict=True)
        for start, stop in runs
    ]
    norm = _combine(parts, norm_type) if parts else torch.zeros((), dtype=dtype, device=spec.device)
    for axis in spec.norm_axes:
        if axis.size > 1:
            gathered = collectives.all_gather(norm.reshape(1), (1,) * axis.size, axis).wait()
            norm = _combine(list(gathered), norm_type)
    return norm


def _combine(norms: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of vectors laid end to end, from theirs."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _check_norm_type(norm_type: Any) -> float:
    if isinstance(norm_type, bool) or not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise MfsdpError(
            bad("norm_type", shown(norm_type), "a positive number or float('inf')", "leave it out for the 2-norm")
        )
    return float(norm_type)


def _check_max_norm(max_norm: Any) -> None:
    if isinstance(max_norm, torch.Tensor) and not max_norm.ndim and max_norm.dtype.is_floating_point:
        return
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise MfsdpError(
            bad(
                "max_norm",
                shown(max_norm),
                "a number >= 0 or a 0-D tensor of floats",
                "pass 1.0, or float('inf') to measure",
            )
        )
