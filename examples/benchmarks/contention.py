"""What collectives cost the products they run beside: they share processors and memory bandwidth.

    torchrun --nproc-per-node 2 examples/benchmarks/contention.py

A unit's gathers (bf16) and reductions (fp32) run one after the other on their communicators while one long stream of
products runs on the device's own; both groups of them are launched first. The cost is what the products take longer.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from collective_bandwidth import one_unit
from measure import Clock
from world import ALONE, World, begin, end

from mfsdp_fn.collectives import PendingCollective, all_gather, reduce_scatter

Launch = Callable[[], PendingCollective]


def launches(world: World, elements: int) -> dict[str, list[Launch]]:
    """What runs beside the products, by name."""
    rows = 512
    unit = one_unit(world, rows, elements // rows // 64 * 64 or 64, torch.bfloat16, "padded")
    group = unit.spec.groups[0]
    gather, scatter = group.gathers[0], group.grad_scatters[0]
    packed = torch.zeros(group.layout.size, dtype=torch.float32, device=world.device)

    def gathered() -> PendingCollective:
        return all_gather(unit.main[0], gather.sizes, gather.axis)

    def reduced() -> PendingCollective:
        return reduce_scatter(packed, scatter.sizes, scatter.axis)

    return {"gathers": [gathered], "reductions": [reduced], "both": [gathered, reduced]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=243.0, help="elements of a unit")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--collectives", type=int, default=20, help="of each kind")
    parser.add_argument("--products", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    world = begin()
    world.say(world.describe())
    clock = Clock(world.device)
    left = torch.randn(args.width, args.width, dtype=torch.bfloat16, device=world.device)
    right = torch.randn(args.width, args.hidden, dtype=torch.bfloat16, device=world.device)

    def products() -> None:
        for _ in range(args.products):
            torch.mm(left, right)

    def median(work: Callable[[], object]) -> float:
        clock.time(work, 1)
        return world.most(statistics.median(clock.time(work, 1)[0] for _ in range(args.rounds)))

    alone = median(products)
    world.say(f"{args.products} products alone: {alone:.2f} ms")
    for name, some in launches(world, int(args.millions * 1e6)).items():

        def wire(some: list[Launch] = some) -> None:
            for pending in [launch() for _ in range(args.collectives) for launch in some]:
                pending.wait()

        def beside(some: list[Launch] = some) -> None:
            pendings = [launch() for _ in range(args.collectives) for launch in some]
            products()
            for pending in pendings:
                pending.wait()

        wired, both = median(wire), median(beside)
        cost = (both - alone) / args.collectives
        note = "" if both > wired * 1.05 else "; the wire ended last: give more --products"
        world.say(
            f"{name:10s} alone {wired / args.collectives:.3f} ms each, cost the products {cost:.3f} ms each{note}"
        )
    if world.size == 1:
        world.say(ALONE)
    end()


if __name__ == "__main__":
    main()
