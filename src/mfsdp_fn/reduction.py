"""From full local gradients to sharded, averaged ones: pack, launch, finish.

Sums travel on the wire and the factor ``grad_scale / ranks`` is applied to each contribution exactly once, so
results don't depend on a backend's average: after the first reduction, or before it when the wire is fp16, whose
sums would overflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from . import collectives, communicators
from .buffer import Move
from .group import GroupSpec
from .labels import labelled


def scales_first(group: GroupSpec) -> bool:
    """Whether the factor is applied before the wire."""
    return group.dtypes.reduce == torch.float16 and group.scale != 1.0


def pack(
    group: GroupSpec, grads: Mapping[int, torch.Tensor | None], *, into: torch.Tensor | None = None
) -> torch.Tensor:
    """One flat buffer of full local gradients, by tensor index in the group; a missing one is zero.

    In the wire's dtype where a reduction follows at once, else in the dtype gradients are stored in. With `into`,
    adds to that buffer in place.
    """
    if scales_first(group):
        grads = {i: None if g is None else g.float() * group.scale for i, g in grads.items()}
    if into is not None:
        pairs = [(view, grads.get(i)) for i, view in enumerate(_whole_views(group, into))]
        present = [(view, grad) for view, grad in pairs if grad is not None]
        collectives.add_many([view for view, _ in present], [grad for _, grad in present])
        return into
    dtype = group.dtypes.reduce if group.grad_scatters else group.dtypes.grad
    sample = next((grad for grad in grads.values() if grad is not None), None)
    device = group_device(group) if sample is None else sample.device
    flat = torch.empty(group.layout.size, dtype=dtype, device=device)
    for offset, length in group.gaps:  # padding is summed and stored like data: it must be defined
        flat.narrow(0, offset, length).zero_()
    destinations, sources = [], []
    for index, view in enumerate(_whole_views(group, flat)):
        grad = grads.get(index)
        if grad is None:
            view.zero_()
        else:
            destinations.append(view)
            sources.append(grad)
    collectives.copy_many(destinations, sources)
    return flat


def _whole_views(group: GroupSpec, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat.narrow(0, offset, numel).view(shape) for offset, shape, numel in group.views]


def group_device(group: GroupSpec) -> torch.device:
    """Where this rank's buffers of the group live."""
    return communicators.device_of(group.mesh)


@dataclasses.dataclass(frozen=True)
class PendingReduction:
    """A reduction whose first step was launched; `wait` does the rest and gives the sum of the wire."""

    local: torch.Tensor
    first: collectives.PendingCollective | None
    scatters: tuple[Move, ...] = ()
    all_reduces: tuple[communicators.Axis, ...] = ()
    label: tuple[str, str] = ("", "")

    def settle(self) -> PendingReduction:
        """The same with its first step waited for, so that the buffer that went in is free. Launches nothing."""
        if self.first is None:
            return self
        with labelled("wait for reduction", *self.label):
            return PendingReduction(self.first.wait(), None, self.scatters, self.all_reduces, self.label)

    def wait(self) -> torch.Tensor:
        """This rank's part of the sum."""
        if self.first is None and not self.scatters and not self.all_reduces:
            return self.local
        with labelled("wait for reduction", *self.label):
            flat = self.local if self.first is None else self.first.wait()
            for move in self.scatters:
                if not sum(move.sizes):  # an empty part has no parts to be summed
                    continue
                flat = collectives.reduce_scatter(flat, move.sizes, move.axis).wait()
            for axis in self.all_reduces:
                flat = collectives.all_reduce(flat, axis).wait()
            return flat


def _launch(
    flat: torch.Tensor,
    scatters: tuple[Move, ...],
    all_reduces: tuple[communicators.Axis, ...],
    label: tuple[str, str],
) -> PendingReduction:
    if scatters and sum(scatters[0].sizes):
        with labelled("launch reduce-scatter", *label):
            first = collectives.reduce_scatter(flat, scatters[0].sizes, scatters[0].axis)
        return PendingReduction(flat, first, scatters[1:], all_reduces, label)
    if all_reduces and flat.numel():
        with labelled("launch all-reduce", *label):
            first = collectives.all_reduce(flat, all_reduces[0])
        return PendingReduction(flat, first, (), all_reduces[1:], label)
    return PendingReduction(flat, None)


def launch(group: GroupSpec, packed: torch.Tensor) -> PendingReduction:
    """Launch the reduce-scatters that each microbatch needs: none for ddp and zero1, nor over axes of one rank."""
    return _launch(packed, group.wire_scatters, (), (group.name, "backward"))


def accumulate(
    group: GroupSpec, pending: PendingReduction, into: torch.Tensor | None, *, in_place: bool = False
) -> torch.Tensor:
    """Wait for a microbatch's reduction, scale it, and add it to `into`: a buffer of the gradient placement."""
    total = pending.wait()
    scale = 1.0 if scales_first(group) or not group.grad_scatters else group.scale
    if into is None:
        if scale != 1.0:
            # The result of a reduction is this function's own; what was packed for a later one is too.
            total.mul_(scale)
        return total.to(group.dtypes.grad)
    if in_place:
        # Rounded once, as below: donating a buffer changes no result.
        return (
            into.copy_(torch.add(into, total, alpha=scale))
            if total.dtype != into.dtype
            else into.add_(total, alpha=scale)
        )
    return torch.add(into, total, alpha=scale).to(group.dtypes.grad)


def launch_deferred(group: GroupSpec, accumulated: torch.Tensor) -> PendingReduction:
    """Launch what waits for the last microbatch: the outer axes, or all of them for ddp and zero1."""
    wire = accumulated.to(group.dtypes.reduce)
    return _launch(wire, group.deferred_scatters, group.deferred_all_reduces, (group.name, "last microbatch"))


def finish_deferred(group: GroupSpec, pending: PendingReduction) -> torch.Tensor:
    """Wait for `launch_deferred`: the finished gradient in the optimizer placement."""
    total = pending.wait()
    if group.grad_scatters or scales_first(group):
        return total.to(group.dtypes.grad)
    return (total * group.scale if group.scale != 1.0 else total).to(group.dtypes.grad)
