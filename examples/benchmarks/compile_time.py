"""Seconds from a cold start to the first result: the whole step as one graph, and the regional path.

    python examples/benchmarks/compile_time.py --layers 4 16 32

Whole step: `mf.compile` of forward, backward, reductions and AdamW's update. Regional: the tape and the update are
eager and `torch.compile(block)` is one function that all layers call. Every row starts without the compiler's caches.
"""

from __future__ import annotations

import os

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # read when torch is imported

import argparse
import dataclasses
import time
from typing import Any

import torch
from forms import optimizer, planned, programs_of
from model import Config, build
from world import World, begin, end

import mfsdp_fn as mf

FORMS = {"eager": "eager", "regional": "blocks compiled", "whole step": "one graph"}


def first_and_second(world: World, config: Config, form: str, tokens: int) -> tuple[float, float]:
    """Seconds of the first call, which compiles, and of the next."""
    torch.compiler.reset()
    programs_of.cache_clear()
    params = mf.params_of(build(config, world.device))
    state = mf.shard(params, planned(params, world.mesh, torch.bfloat16, torch.float32, stored=True))
    opt_state: Any = optimizer.init(state)
    data = torch.randint(0, config.vocab, (2, 1, tokens), device=world.device)
    step = programs_of(config, FORMS[form])[1]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        state, opt_state, loss = step(state, opt_state, data[0], data[1])
        loss.item()
        seconds.append(time.perf_counter() - start)
    return world.most(seconds[0]), world.most(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--form", choices=FORMS, nargs="+", default=list(FORMS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    world = begin()
    width = args.width
    config = Config(vocab=1024, width=width, heads=max(width // 64, 1), hidden=3 * width)
    world.say(f"{world.describe()}, width {width}, {args.tokens} tokens, caches off")
    warm = dataclasses.replace(config, layers=1)  # imports and starts the compiler, which no row should pay for
    for form in args.form:
        first_and_second(world, warm, form, args.tokens)
    world.say(f"{'form':12s} {'layers':>6s} {'first s':>9s} {'second s':>9s} {'first, over fewest layers':>26s}")
    for form in args.form:
        base = 0.0
        for layers in args.layers:
            first, second = first_and_second(world, dataclasses.replace(config, layers=layers), form, args.tokens)
            base = base or first
            world.say(f"{form:12s} {layers:6d} {first:9.2f} {second:9.3f} {first / base:26.2f}")
    end()


if __name__ == "__main__":
    main()
