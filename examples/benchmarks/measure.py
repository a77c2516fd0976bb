"""Time, memory, and failures that all ranks agree about."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from case import Contender, NotHereError
from world import World

T = TypeVar("T")
GIB = 2**30


class Clock:
    """Elapsed milliseconds: device events on CUDA, wall time on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def time(self, work: Callable[[], object], iterations: int) -> tuple[float, float]:
        """(elapsed, CPU time until the last launch returned) of one iteration, in ms."""
        if not self.cuda:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(iterations):
                work()
            elapsed = (time.perf_counter() - start) * 1e3 / iterations
            return elapsed, elapsed
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        first.record()
        for _ in range(iterations):
            work()
        last.record()
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        return first.elapsed_time(last) / iterations, launched * 1e3 / iterations


def iterations_for(world: World, milliseconds: float, budget: float = 300.0) -> int:
    """How many iterations make about `budget` ms, two to twenty; the same on every rank."""
    return min(max(math.ceil(budget / max(world.most(milliseconds), 1e-3)), 2), 20)


def attempt(world: World, work: Callable[[], T]) -> tuple[T | None, str]:
    """(result, "") or (None, why not). If a rank fails, all give the result up."""
    result: T | None = None
    reason = ""
    try:
        result = work()
        if world.cuda:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except NotHereError as error:
        reason = str(error)
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        if world.rank == 0:
            traceback.print_exc()
    if world.most(bool(reason)):
        return None, reason or "out of memory on another rank"
    return result, ""


def clean(world: World) -> None:
    """Give back what nobody holds, and forget the peak."""
    gc.collect()
    if world.cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory(world: World, contender: Contender) -> dict[str, float]:
    """GiB resident before, at the allocated peak and at the reserved peak; zeros on the CPU, where nobody counts."""
    clean(world)
    if not world.cuda:
        contender.forward_backward()
        return {"resident": 0.0, "peak": 0.0, "reserved": 0.0}
    resident = torch.cuda.memory_allocated()
    for _ in range(3 if contender.probe is None else 1):
        (contender.probe or contender.forward_backward)()
    torch.cuda.synchronize()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(("resident", "peak", "reserved"), (x / GIB for x in (resident, *peaks)), strict=True))
