"""Collectives by themselves: this library's beside the raw call of the same bytes, in turn, in one run.

    torchrun --nproc-per-node N examples/benchmarks/collective_bandwidth.py --megabytes 500

- unshard: `mf.unshard` of a one-unit state beside an all-gather into an output that is there already.
- unshard, ragged: the same where the ranks' segments differ (an UNPADDED plan), beside the raw even all-gather.
- reduce: `mf.reduce`, which packs the gradients and scales the result, beside the raw reduce-scatter; and the
  library's collective alone.
- owner exchange: `gather_to_owner` of N matrices, each cut over all ranks, beside one all-to-all of the same bytes; the
  library also packs what it sends and joins what it gets.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import Clock, iterations_for
from world import ALONE, World, begin, end

import mfsdp_fn as mf
from mfsdp_fn.collectives import reduce_scatter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXACT = mf.MixedPrecisionPolicy(main=None)
Pair = tuple[str, Callable[[], object], Callable[[], object], int]  # name, ours, raw, bytes

# Releases after 2.12 have new names for these, and warn of the old ones.
raw_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
raw_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def one_unit(world: World, rows: int, columns: int, dtype: torch.dtype, layout: str, units: int = 1) -> mf.ShardState:
    """`units` matrices, a unit each."""
    params = {
        f"l.{i}.w": torch.ones(rows, columns, dtype=dtype, device=world.device, requires_grad=True)
        for i in range(units)
    }
    spec = mf.plan(params, world.mesh, mf.zero3(), units=("l.*",), precision=EXACT, shard_layout=layout)
    return mf.shard(params, spec)


def gathers(world: World, elements: int, dtype: torch.dtype) -> list[Pair]:
    rows = 512  # a multiple of any number of ranks that is a power of two
    even = one_unit(world, rows, elements // rows // 64 * 64, dtype, "padded")
    size = even.spec.groups[0].layout.size
    ragged = one_unit(world, rows + 1, size // (rows + 1), dtype, "unpadded")
    out = torch.empty(size, dtype=dtype, device=world.device)

    def raw() -> None:
        raw_gather(out, even.main[0])

    found: list[Pair] = [("unshard", lambda: mf.unshard(even["l.0"]), raw, size * dtype.itemsize)]
    found.append(("unshard, ragged", lambda: mf.unshard(ragged["l.0"]), raw, size * dtype.itemsize))
    return found


def reductions(world: World, elements: int, dtype: torch.dtype) -> list[Pair]:
    state = one_unit(world, 512, elements // 512 // 64 * 64, dtype, "padded")
    group = state.spec.groups[0]
    grads = {"l.0.w": torch.ones(group.views[0][1], dtype=dtype, device=world.device)}
    packed, move = grads["l.0.w"].view(-1), group.grad_scatters[0]
    out = torch.empty_like(state.main[0])

    def raw() -> None:
        raw_scatter(out, packed)

    nbytes = packed.nbytes
    return [
        ("reduce", lambda: mf.reduce(grads, state.spec), raw, nbytes),
        ("reduce, the collective", lambda: reduce_scatter(packed, move.sizes, move.axis).wait(), raw, nbytes),
    ]


def exchange(world: World, elements: int, dtype: torch.dtype) -> list[Pair]:
    rows = 512
    state = one_unit(world, rows, elements // rows // world.size // 64 * 64, dtype, "padded", world.size)
    owners = mf.plan_owners(state.spec)
    shards = {group: {0: state.main[group.number]} for group in owners}
    send, receive = [0] * world.size, [0] * world.size
    for layout in owners.values():
        for (holder, owner), count in layout.traffic().items():
            if holder == world.rank:
                send[owner] += count
            if owner == world.rank:
                receive[holder] += count
    wire = torch.ones(sum(send), dtype=dtype, device=world.device)
    out = torch.empty(sum(receive), dtype=dtype, device=world.device)

    def raw() -> None:
        dist.all_to_all_single(out, wire, receive, send)

    return [("owner exchange", lambda: mf.gather_to_owner(shards, owners), raw, wire.nbytes)]


def compare(world: World, pairs: list[Pair], rounds: int, dtype: str) -> list[str]:
    clock, lines = Clock(world.device), []
    for name, *works, nbytes in pairs:
        for work in works:
            clock.time(work, 1)
        count = iterations_for(world, clock.time(works[1], 2)[0], budget=50.0)
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for found, work in zip(times, works, strict=True):
                found.append(clock.time(work, count)[0])
        ours, raw = (world.most(statistics.median(found)) for found in times)
        spread = max(max(found) / min(found) - 1 for found in times)
        speeds = " ".join(f"{nbytes / ms / 1e6:9.1f}" for ms in (ours, raw))
        times_and_speeds = f"{nbytes / 1e6:8.1f} {ours:9.3f} {raw:9.3f} {speeds} {raw / ours:8.3f} {spread:7.1%}"
        lines.append(f"{dtype:5s} {name:24s} {times_and_speeds}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=500.0, help="of the whole buffer")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    world = begin()
    world.say(world.describe())
    head = f"{'':5s} {'':24s} {'MB':>8s} {'ours ms':>9s} {'raw ms':>9s} {'our GB/s':>9s} {'raw GB/s':>9s}"
    world.say(f"{head} {'raw/ours':>8s} {'spread':>7s}")
    for dtype in args.dtype:
        elements = int(args.megabytes * 1e6) // DTYPES[dtype].itemsize
        for make in (gathers, reductions, *([exchange] if world.size > 1 else [])):
            world.say(*compare(world, make(world, elements, DTYPES[dtype]), args.rounds, dtype))
    world.say("MB: of the whole buffer; of the exchange, what rank 0 sends. GB/s: that over the time.")
    if world.size == 1:
        world.say(
            f"{ALONE}; no owner exchange",
        )
    end()


if __name__ == "__main__":
    main()
