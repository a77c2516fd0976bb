"""Time of an optimizer step: Muon beside AdamW, and beside `torch.optim.Muon` on the same unsharded matrices.

    torchrun --nproc-per-node N examples/benchmarks/optimizer_step.py --size 2B --tokens 16384 --rounds 3

The whole iteration (forward, backward, step) of AdamW and of Muon, in turn; what Muon's consists of; then its variants.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from forms import loss_of, planned
from measure import Clock, clean
from model import SIZES, build
from world import ALONE, World, begin, end

import mfsdp_fn as mf
from mfsdp_fn.optim.newton_schulz import newton_schulz

HIDDEN = ("emb", "head")
COEFFICIENTS = (3.4445, -4.775, 2.0315)
WIRE = 2  # bytes an element: Muon's exchange is in bfloat16


def muon(**options: Any) -> mf.optim.Optimizer:
    return mf.optim.muon(lr=1e-3, exclude=HIDDEN, fallback=mf.optim.adamw(lr=1e-4), **options)


class Bench:
    """Weights, gradients of one batch, and what is timed with them."""

    def __init__(self, world: World, size: str, tokens: int, rounds: int) -> None:
        self.world, self.rounds, self.clock = world, rounds, Clock(world.device)
        config = SIZES[size]
        params = mf.params_of(build(config, world.device))
        spec = planned(params, world.mesh, torch.bfloat16, torch.float32, stored=True)
        self.state = mf.shard(params, spec)
        self.hidden = [p.shape for name, p in params.items() if p.dim() == 2 and not name.startswith(HIDDEN)]
        del params
        data = torch.randint(0, config.vocab, (2, 1, tokens), device=world.device)
        loss = loss_of(config, "module")
        self.value_and_grad = lambda state: mf.value_and_grad(loss)(state, data[0], data[1])
        self.grads = self.value_and_grad(self.state)[1]

    def times(self, works: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Median milliseconds of each, in turn; the slowest rank's."""
        found: dict[str, list[float]] = {name: [] for name in works}
        for number in range(self.rounds + 1):
            for name, work in works.items():
                elapsed = self.clock.time(work, 1 if number == 0 else 2)[0]
                if number:
                    found[name].append(elapsed)
        return {name: self.world.most(statistics.median(times)) for name, times in found.items()}

    def works(self, name: str, opt: mf.optim.Optimizer) -> dict[str, Callable[[], object]]:
        """A step on gradients that are there already, copied because a step may use them up; and a whole iteration."""
        held = [opt.init(self.state)]

        def step() -> None:
            kept = mf.tree_map(torch.clone, self.grads)
            self.state, held[0] = opt.step(kept, held[0], self.state, donate=True)

        def iteration() -> None:
            _, fresh = self.value_and_grad(self.state)
            self.state, held[0] = opt.step(fresh, held[0], self.state, donate=True)

        return {f"{name}: step": step, f"{name}: iteration": iteration}

    def copy(self) -> Callable[[], object]:
        """The part of a step above that is not the optimizer's."""
        return lambda: mf.tree_map(torch.clone, self.grads)


def orthogonalise(shapes: list[torch.Size], device: torch.device) -> Callable[[], object]:
    """Newton-Schulz of matrices of these shapes; one matrix stands for all of a shape."""
    matrices = {shape: torch.randn(shape, device=device) for shape in dict.fromkeys(shapes)}

    def work() -> None:
        for shape in shapes:
            newton_schulz(matrices[shape], COEFFICIENTS, 5, 1e-7)

    return work


def breakdown(bench: Bench) -> list[str]:
    """AdamW's and Muon's iteration in turn, and what Muon's consists of."""
    world = bench.world
    opt = muon()
    owners = opt.init(bench.state).plan.owners
    shapes = [layout.layout.tensor_shapes[index][-2:] for layout in owners for index in layout.owned]
    sent = [0] * world.size
    for layout in owners:
        for (holder, owner), count in layout.traffic().items():
            sent[holder] += count * WIRE  # to the owner
            sent[owner] += count * WIRE  # and back
    works = {
        "gradient": lambda: bench.value_and_grad(bench.state),
        "copy of the gradients": bench.copy(),
        "Newton-Schulz of the busiest rank": orthogonalise(shapes, world.device),
        **bench.works("adamw", mf.optim.adamw(lr=1e-4)),
        **bench.works("muon", opt),
    }
    found = bench.times(works)
    adamw, ours = found["adamw: iteration"], found["muon: iteration"]
    lines = [f"{name:44s} {ms:9.2f} ms {ms / ours:7.1%} of Muon's iteration" for name, ms in found.items()]
    lines.append(f"exchange: {max(sent) / 2**20:.1f} MiB sent by the busiest rank, both ways, {WIRE} bytes an element")
    lines.append(f"muon iteration over adamw iteration: {ours / adamw - 1:+.2%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2B")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--brief", action="store_true", help="without Muon's variants and torch.optim.Muon")
    args = parser.parse_args()
    world = begin()
    bench = Bench(world, args.size, args.tokens, args.rounds)
    numel = bench.state.spec.numel
    world.say(f"{world.describe()}, {args.size}, {args.tokens} tokens a rank, {numel / 1e9:.2f} B parameters")
    world.say(*breakdown(bench))
    variants = {"batched": {"batched": True}, "1 bucket": {"buckets": 1}, "8 buckets": {"buckets": 8}}
    for name, options in {} if args.brief else variants.items():
        clean(world)
        found = bench.times(bench.works(f"muon, {name}", muon(**options)))
        world.say(*(f"{title:44s} {ms:9.2f} ms" for title, ms in found.items()))
    if not args.brief:
        clean(world)
        parameters = [torch.nn.Parameter(torch.randn(shape, device=world.device)) for shape in bench.hidden]
        for p in parameters:
            p.grad = torch.randn_like(p)
        reference = torch.optim.Muon(parameters, lr=1e-3)
        found = bench.times({"torch.optim.Muon, hidden matrices, unsharded": reference.step})
        world.say(*(f"{title:44s} {ms:9.2f} ms" for title, ms in found.items()))
    if world.size == 1:
        world.say(ALONE)
    end()


if __name__ == "__main__":
    main()
