"""Overlap, read from a profiler's trace: gathers and reductions run beside matrix products."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from overlap import read, report, step_of, trace_of

from test_cuda import mesh, on_gpus

pytestmark = pytest.mark.cuda(gpus=2)

UNITS, MICROBATCHES = 6, 2


def overlaps(rank: int, world: int, compiled: bool) -> None:
    work = step_of(mesh(world), units=UNITS, microbatches=MICROBATCHES, width=4096, tokens=8192, compiled=compiled)
    dist.barrier()
    reading = read(trace_of(work))
    said = "\n".join(report("one graph" if compiled else "eager", reading))
    gathers, reductions = reading.of("gather"), reading.of("reduction")
    assert len(gathers) == 2 * UNITS * MICROBATCHES, said
    assert len(reductions) == UNITS * MICROBATCHES, said
    # Nothing can run beside the first gather of a pass (forward or backward) and the last reduction of a backward.
    assert reading.overlapping("gather") >= 2 * (UNITS - 1) * MICROBATCHES, said
    assert reading.overlapping("reduction") >= (UNITS - 1) * MICROBATCHES, said
    assert len(reading.streams("gather")) == len(reading.streams("reduction")) == 1, said
    streams = {*reading.streams("gather"), *reading.streams("reduction"), *reading.product_streams}
    assert len(streams) == 3, said


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "one graph"])
def test_collectives_run_beside_products(tmp_path: Any, compiled: bool) -> None:
    on_gpus(tmp_path, 2, overlaps, compiled)
