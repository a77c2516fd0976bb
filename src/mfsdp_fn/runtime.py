"""Policies of a run: what is kept gathered, how far ahead to launch, how much may be in flight."""

from __future__ import annotations

import dataclasses
import enum

from .errors import PlanError, bad


class PrefetchOrder(enum.Enum):
    """Where the order of prefetching comes from (seed: context).

    REGISTRATION: the order of the spec's units. RECORDED: the first call gathers on demand and is remembered
    by the transformed function; later calls must repeat its sequence of units. `vjp` has no such function, so that
    RECORDED gathers on demand there.
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
    """Settings that change when things are launched, where and what is kept, never results (seed: context).

    All ranks must plan with the same policy; `plan` compares it. A compiled step follows those that say what is
    reduced or kept and which communicator is used, and `max_inflight_reductions`; it gathers one unit ahead.

    Args:
        keep_gathered: unit patterns whose gathered weights are kept from forward to backward (one gather a
            microbatch instead of two). ``""`` is the root unit. A pattern is refused if the weights of all its units
            are whole at rest (ddp, zero1, zero2).
        prefetch_order: see `PrefetchOrder`.
        forward_prefetch, backward_prefetch: how many elements may be gathered ahead of the unit in use; 0
            gathers on demand, None (default) exactly one unit.
        max_inflight_reductions: how many reduction inputs may be alive at once, over all states of a call; with
            `overlap_outer_communication` as many again of outer reductions, whose inputs are shards.
        store_compute_weights: keep sharded weights in the compute dtype beside the main weights, cast once a step.
            False casts at each gather instead: slower, and less memory by one compute-dtype shard. Only for
            weights that are sharded at rest; replicated ones are always stored. `unshard` of gradients and moments
            then gives the compute dtype too.
        overlap_allgather_reduction: give reductions a communicator of their own, so that they run beside gathers.
            False sends both over the mesh's own communicators, one after the other: fewer of them to make and to
            hold memory for.
        overlap_outer_communication: let a unit's outer reduction (hsdp: all-reduce, hfsdp: reduce-scatter) run
            beside the reduce-scatter of the next unit; the outer axis has communicators of its own in any case.
            False waits for it first, which keeps one shard less. On a mesh of one axis nothing is outer: no effect.
        use_symmetric_memory: send from and receive into buffers in NCCL's symmetric memory: two for each
            communicator, as large as its largest message, with a copy in and out. NCCL then has faster kernels within
            one NVLink domain; they sum a bf16 or fp16 wire in fp32, so that sums may round less. Refused where it
            can't be: outside CUDA and NCCL 2.27, on one rank, for groups with ragged segments, in compiled steps.
        caller_managed_grad_sync: never finish gradients of a microbatch that still wait for a reduction (ddp,
            zero1: all of it, hsdp, hfsdp: the outer axis), the last one's neither: the caller does, with
            ``finish_grad_sync(grads)``, before a step of an optimizer. What is reduced in every microbatch is not
            affected (zero2, zero3: all of it).

    >>> policy = RuntimePolicy(keep_gathered=("blocks.7",), forward_prefetch=10**7, max_inflight_reductions=2)
    >>> policy.overlap_allgather_reduction, policy.caller_managed_grad_sync
    (True, False)
    """

    keep_gathered: tuple[str, ...] = ()
    prefetch_order: PrefetchOrder = PrefetchOrder.REGISTRATION
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    max_inflight_reductions: int = 1
    overlap_allgather_reduction: bool = True
    store_compute_weights: bool = True
    overlap_outer_communication: bool = True
    use_symmetric_memory: bool = False
    caller_managed_grad_sync: bool = False


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
    inflight = runtime.max_inflight_reductions
    if isinstance(inflight, bool) or not isinstance(inflight, int) or inflight < 1:
        raise PlanError(
            bad(
                "runtime.max_inflight_reductions",
                inflight,
                "a positive integer",
                "1 keeps one reduction input alive",
            )
        )
    for field in dataclasses.fields(RuntimePolicy):
        if isinstance(field.default, bool) and not isinstance(getattr(runtime, field.name), bool):
            got = repr(getattr(runtime, field.name))
            raise PlanError(bad(f"runtime.{field.name}", got, "True or False", "give a bool"))
    if not isinstance(runtime.prefetch_order, PrefetchOrder):
        raise PlanError(
            bad(
                "runtime.prefetch_order",
                repr(runtime.prefetch_order),
                "a PrefetchOrder",
                "use PrefetchOrder.REGISTRATION or PrefetchOrder.RECORDED",
            )
        )
