"""`spec.explain()`: the plan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .layout_choice import ALIGNMENT

if TYPE_CHECKING:
    from .communicators import Axis
    from .group import GroupSpec
    from .spec import ShardSpec

LEGEND = (
    "main: dtype of the optimizer's weights; compute: of gathered ones; MiB kept: on this rank between steps, in both; "
    "misaligned: matrices that start off 16 bytes when gathered; boundaries off: rank boundaries that do"
)


def misaligned(group: GroupSpec) -> int:
    """How many of the group's matrices start off a 16-byte boundary of the gathered buffer."""
    size = group.dtypes.compute.itemsize
    return sum(1 for offset, shape, numel in group.views if len(shape) >= 2 and numel and offset * size % ALIGNMENT)


def short(dtype: torch.dtype) -> str:
    """A dtype without its package: float32."""
    return str(dtype).removeprefix("torch.")


def misaligned_segments(group: GroupSpec) -> int:
    """How many of the rank boundaries lie off 16 bytes, in the dtype that is gathered or the one that is reduced."""
    size = min(group.dtypes.compute.itemsize, group.dtypes.reduce.itemsize)
    return sum(1 for offset in group.layout.rank_to_offset if offset * size % ALIGNMENT)


def explain(spec: ShardSpec) -> str:
    """Two tables, a line a group: what it holds; and what was predicted for its layout, and why it was picked."""
    columns = ("tensors", "elements", "padding", "MiB kept", "MiB gathered", "misaligned", "boundaries off")
    held: list[Sequence[str]] = [("group", "main > compute", *columns)]
    predicted: list[Sequence[str]] = [
        ("group", "padding", "(chunk rule)", "segment", "largest unpadded", "layout", "why")
    ]
    for group in spec.groups:
        numel = sum(numel for _, _, numel in group.views)
        local = (group.main_range.stop - group.main_range.start) * group.dtypes.main.itemsize
        if group.has_compute:
            local += (group.compute_range.stop - group.compute_range.start) * group.dtypes.compute.itemsize
        padding = (group.layout.size - numel) / numel if numel else 0.0
        size, choice = group.dtypes.compute.itemsize, group.choice
        held.append(
            (
                group.name,
                f"{short(group.dtypes.main)} > {short(group.dtypes.compute)}",
                str(len(group.paths)),
                f"{numel:,}",
                f"{padding:.2%}",
                f"{local / 2**20:.2f}",
                f"{group.layout.size * size / 2**20:.2f}",
                str(misaligned(group)),
                str(misaligned_segments(group)),
            )
        )
        numbers = (choice.padding, choice.chunk_rule, choice.padded, choice.ragged)
        predicted.append((group.name, *(f"{number * size:,}" for number in numbers), choice.picked, choice.why))
    head = f"{len(spec.leaves)} leaves in {len(spec.groups)} groups of {len(spec.units)} units over {_sizes(spec.axes)}"
    others: dict[int, str] = {}
    for group in spec.groups:
        if group.mesh is not spec.mesh:
            others.setdefault(id(group.mesh), f"{group.unit or '(root)'} over {_sizes(group.axes)}")
    head = ", ".join([f"{head} ranks", *others.values()])
    title = "Predictions: bytes of padding and of a rank's segment with padding, of the largest segment without"
    return "\n".join([head, *_table(held, {0}), LEGEND, title, *_table(predicted, {0, 5, 6})])


def _sizes(axes: Sequence[Axis]) -> str:
    return "x".join(str(axis.size) for axis in axes)


def _table(rows: Sequence[Sequence[str]], texts: set[int]) -> list[str]:
    """Lines; columns in `texts` are flush left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.ljust(w) if i in texts else c.rjust(w) for i, (c, w) in pairs).rstrip())
    return lines
