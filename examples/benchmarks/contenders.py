"""Every contender of `train_step.py`, by name, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Callable

from case import Case, Contender
from forms import captured, ours, wire_alone
from peers import compute_alone, ddp, fsdp2

BASE = "FSDP2"
CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    BASE: lambda case: fsdp2(case),
    "FSDP2, prefetch set": lambda case: fsdp2(case, prefetch=True),
    "FSDP2, blocks compiled": lambda case: fsdp2(case, compiled=True),
    "mfsdp_fn": lambda case: ours(case, "eager"),
    "mfsdp_fn, cast at gather": lambda case: ours(case, "eager", stored=False),
    "mfsdp_fn, two in flight": lambda case: ours(case, "eager", inflight=2),
    "mfsdp_fn, module": lambda case: ours(case, "module"),
    "mfsdp_fn, blocks compiled": lambda case: ours(case, "blocks compiled"),
    "mfsdp_fn, blocks compiled, two in flight": lambda case: ours(case, "blocks compiled", inflight=2),
    "mfsdp_fn, one graph": lambda case: ours(case, "one graph"),
    "mfsdp_fn, one graph, two in flight": lambda case: ours(case, "one graph", inflight=2),
    "mfsdp_fn, one graph, cast at gather": lambda case: ours(case, "one graph", stored=False),
    "mfsdp_fn, one graph, cast at gather, two in flight": lambda case: ours(
        case, "one graph", stored=False, inflight=2
    ),
    "mfsdp_fn, CUDA graph of eager": lambda case: captured(case, "eager"),
    "mfsdp_fn, CUDA graph of one graph": lambda case: captured(case, "one graph"),
    "compute alone": lambda case: compute_alone(case),
    "compute alone, blocks compiled": lambda case: compute_alone(case, compiled=True),
    "wire alone": lambda case: wire_alone(case, side_by_side=False),
    "wire alone, side by side": lambda case: wire_alone(case, side_by_side=True),
    "DDP": lambda case: ddp(case),  # last: with the largest models it is the one that has no room beside the others
}
COMPILED = ("blocks compiled", "one graph")
NEED_CUDA = ("CUDA graph",)
# What nobody can be faster than: the slower of these two, each at its best.
FLOORS = (
    ("compute alone", "compute alone, blocks compiled"),
    ("wire alone", "wire alone, side by side"),
)


def quick() -> list[str]:
    """Those that neither compile nor need a GPU."""
    return [name for name in CONTENDERS if not any(part in name for part in (*COMPILED, *NEED_CUDA))]
