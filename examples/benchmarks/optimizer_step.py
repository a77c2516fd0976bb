"""Time of an optimizer step: Muon beside AdamW, and beside `torch.optim.Muon` on the same unsharded matrices.

python examples/benchmarks/optimizer_step.py --size 2B --tokens 4096
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from model import SIZES, build
from torch.distributed.device_mesh import init_device_mesh
from train_step import Clock

import mfsdp_fn as mf

HIDDEN = ("emb", "head")


def muon(**options: Any) -> mf.optim.Optimizer:
    return mf.optim.muon(lr=1e-3, exclude=HIDDEN, fallback=mf.optim.adamw(lr=1e-4), **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2B")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    config, clock = SIZES[args.size], Clock(device)
    module = build(config, device)
    tokens = torch.randint(0, config.vocab, (2, 1, args.tokens), device=device)
    params = mf.params_of(module)
    precision = mf.MixedPrecisionPolicy(compute=torch.bfloat16, reduce=torch.float32)
    spec = mf.plan(params, mesh, mf.zero3(), units=("blocks.*",), precision=precision)
    matrices = [p.detach().clone() for n, p in params.items() if p.dim() == 2 and not n.startswith(HIDDEN)]
    state = mf.shard(params, spec)
    module.to("meta")
    del params
    value_and_grad = mf.value_and_grad(lambda s: mf.functional_call(module, s, (tokens[0], tokens[1])))
    rows: dict[str, tuple[float, float]] = {}

    def measure(name: str, step: Callable[[], object], iteration: Callable[[], object] | None) -> None:
        times = []
        for work in (step, iteration):
            if work is None:
                times.append(float("nan"))
                continue
            clock.time(work, 2)
            times.append(statistics.median(clock.time(work, 2)[0] for _ in range(args.rounds)))
        rows[name] = (times[0], times[1])
        say(f"{name:44s} step {times[0]:9.2f} ms   iteration {times[1]:9.2f} ms", flush=True)

    say(
        f"torch {torch.__version__}, {dist.get_world_size()} x {torch.cuda.get_device_name() if cuda else 'CPU'}, "
        f"{args.size}, {args.tokens} tokens a GPU, {spec.numel / 1e9:.2f} B parameters"
    )
    grads = value_and_grad(state)[1]
    contenders = {
        "adamw": mf.optim.adamw(lr=1e-4),
        "muon": muon(),
        "muon, batched": muon(batched=True),
        "muon, 1 bucket": muon(buckets=1),
        "muon, 8 buckets": muon(buckets=8),
    }
    for name, opt in contenders.items():
        held = [opt.init(state)]

        def step(opt: mf.optim.Optimizer = opt, held: list[object] = held) -> None:
            nonlocal state
            now, kept = state, mf.tree_map(torch.clone, grads)
            state, held[0] = opt.step(kept, held[0], now, donate=True)

        def iteration(opt: mf.optim.Optimizer = opt, held: list[object] = held) -> None:
            nonlocal state
            _, fresh = value_and_grad(state)
            state, held[0] = opt.step(fresh, held[0], state, donate=True)

        measure(name, step, iteration)
        held.clear()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    scratch = mf.zeros_like(grads)

    def copy() -> None:
        for old, new in zip(scratch.main, grads.main, strict=True):
            old.copy_(new)

    measure("copy of the gradients (part of step above)", copy, None)
    parameters = [torch.nn.Parameter(m) for m in matrices]
    for p in parameters:
        p.grad = torch.randn_like(p)
    reference = torch.optim.Muon(parameters, lr=1e-3)
    measure("torch.optim.Muon, hidden matrices alone", reference.step, None)
    over = rows["muon"][1] / rows["adamw"][1] - 1
    say(f"muon iteration over adamw iteration: {over:+.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
