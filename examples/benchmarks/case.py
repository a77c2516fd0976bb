"""One regime, and what a contender in it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from model import Config, Model
from torch.distributed.device_mesh import DeviceMesh

LR = 1e-4
T = TypeVar("T")


NO_WIRE = "one rank sends nothing"


class NotHereError(Exception):
    """A contender that this machine can't run."""


@dataclasses.dataclass
class Contender:
    """What is timed, and what is checked.

    Args:
        forward_backward: one forward and backward, gradients reduced and dropped.
        step: the same with the optimizer's step; None where there is no optimizer.
        norms: the norm of every parameter's gradient, in order of name, the same on all ranks.
        probe: run instead of `forward_backward` for its peak of memory: a graph's replay allocates nothing.
    """

    forward_backward: Callable[[], object]
    step: Callable[[], object] | None = None
    norms: Callable[[], torch.Tensor] | None = None
    probe: Callable[[], object] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One regime, and what its contenders share: weights and optimizer states, made when first asked for."""

    config: Config
    mesh: DeviceMesh
    device: torch.device
    tokens: torch.Tensor
    targets: torch.Tensor
    compute: torch.dtype
    reduce: torch.dtype
    shared: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def alone(self) -> Case:
        """The same with nothing made yet."""
        return dataclasses.replace(self, shared={})

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gives, made once a case."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]


class Blocks:
    """A module whose blocks can run eagerly or compiled in place, with the same weights.

    `block.compile()` is what FSDP2's documentation has; it replaces the block's plain call, which is given back to run
    eagerly. Hooks are inside that call, so it makes no difference whether it comes before or after sharding.
    """

    def __init__(self, module: Model) -> None:
        self.module, self.compiled = module, False
        self.calls: list[Any] = []

    def use(self, *, compiled: bool) -> Model:
        if compiled and not self.calls:
            for block in self.module.blocks:
                block.compile(dynamic=False)
            self.calls = [block._compiled_call_impl for block in self.module.blocks]
        elif compiled is not self.compiled:
            for block, call in zip(self.module.blocks, self.calls, strict=True):
                block._compiled_call_impl = call if compiled else None
        self.compiled = compiled
        return self.module


def norms_of(parts: Iterable[tuple[str, torch.Tensor]], names: Iterable[str], *, sharded: bool) -> torch.Tensor:
    """Norms by name from (name, part of its gradient) of this rank; `sharded`: other ranks hold the other parts."""
    place = {name: number for number, name in enumerate(sorted(names))}
    squares: torch.Tensor | None = None
    for name, part in parts:
        if squares is None:
            squares = torch.zeros(len(place), dtype=torch.float64, device=part.device)
        if part.numel():
            squares[place[name]] += torch.linalg.vector_norm(part, dtype=torch.float32).double().square()
    assert squares is not None, "no rank of these benchmarks is without gradients"
    if sharded:
        dist.all_reduce(squares)
    return squares.sqrt().cpu()
