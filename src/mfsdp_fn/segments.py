"""Segments: the runs of a rank's flat buffers that are treated alike, such as those with one weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping

from .group import GroupSpec
from .spec import ShardSpec


@dataclasses.dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a local main buffer, all with one label."""

    label: Hashable
    start: int
    stop: int


def segments(
    spec: ShardSpec, label_of: Callable[[str], Hashable] | Mapping[str, Hashable]
) -> tuple[tuple[Segment, ...], ...]:
    """The maximal runs of this rank's main buffers whose tensors have one label, padding left out.

    Plain integers: communicates nothing. Its time is linear in the number of tensors, so call it once, where a
    state is made, and keep the result as a static part of that state.

    Args:
        spec: the plan.
        label_of: the label of each path, by function or mapping. A tied tensor is asked for under its first path.

    Returns:
        For each of ``spec.groups`` (frozen ones too) the segments in order, offsets local to the buffer. Tensors
        that touch and have equal labels are one segment; a rank that holds nothing of a group has none.

    >>> import torch, mfsdp_fn as mf
    >>> params = {name: torch.zeros(4, requires_grad=True) for name in ("a.w", "b.w", "b.bias")}
    >>> spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3())
    >>> segments(spec, lambda path: path.endswith("bias"))[0]
    (Segment(label=False, start=0, stop=8), Segment(label=True, start=8, stop=12))
    """
    lookup = label_of.__getitem__ if isinstance(label_of, Mapping) else label_of
    return tuple(_of_group(group, lookup) for group in spec.groups)


def _of_group(group: GroupSpec, label_of: Callable[[str], Hashable]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for index, start, stop in group.main_pieces:
        label = label_of(group.paths[index])
        if found and found[-1].stop == start and found[-1].label == label:
            found[-1] = dataclasses.replace(found[-1], stop=stop)
        else:
            found.append(Segment(label, start, stop))
    return tuple(found)
