"""`spec.explain()`: the plan as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .group import GroupSpec
    from .spec import ShardSpec

LEGEND = (
    "main: dtype of the optimizer's weights; compute: of gathered ones; MiB kept: on this rank between steps, in both; "
    "misaligned: matrices that start off 16 bytes when gathered"
)
ALIGNMENT = 16  # bytes: what a vector load or a matrix kernel wants a matrix to start at


def misaligned(group: GroupSpec) -> int:
    """How many of the group's matrices start off a 16-byte boundary of the gathered buffer."""
    size = group.dtypes.compute.itemsize
    return sum(1 for offset, shape, numel in group.views if len(shape) >= 2 and numel and offset * size % ALIGNMENT)


def short(dtype: torch.dtype) -> str:
    """A dtype without its package: float32."""
    return str(dtype).removeprefix("torch.")


def explain(spec: ShardSpec) -> str:
    """One line a group: dtypes, tensors, elements, padding, this rank's bytes, misaligned matrices."""
    rows = [("group", "main > compute", "tensors", "elements", "padding", "MiB kept", "MiB gathered", "misaligned")]
    for group in spec.groups:
        numel = sum(numel for _, _, numel in group.views)
        local = (group.main_range.stop - group.main_range.start) * group.dtypes.main.itemsize
        if group.has_compute:
            local += (group.compute_range.stop - group.compute_range.start) * group.dtypes.compute.itemsize
        padding = (group.layout.size - numel) / numel if numel else 0.0
        rows.append(
            (
                group.name,
                f"{short(group.dtypes.main)} > {short(group.dtypes.compute)}",
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
    sizes = "x".join(str(axis.size) for axis in spec.groups[0].axes) if spec.groups else "-"
    head = f"{len(spec.leaves)} leaves in {len(spec.groups)} groups of {len(spec.units)} units over {sizes} ranks"
    return "\n".join([head, *lines, LEGEND])
