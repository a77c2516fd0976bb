"""Simulated ranks: a mesh whose collectives are exchanges between threads of this process.

A collective is done when every rank of its axis has launched it. Sums are taken in the order of ranks, so results are
the same in every run. What real processes would only show by hanging, by wrong sums or once in a thousand runs is an
error here: ranks that launch different collectives, and buffers that are written to while they travel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .errors import OrderError, SimulationError, StateError, bad
from .turns import Turns, on_a_rank


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a simulated rank has launched.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "all_to_all".
        axis: the name of the mesh axis; for one over several axes their names, joined by "+".
        group: name of the group (of `ShardSpec.groups`) whose buffer it is; "" for norms and for exchanges with owners.
        dtype: of what travels.
        sent: bytes of this rank's input.
        received: bytes of this rank's result.
    """

    kind: str
    axis: str
    group: str
    dtype: torch.dtype
    sent: int
    received: int


class World:
    """What the ranks of one simulation share: whose turn it is, and what each has launched."""

    def __init__(self, size: int) -> None:
        self.turns = Turns()
        self.lines: dict[tuple[str, tuple[int, ...]], _Line] = {}
        self.launched: list[list[Collective]] = [[] for _ in range(size)]

    def check_ended(self) -> None:
        """Whether everything launched was joined by all.

        Raises:
            OrderError: naming what was not.
        """
        for (axis, ranks), line in self.lines.items():
            for number, exchange in line.open.items():
                joined = [rank for place, rank in enumerate(ranks) if place in exchange.parts]
                who = f"from ranks {joined} of {list(ranks)} only"
                raise _disagreement(f"collective {number} over axis {axis!r}, {exchange.label}, {who}")


class _Line:
    """The collectives of the ranks that share an axis, in order: how many each has launched, and the open ones."""

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.open: dict[int, _Exchange] = {}


