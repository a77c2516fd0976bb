"""Policies of a run: what is kept gathered, how far ahead to launch, how much may be in flight."""

from __future__ import annotations

import dataclasses
import enum

from .errors import PlanError, bad


class PrefetchOrder(enum.Enum):
    """Where the order of prefetching comes from (seed: context).

    REGISTRATION: the order of the spec's units. RECORDED: the first call gathers on demand and is remembered
    by the transformed function; later calls must repeat its sequence of units.
    """

    REGISTRATION = "registration"
    RECORDED = "recorded"


class Phase(enum.Enum):
    """What a gather is for."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclasses.dataclass(frozen=True)
class ExecutionOrder:
    """A sequence of units, each (number of the state in the call, unit), as recorded in one forward."""

    units: tuple[tuple[int, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class RuntimePolicy:
    """Settings that change when things are launched and what is kept, never results.

    Args:
        keep_gathered: unit patterns whose gathered weights are kept from forward to backward (one gather a
            microbatch instead of two). ``""`` is the root unit.
        prefetch_order: see `PrefetchOrder`.
        forward_prefetch, backward_prefetch: how many elements may be gathered ahead of the unit in use; 0
            gathers on demand, None (default) exactly one unit.
        max_inflight_reductions: how many reduction inputs may be alive at once.
        store_compute_weights: keep sharded weights in the compute dtype beside the main weights, cast once a step.
            False casts at each gather instead: slower, and less memory by one compute-dtype shard. Only for
            weights that are sharded at rest; replicated ones are always stored. `unshard` of gradients and moments
            then gives the compute dtype too.
        overlap_allgather_reduction: give reductions a communicator of their own, so that they run beside gathers.
    """

    keep_gathered: tuple[str, ...] = ()
    prefetch_order: PrefetchOrder = PrefetchOrder.REGISTRATION
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    max_inflight_reductions: int = 1
    overlap_allgather_reduction: bool = True
    store_compute_weights: bool = True


def check_runtime(runtime: RuntimePolicy) -> None:
    """Refuse settings that mean nothing.

    Raises:
        PlanError: naming the setting.
    """
    if not isinstance(runtime, RuntimePolicy):
        raise PlanError(bad("runtime", repr(runtime), "a RuntimePolicy", "write RuntimePolicy(forward_prefetch=0)"))
    if isinstance(runtime.keep_gathered, str):
        raise PlanError(
            bad(
                "runtime.keep_gathered",
                repr(runtime.keep_gathered),
                "a tuple of unit patterns",
                f"write ({runtime.keep_gathered!r},)",
            )
        )
    for name in ("forward_prefetch", "backward_prefetch"):
        value = getattr(runtime, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise PlanError(
                bad(
                    f"runtime.{name}",
                    value,
                    "None or a number of elements",
                    "None launches one unit ahead, 0 none",
                )
            )
    if not isinstance(runtime.max_inflight_reductions, int) or runtime.max_inflight_reductions < 1:
        raise PlanError(
            bad(
                "runtime.max_inflight_reductions",
                runtime.max_inflight_reductions,
                "a positive integer",
                "1 keeps one reduction input alive",
            )
        )
    for name in ("overlap_allgather_reduction", "store_compute_weights"):
        if not isinstance(getattr(runtime, name), bool):
            raise PlanError(bad(f"runtime.{name}", repr(getattr(runtime, name)), "True or False", "give a bool"))
    if not isinstance(runtime.prefetch_order, PrefetchOrder):
        raise PlanError(
            bad(
                "runtime.prefetch_order",
                repr(runtime.prefetch_order),
                "a PrefetchOrder",
                "use PrefetchOrder.REGISTRATION or PrefetchOrder.RECORDED",
            )
        )
