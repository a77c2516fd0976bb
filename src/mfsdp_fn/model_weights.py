"""Compute weights: made from main weights once a step, gathered by every `unshard`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .buffer import Move, PendingGather, launch_gather
from .checks import check_flag
from .errors import StateError, bad
from .group import GroupSpec
from .state import ShardState, Stage, check_state
from .state import donate as mark_donated


def sync_model_weights(state: ShardState, *, donate: bool = False) -> ShardState:
    """Refresh compute weights from main weights.

    A cast a group where dtypes differ. Where parameters are less sharded than the optimizer state (zero1, zero2,
    hfsdp) also one all-gather a group, in the compute dtype: that is the one gather a step of those presets.

    Args:
        state: a state of weights.
        donate: reuse the old compute buffers; `state` can't be used again.

    Raises:
        StateError: not a finished state.
    """
    check_state(state, "state")
    check_flag("donate", donate)
    if state.stage is not Stage.FINAL:
        raise StateError(bad("state", "accumulating gradients", "weights", "pass the state of weights"))
    compute: list[torch.Tensor | None] = []
    ahead: list[tuple[int, PendingGather]] = []
    for number, (group, main, old) in enumerate(zip(state.spec.groups, state.main, state.compute, strict=True)):
        compute.append(None)
        if not group.has_compute:
            continue
        if old is not None and not group.requires_grad:
            compute[-1] = old  # no optimizer changes frozen weights
            continue
        if group.sync_gathers:
            label = (group.name, "sync")
            ahead.append((number, launch_gather(main, group.sync_gathers, dtype=group.dtypes.compute, label=label)))
            if len(ahead) > 1:  # one gather ahead: what is launched is also allocated
                done, pending = ahead.pop(0)
                compute[done] = _land(pending, state.compute[done], donate=donate)
        elif group.compute_range != group.main_range:
            start = group.compute_range.start - group.main_range.start
            compute[-1] = main.narrow(0, start, group.compute_range.size).to(group.dtypes.compute, copy=True)
        elif donate and old is not None:
            compute[-1] = old.copy_(main)
        else:
            compute[-1] = main.to(group.dtypes.compute)
    for done, pending in ahead:
        compute[done] = _land(pending, state.compute[done], donate=donate)
    if donate:
        mark_donated("sync_model_weights", state)
    return ShardState(main=state.main, compute=tuple(compute), spec=state.spec)


def _land(pending: PendingGather, old: torch.Tensor | None, *, donate: bool) -> torch.Tensor:
    """The gathered weights; in the donated buffer, so that a captured CUDA graph finds them where they were."""
    return old.copy_(pending.wait()) if donate and old is not None else pending.wait()


def weights_of(group: GroupSpec, main: torch.Tensor, compute: torch.Tensor | None) -> torch.Tensor:
    """The local buffer that is gathered for compute.

    Raises:
        StateError: the state holds none.
    """
    if compute is not None:
        return compute
    if group.has_compute:
        raise StateError(
            bad(
                "state",
                f"a state without compute weights for {group.name!r}",
                "a state of weights, synced",
                "call sync_model_weights(state) on what tree_map returned",
            )
        )
    return main if group.store_compute else main.to(group.dtypes.compute)


def gather_weights(
    group: GroupSpec, main: torch.Tensor, compute: torch.Tensor | None, steps: Sequence[Move], phase: str
) -> PendingGather:
    """Launch `steps` of what `weights_of` gives; where that is a cast, it is made in the gather's result.

    Raises:
        StateError: the state holds none.
    """
    label = (group.name, phase)
    if compute is None and not group.has_compute:
        return launch_gather(main, steps, dtype=None if group.store_compute else group.dtypes.compute, label=label)
    return launch_gather(weights_of(group, main, compute), steps, label=label)
