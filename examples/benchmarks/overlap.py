"""What runs beside what, read from a profiler's trace: each gather and reduction against the matrix products.

    torchrun --nproc-per-node 2 examples/benchmarks/overlap.py --units 8 --microbatches 2

Needs CUDA and two ranks or more: alone NCCL has no kernels to look at. `read` is for any trace that torch.profiler
exports.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import mfsdp_fn as mf

PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|sm\d\d_|flash|fmha|triton_tem", re.IGNORECASE)
KINDS = {"gather": re.compile(r"nccl\w*AllGather"), "reduction": re.compile(r"nccl\w*(ReduceScatter|AllReduce)")}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One NCCL kernel: its kind, stream and microseconds, and for how many of them a product ran elsewhere."""

    kind: str
    stream: int
    start: float
    duration: float
    beside_product: float
    beside_other: float  # the other kind of collective

    @property
    def overlaps(self) -> bool:
        return self.beside_product > 0


@dataclasses.dataclass(frozen=True)
class Reading:
    """Collectives in order of start, and the streams of the products."""

    collectives: tuple[Collective, ...]
    product_streams: tuple[int, ...]
    products: int

    def of(self, kind: str) -> tuple[Collective, ...]:
        return tuple(found for found in self.collectives if found.kind == kind)

    def overlapping(self, kind: str) -> int:
        return sum(found.overlaps for found in self.of(kind))

    def streams(self, kind: str) -> tuple[int, ...]:
        return tuple(sorted({found.stream for found in self.of(kind)}))


def _shared(span: Mapping[str, Any], others: list[Mapping[str, Any]]) -> float:
    """Microseconds of `span` during which one of `others`, on another stream, ran."""
    start, stop = span["ts"], span["ts"] + span["dur"]
    spans = sorted((o["ts"], o["ts"] + o["dur"]) for o in others if o["args"]["stream"] != span["args"]["stream"])
    total, reached = 0.0, start
    for first, last in spans:
        first, last = max(first, reached), min(last, stop)
        if last > first:
            total, reached = total + last - first, last
    return total


def read(trace: Mapping[str, Any]) -> Reading:
    """A Chrome trace of torch.profiler, as JSON."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    found = {kind: [k for k in kernels if pattern.search(k["name"])] for kind, pattern in KINDS.items()}
    products = [k for k in kernels if "nccl" not in k["name"].lower() and PRODUCT.search(k["name"])]
    collectives = [
        Collective(
            kind=kind,
            stream=kernel["args"]["stream"],
            start=kernel["ts"],
            duration=kernel["dur"],
            beside_product=_shared(kernel, products),
            beside_other=_shared(kernel, found["reduction" if kind == "gather" else "gather"]),
        )
        for kind, kernels in found.items()
        for kernel in kernels
    ]
    streams = tuple(sorted({product["args"]["stream"] for product in products}))
    return Reading(tuple(sorted(collectives, key=lambda c: c.start)), streams, len(products))


def trace_of(work: Callable[[], object]) -> dict[str, Any]:
    """The trace of one call, on this rank."""
    # Without the CPU's events, which would make the file large; kernels are all that is read.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def step_of(
    mesh: DeviceMesh, *, units: int, microbatches: int, width: int, tokens: int, compiled: bool
) -> Callable[[], object]:
    """Forward and backward of zero3 over `units` equal units and no root, with accumulation; warmed up."""
    device = torch.device(mesh.device_type)
    params = {
        f"blocks.{i}.{name}": (torch.randn(width, width, device=device) / width**0.5).requires_grad_()
        for i in range(units)
        for name in ("a", "b")
    }
    precision = mf.MixedPrecisionPolicy(compute=torch.bfloat16, reduce=torch.float32)
    spec = mf.plan(params, mesh, mf.zero3(), units=("blocks.*",), precision=precision)
    state, names = mf.shard(params, spec), spec.units_matching("blocks.*")
    batches = [torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for _ in range(microbatches)]

    def loss(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
        for name in names:
            p = mf.unshard(state[name])
            x = x + torch.relu(x @ p["a"]) @ p["b"]
        return x.float().square().mean()

    def accumulate(state: mf.ShardState, batches: list[torch.Tensor]) -> Any:
        grads = None
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            _, grads = mf.value_and_grad(loss, accumulate=grads, is_last_microbatch=last)(state, batch)
        return grads

    program = mf.compile(accumulate, dynamic=False) if compiled else accumulate
    busy = torch.ones(2**26, device=device) if device.type == "cuda" else torch.ones(1)

    def work() -> None:
        for _ in range(100):  # so that the CPU is ahead of the GPU from the first launch on
            busy.sin_()
        program(state, batches)

    for _ in range(3):
        program(state, batches)
    return work


def report(name: str, reading: Reading) -> list[str]:
    lines = []
    for kind in KINDS:
        all_of = reading.of(kind)
        total = sum(found.duration for found in all_of)
        beside = sum(found.beside_product for found in all_of)
        other = sum(found.beside_other for found in all_of)
        shares = f"{beside / max(total, 1e-9):12.1%} {other / max(total, 1e-9):13.1%}"
        counts = f"{len(all_of):5d} {reading.overlapping(kind):11d} {total / 1e3:9.2f}"
        lines.append(f"{name:10s} {kind:10s} {counts} {shares}  {', '.join(map(str, reading.streams(kind)))}")
    lines.append(f"{name:10s} {'product':10s} {reading.products:5d}   streams {reading.product_streams}")
    exposed = Counter(found.kind for found in reading.collectives if not found.overlaps)
    lines.append(f"{name:10s} beside no product: {dict(exposed) or 'none'}")
    return lines


def main() -> None:
    from world import begin, end

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    world = begin()
    world.say(world.describe())
    if not world.cuda or world.size == 1:
        world.say("nothing to read: this needs CUDA and at least two ranks")
        return end()
    world.say(f"{args.units} units, {args.microbatches} microbatches: {vars(args)}; as rank 0 sees it")
    world.say(
        f"{'':10s} {'kind':10s} {'count':>5s} {'by products':>11s} {'total ms':>9s} {'of it beside':>12s} "
        f"{'beside other':>13s}  streams"
    )
    for name, compiled in (("eager", False), ("one graph", True)):
        work = step_of(world.mesh, **vars(args), compiled=compiled)
        dist.barrier()
        world.say(*report(name, read(trace_of(work))))
    end()


if __name__ == "__main__":
    main()
