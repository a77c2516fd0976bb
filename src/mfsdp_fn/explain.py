"""`spec.explain()`: the plan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collectives import Axis
    from .group import GroupSpec
    from .spec import ShardSpec

ALIGNMENT = 16  # bytes: what a vector load or a matrix kernel wants a matrix to start at


def misaligned(group: GroupSpec) -> int:
    """How many of the group's matrices start off a 16-byte boundary of the gathered buffer."""
    size = group.dtypes.compute.itemsize
    return sum(1 for offset, shape, numel in group.views if len(shape) >= 2 and numel and offset * size % ALIGNMENT)


def explain(spec: ShardSpec) -> str:
    """One line a group: tensors, elements, padding, this rank's bytes, misaligned matrices."""
    rows = [("group", "tensors", "elements", "padding", "local MiB", "gathered MiB", "off 16 B")]
    for group in spec.groups:
        numel = sum(numel for _, _, numel in group.views)
        local = (group.main_range.stop - group.main_range.start) * group.dtypes.main.itemsize
        if group.has_compute:
            local += (group.compute_range.stop - group.compute_range.start) * group.dtypes.compute.itemsize
        padding = (group.layout.size - numel) / numel if numel else 0.0
        rows.append(
            (
                group.name,
                str(len(group.paths)),
                f"{numel:,}",
                f"{padding:.2%}",
                f"{local / 2**20:.2f}",
                f"{group.layout.size * group.dtypes.compute.itemsize / 2**20:.2f}",
                str(misaligned(group)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    head = f"{len(spec.leaves)} leaves in {len(spec.groups)} groups of {len(spec.units)} units over {_sizes(spec.axes)}"
    others: dict[int, str] = {}
    for group in spec.groups:
        if group.mesh is not spec.mesh:
            others.setdefault(id(group.mesh), f"{group.unit or '(root)'} over {_sizes(group.axes)}")
    return "\n".join([", ".join([f"{head} ranks", *others.values()]), *lines])


def _sizes(axes: Sequence[Axis]) -> str:
    return "x".join(str(axis.size) for axis in axes)
