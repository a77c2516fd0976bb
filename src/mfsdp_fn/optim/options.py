"""Options by path: which elements of the flat buffers get which hyperparameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..checks import check_number, shown
from ..errors import MfsdpError, StateError, bad
from ..segments import Segment, segments
from ..spec import ShardSpec

LearningRate = float | torch.Tensor | Callable[[torch.Tensor], float | torch.Tensor]
Overrides = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Parts:
    """This rank's segments of the trainable groups, labelled by the patterns that match them.

    Static: computed by `init`, so that a step only reads integers. The values of the options are not in it: they
    are the optimizer's, and may differ from step to step.
    """

    patterns: tuple[str, ...]
    segments: tuple[tuple[Segment, ...], ...]


def make_parts(spec: ShardSpec, overrides: Overrides) -> Parts:
    """The parts of a plan.

    Raises:
        PlanError: a pattern that matches no path.
    """
    labels: dict[str, tuple[str, ...]] = {path: () for group in spec.groups for path in group.paths}
    for pattern in overrides:
        selected = spec.select([pattern])
        # A tied tensor is in its group under its first path only, but every path of it counts.
        slots = {(leaf.group, leaf.index) for leaf in spec.leaves if leaf.path in selected}
        for group, index in sorted(slots):
            labels[spec.groups[group].paths[index]] += (pattern,)
    rows = segments(spec, labels)
    trainable = tuple(row if group.requires_grad else () for row, group in zip(rows, spec.groups, strict=True))
    return Parts(tuple(overrides), trainable)


def check_parts(parts: Parts, overrides: Overrides) -> None:
    """Refuse an optimizer state made with other patterns.

    Raises:
        StateError: telling both.
    """
    if parts.patterns != tuple(overrides):
        raise StateError(
            bad(
                "opt_state",
                f"a state made with overrides for {list(parts.patterns)}",
                f"overrides for {list(overrides)}, as this optimizer has",
                "call init(state) of this optimizer",
            )
        )


def options_for(label: Any, options: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """The options of a segment: the optimizer's own, then those of each pattern; the last one wins."""
    merged = dict(options)
    for pattern in label:
        merged.update(overrides[pattern])
    return merged


def learning_rate(lr: LearningRate, step: torch.Tensor, argument: str = "lr") -> float | torch.Tensor:
    """The learning rate after `step` steps.

    Raises:
        MfsdpError: a schedule that gives no learning rate.
    """
    if not callable(lr):
        return lr
    found: Any = lr(step)
    if callable(found):
        raise MfsdpError(
            bad(argument, f"a schedule that gives {shown(found)}", "a number or a 0-D tensor", "return it")
        )
    check_learning_rate(argument, found)
    return found


def options_by_label(
    parts: Parts, options: Mapping[str, Any], overrides: Overrides, step: torch.Tensor
) -> dict[Any, dict[str, Any]]:
    """The options of each label, learning rates evaluated: all of them before anything is changed.

    Raises:
        MfsdpError: a schedule that gives no learning rate.
    """
    found: dict[Any, dict[str, Any]] = {}
    labels: list[Any] = [segment.label for row in parts.segments for segment in row]
    for label in dict.fromkeys(labels):
        found[label] = mine = options_for(label, options, overrides)
        where = next((f"overrides[{p!r}]['lr']" for p in reversed(label) if "lr" in overrides[p]), "lr")
        mine["lr"] = learning_rate(mine["lr"], step, where)
    return found


Place = tuple[int, Segment]


def batches(
    parts: Parts, main: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> Iterator[tuple[Any, list[Place]]]:
    """(label, places) for each call of a multi-tensor kernel.

    All places of a label together, but groups whose gradient must be cast one by one: so one group's copy is
    alive at a time.
    """
    found: dict[tuple[Any, int], list[Place]] = {}
    for number, row in enumerate(parts.segments):
        alone = number if grads[number].dtype != main[number].dtype else -1
        for segment in row:
            found.setdefault((segment.label, alone), []).append((number, segment))
    for (label, _), places in found.items():
        yield label, places


def cut(buffers: Sequence[torch.Tensor], places: Sequence[Place]) -> list[torch.Tensor]:
    """Views of the buffers at `places`."""
    return [buffers[number].narrow(0, segment.start, segment.stop - segment.start) for number, segment in places]


def cut_like(
    buffers: Sequence[torch.Tensor], main: Sequence[torch.Tensor], places: Sequence[Place]
) -> list[torch.Tensor]:
    """As `cut`, in the dtype of `main`."""
    views = cut(buffers, places)
    return [view.to(main[number].dtype) for view, (number, _) in zip(views, places, strict=True)]


def check_options(
    options: Mapping[str, Any], overrides: Overrides | None, check: Callable[[str, str, Any], None]
) -> dict[str, dict[str, Any]]:
    """The overrides as plain dicts, all values checked.

    Args:
        options: the optimizer's own options.
        overrides: options by pattern.
        check: ``check(argument, option, value)`` refuses a bad value.

    Raises:
        MfsdpError: an option that the optimizer doesn't have, or a bad value, by name.
    """
    for option, value in options.items():
        check(option, option, value)
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise MfsdpError(
            bad("overrides", repr(overrides), "options by pattern", "write {'norm*': {'weight_decay': 0.0}}")
        )
    for pattern, mine in overrides.items():
        where = f"overrides[{pattern!r}]"
        if not isinstance(pattern, str) or not pattern or not isinstance(mine, Mapping):
            raise MfsdpError(
                bad(where, repr(mine), "a dict of options for a dotted pattern", "write {'norm*': {'lr': 0.1}}")
            )
        for option, value in mine.items():
            if option not in options:
                raise MfsdpError(
                    bad(where, f"the option {option!r}", f"one of {list(options)}", "mend the name or leave it out")
                )
            check(f"{where}[{option!r}]", option, value)
    return {pattern: dict(mine) for pattern, mine in overrides.items()}


def check_learning_rate(argument: str, value: Any) -> None:
    """Refuse what isn't a learning rate.

    Raises:
        MfsdpError: naming the argument.
    """
    if isinstance(value, torch.Tensor):
        if value.ndim or not value.is_floating_point():  # its sign would cost a sync
            raise MfsdpError(
                bad(
                    argument,
                    f"a tensor of shape {tuple(value.shape)}, {value.dtype}",
                    "a 0-D tensor of floats",
                    "write torch.tensor(0.1)",
                )
            )
    elif not callable(value):
        check_number(argument, value)