class _Exchange:
    """One collective: what each rank gave, by its place on the axis, and what comes of it once all have."""

    def __init__(self, label: str, size: int, combine: Callable[[list[Any]], Any]) -> None:
        self.label, self.size, self.combine = label, size, combine
        self.parts: dict[int, Any] = {}
        self.total: Any = None

    def give(self, place: int, part: Any) -> None:
        """One rank's part; the last one makes the result."""
        self.parts[place] = part
        if self.complete():
            self.total = self.combine([self.parts[number] for number in range(self.size)])
            self.parts = dict.fromkeys(self.parts)  # let go of before the slowest rank looks

    def complete(self) -> bool:
        """Whether every rank gave its part."""
        return len(self.parts) == self.size


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A launched simulated collective, seen from one rank."""

    communicator: Communicator
    number: int
    exchange: _Exchange
    sent: torch.Tensor | None  # as it was given, and a copy of it
    kept: torch.Tensor | None
    pick: Callable[[Any], Any]

    def wait(self) -> Any:
        """This rank's result.

        Raises:
            StateError: the input was written to after the launch.
        """
        communicator = self.communicator
        communicator.check_caller()
        communicator.world.turns.wait(self.exchange.complete, self._describe)
        if self.sent is not None and self.kept is not None and not torch.equal(_bytes(self.sent), self.kept):
            raise StateError(
                bad(
                    "state",
                    f"a write to the input of {self.exchange.label} over axis {communicator.axis!r} after its launch",
                    "buffers that stay as they are while they travel",
                    "wait for what is launched before a donating call",
                )
            )
        return self.pick(self.exchange.total)

    def _describe(self) -> str:
        missing = [r for place, r in enumerate(self.communicator.ranks) if place not in self.exchange.parts]
        return (
            f"ranks {missing} in collective {self.number} over axis {self.communicator.axis!r}, {self.exchange.label}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Communicator:
    """The ranks that share an axis, seen from one of them: `ranks` in ascending order, and its place among them.

    `group` is the group whose buffers it is used for: two groups' buffers of one size are told apart by it.

    Collectives over an axis are one sequence, gathers and reductions together: stricter than two communicators, of
    which ranks need only agree about each.
    """

    world: World
    axis: str
    ranks: tuple[int, ...]
    place: int
    group: str = ""

    def all_gather(self, local: torch.Tensor, sizes: Sequence[int]) -> Arrival:
        """1-D segments of `sizes` elements, end to end."""
        assert local.numel() == sizes[self.place]
        label = f"all_gather of {tuple(sizes)} elements of {local.dtype}"
        return self._launch("all_gather", label, local, sum(sizes), torch.cat, torch.clone)

    def reduce_scatter(self, full: torch.Tensor, sizes: Sequence[int]) -> Arrival:
        """This rank's segment of `sizes` elements of the sum."""
        assert full.numel() == sum(sizes)
        start, size = sum(sizes[: self.place]), sizes[self.place]
        label = f"reduce_scatter to {tuple(sizes)} elements of {full.dtype}"
        return self._launch(
            "reduce_scatter", label, full, size, _total, lambda total: total.narrow(0, start, size).clone()
        )

    def all_reduce(self, full: torch.Tensor) -> Arrival:
        """The sum."""
        label = f"all_reduce of {full.numel()} elements of {full.dtype}"
        return self._launch("all_reduce", label, full, full.numel(), _total, torch.clone)

    def broadcast(self, tensor: torch.Tensor) -> Arrival:
        """The first rank's tensor."""
        label = f"broadcast of {tensor.numel()} elements of {tensor.dtype}"
        return self._launch("broadcast", label, tensor, tensor.numel(), lambda parts: parts[0], torch.clone)

    def all_to_all(self, wire: torch.Tensor, receive: Sequence[int], send: Sequence[int]) -> Arrival:
        """`send[i]` elements of `wire` to the rank at place `i`, `receive[i]` from it, end to end."""

        def pick(parts: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
            mine = [segments[self.place] for segments in parts]
            for place, (segment, expected) in enumerate(zip(mine, receive, strict=True)):
                if segment.numel() != expected:
                    raise _disagreement(
                        f"an all_to_all over axis {self.axis!r} in which rank {self.ranks[place]} sends "
                        f"{segment.numel()} elements to rank {self.ranks[self.place]}, which expects {expected}"
                    )
            return torch.cat(mine)

        label, numel = f"all_to_all of {wire.dtype}", sum(receive)
        return self._launch("all_to_all", label, wire, numel, list, pick, lambda kept: torch.split(kept, list(send)))

    def exchange_objects(self, obj: Any) -> list[Any]:
        """The object of every rank."""
        return self._join("an exchange of objects", obj, list, list, None, None).wait()

    def check_caller(self) -> None:
        """Whether it is this rank that calls.

        Raises:
            SimulationError: another rank, another thread, or the simulation is over.
        """
        rank, caller = self.ranks[self.place], self.world.turns.current()
        if caller != rank:
            where = "outside its call" if caller is None else f"by rank {caller}"
            raise SimulationError(
                bad(
                    "mesh",
                    f"the mesh of simulated rank {rank}, used {where}",
                    "the mesh that `fn` was called with, used inside that call",
                    "plan and shard inside `fn`, and return whole tensors from it (mf.unshard(state))",
                )
            )

    def _launch(
        self,
        kind: str,
        label: str,
        sent: torch.Tensor,
        received: int,
        combine: Callable[[list[Any]], Any],
        pick: Callable[[Any], Any],
        prepare: Callable[[torch.Tensor], Any] = lambda kept: kept,
    ) -> Arrival:
        if torch.compiler.is_compiling():
            raise SimulationError(_COMPILED)
        if sent.device.type != "cpu":
            raise SimulationError(
                bad("params", f"a {sent.device.type} tensor on a simulated rank", "CPU tensors", "move them to the CPU")
            )
        kept = sent.detach().clone()
        arrival = self._join(label, prepare(kept), combine, pick, sent.detach(), _bytes(kept))
        made = Collective(kind, self.axis, self.group, sent.dtype, sent.nbytes, received * sent.itemsize)
        self.world.launched[self.ranks[self.place]].append(made)
        return arrival

    def _join(
        self,
        label: str,
        part: Any,
        combine: Callable[[list[Any]], Any],
        pick: Callable[[Any], Any],
        sent: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> Arrival:
        """Give a part to this rank's next collective over the axis, which must be what the others say it is."""
        label += f" of group {self.group!r}" if self.group else ""
        self.check_caller()
        self.world.turns.stop_if_failed()
        check_alone()
        line = self.world.lines.setdefault((self.axis, self.ranks), _Line(len(self.ranks)))
        number = line.counts[self.place]
        line.counts[self.place] += 1
        exchange = line.open.setdefault(number, _Exchange(label, len(self.ranks), combine))
        if exchange.label != label:
            first = f"{exchange.label} from rank {self.ranks[next(iter(exchange.parts))]}"
            mine = f"{label} from rank {self.ranks[self.place]}"
            raise _disagreement(f"two kinds of collective {number} over axis {self.axis!r}: {first}, and {mine}")
        exchange.give(self.place, part)
        if exchange.complete():
            del line.open[number]
        return Arrival(self, number, exchange, sent, kept, pick)


def check_alone() -> None:
    """Refuse a process group: code that asks torch.distributed for its rank would get this process' one on all ranks.

    Raises:
        SimulationError: there is one.
    """
    if dist.is_available() and dist.is_initialized():
        raise SimulationError(
            bad(
                "simulate",
                "a process with a torch.distributed process group",
                "one without, in which no code takes the process' rank for a simulated one",
                "call torch.distributed.destroy_process_group() first, or simulate in a process of its own",
            )
        )


_COMPILED = bad(
    "step",
    "a compiled step on a simulated rank",
    "an eager one",
    "leave mfsdp_fn.compile out: results are the same; test the compiled step on real processes",
)


def refuse_compiling() -> None:
    """Refuse a compiled step where ranks are simulated: a graph can't hold what they exchange.

    Raises:
        SimulationError: the caller is a simulated rank.
    """
    if on_a_rank():
        raise SimulationError(_COMPILED)


def _disagreement(got: str) -> OrderError:
    return OrderError(
        bad(
            "fn",
            got,
            "the same collectives in the same order on every rank",
            "gather every unit on every rank, whether it uses it or not",
        )
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of ranks, in the tensors' own dtype as on a wire."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
