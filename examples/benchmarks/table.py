"""The rows of a regime as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from world import ALONE

COLUMNS = (
    ("step ms", "step_ms", ".2f"),
    ("f+b ms", "fb_ms", ".2f"),
    ("min", "fb_min", ".2f"),
    ("max", "fb_max", ".2f"),
    ("/FSDP2", "ratio", ".3f"),
    ("/floor", "ratio_floor", ".3f"),
    ("CPU ms", "cpu_ms", ".2f"),
    ("resident", "resident", ".2f"),
    ("peak", "peak", ".2f"),
    ("reserved", "reserved", ".2f"),
    ("mem/FSDP2", "ratio_peak", ".3f"),
    ("grad dev", "deviation", ".1e"),
)


def cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(rows: Sequence[Mapping[str, Any]], *, ranks: int) -> list[str]:
    """One regime: a line a contender, and what the columns mean."""
    first = rows[0]
    title = f"{first['size']}, {first['tokens']} tokens a rank, reduce in {first['reduce']}, {ranks} rank(s)"
    lines = [["contender", *(name for name, _, _ in COLUMNS), ""]]
    for row in rows:
        cells = [cell(row.get(key), form) for _, key, form in COLUMNS]
        lines.append([row["contender"], *cells, row["note"]])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for first_cell, *cells in lines:
        numbers = [cell.rjust(width) for cell, width in zip(cells[:-1], widths[1:-1], strict=True)]
        text.append("  ".join([first_cell.ljust(widths[0]), *numbers, cells[-1]]).rstrip())
    return [title, *text, *footer(first, ranks=ranks)]


def footer(first: Mapping[str, Any], *, ranks: int) -> list[str]:
    limit, limit_ddp = f"{first['limit']:g}", f"{first['limit_ddp']:g}"
    return [
        f"medians of {first['rounds']} interleaved rounds with min and max; memory in GiB, each contender alone",
        "floor: max(compute alone, wire alone), the best of either in this run",
        "grad dev: largest relative difference of a parameter's gradient norm from FSDP2's. Rounding to bf16 gives",
        f"about 1e-3; above {limit} a row is flagged (DDP, with its residual stream in fp32: {limit_ddp})",
        *([ALONE] if ranks == 1 else []),
    ]
