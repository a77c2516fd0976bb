"""Rows beside FSDP2's and beside what nobody can be faster than."""

from __future__ import annotations

from typing import Any

import torch
from case import NO_WIRE
from contenders import BASE, FLOORS

Rows = dict[str, dict[str, Any]]  # by contender; what failed has a note and no figures


def deviation(mine: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest relative difference of a parameter's norm."""
    return ((mine - reference).abs() / reference.clamp_min(torch.finfo(torch.float32).tiny)).max().item()


def compared(rows: Rows, limit: float, limit_ddp: float) -> None:
    """Add ratios to FSDP2 and to the floor, and flag gradients that differ."""
    base = rows.get(BASE, {})
    fastest = [[rows[name]["fb_ms"] for name in names if "fb_ms" in rows.get(name, {})] for names in FLOORS]
    if any(rows.get(name, {}).get("note") == NO_WIRE for name in FLOORS[1]):
        fastest = fastest[:1]
    floor = max(min(found) for found in fastest) if all(fastest) else None
    for name, row in rows.items():
        if base.get("fb_ms") and "fb_ms" in row:
            row["ratio"] = row["fb_ms"] / base["fb_ms"]
        if base.get("step_ms") and "step_ms" in row:
            row["ratio_step"] = row["step_ms"] / base["step_ms"]
        if base.get("peak") and row.get("peak"):
            row["ratio_peak"] = row["peak"] / base["peak"]
        if floor is not None and "fb_ms" in row:
            row["ratio_floor"] = row["fb_ms"] / floor
        row["limit"], row["limit_ddp"] = limit, limit_ddp
        # Not `>`, so that NaN is flagged.
        if "deviation" in row and not row["deviation"] <= (limit_ddp if name == "DDP" else limit):
            row["note"] = f"{row['note']} GRADIENTS DIFFER".strip()
