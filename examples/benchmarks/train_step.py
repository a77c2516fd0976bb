"""Time and memory of a training step beside PyTorch FSDP2 in the same run.

    torchrun --nproc-per-node N examples/benchmarks/train_step.py --size 2B --tokens 4096

Memory first, each contender alone; then time, all contenders in turn, so that drift meets everyone. Rank 0 prints
medians and the spread; the fastest of the peer's rows is never left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Case, Contender
from model import SIZES
from torch.distributed.device_mesh import init_device_mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="tokens a GPU")
    parser.add_argument("--reduce", choices=DTYPES, default="fp32")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), help="contenders, by name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=4, help="timed iterations a round")
    parser.add_argument("--step", action="store_true", help="time the whole step too")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON here")
    return parser.parse_args()


class Clock:
    """Elapsed milliseconds: device events on CUDA, wall time on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def time(self, work: object, iterations: int) -> tuple[float, float]:
        """(elapsed, CPU time until the last launch returned) of one iteration, in ms."""
        assert callable(work)
        if not self.cuda:
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


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory(device: torch.device, contender: Contender) -> tuple[float, float, float]:
    """GiB: (resident before, peak allocated, peak reserved) over three forward+backwards."""
    if device.type != "cuda":
        contender.forward_backward()
        return 0.0, 0.0, 0.0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    for _ in range(3):
        contender.forward_backward()
    torch.cuda.synchronize()
    return tuple(  # type: ignore[return-value]
        round(x / 2**30, 2) for x in (resident, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    )


def main() -> None:
    args = parse()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    if cuda:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    rows: list[dict[str, object]] = []
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"torch {torch.__version__}, {dist.get_world_size()} x {torch.cuda.get_device_name() if cuda else 'CPU'}")
    for tokens in args.tokens:
        generator = torch.Generator().manual_seed(dist.get_rank())
        data = torch.randint(0, SIZES[args.size].vocab, (2, 1, tokens), generator=generator).to(device)
        case = Case(SIZES[args.size], mesh, device, data[0], data[1], torch.bfloat16, DTYPES[args.reduce])
        used: dict[str, tuple[float, float, float]] = {}
        norms: dict[str, float] = {}
        for name in args.only:
            clean(device)
            contender = CONTENDERS[name](case)
            contender.forward_backward()  # compiles
            used[name] = memory(device, contender)
            if contender.gradient_norm is not None:
                norms[name] = contender.gradient_norm().item()
            say(f"  {name}: resident/peak/reserved GiB {used[name]}, gradient norm {norms.get(name)}", flush=True)
            del contender
            clean(device)
        contenders = {name: CONTENDERS[name](case) for name in args.only}
        clock = Clock(device)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in args.only}
        steps: dict[str, list[tuple[float, float]]] = {name: [] for name in args.only}
        for round_number in range(args.rounds + 1):
            for name, contender in contenders.items():
                measured = clock.time(contender.forward_backward, args.iterations)
                whole = clock.time(contender.step, args.iterations) if args.step and contender.step else None
                if round_number:  # the first warms up
                    times[name].append(measured)
                    if whole:
                        steps[name].append(whole)
        for name in args.only:
            fb = sorted(t for t, _ in times[name])
            row = {
                "tokens": tokens,
                "contender": name,
                "fb_ms": statistics.median(fb),
                "fb_min": fb[0],
                "fb_max": fb[-1],
                "cpu_ms": statistics.median(c for _, c in times[name]),
                "step_ms": statistics.median(t for t, _ in steps[name]) if steps[name] else None,
                "resident": used[name][0],
                "peak": used[name][1],
                "reserved": used[name][2],
                "norm": norms.get(name),
            }
            rows.append(row)
        del contenders
        clean(device)
        base = next((row["fb_ms"] for row in rows if row["contender"] == "FSDP2" and row["tokens"] == tokens), None)
        say(f"{args.size}, {tokens} tokens a GPU, reduce in {args.reduce}")
        say(
            f"{'contender':32s} {'f+b ms':>8s} {'min':>8s} {'max':>8s} {'/FSDP2':>7s} {'CPU ms':>7s} {'step ms':>8s}"
            f" {'resident':>9s} {'peak':>7s} {'reserved':>9s}"
        )
        for row in rows:
            if row["tokens"] != tokens:
                continue
            ratio = f"{row['fb_ms'] / base:.3f}" if base else "-"  # type: ignore[operator]
            step = f"{row['step_ms']:.2f}" if row["step_ms"] else "-"
            say(
                f"{row['contender']:32s} {row['fb_ms']:8.2f} {row['fb_min']:8.2f} {row['fb_max']:8.2f} {ratio:>7s} "
                f"{row['cpu_ms']:7.2f} {step:>8s} {row['resident']:9.2f} {row['peak']:7.2f} {row['reserved']:9.2f}",
                flush=True,
            )
    if args.out and dist.get_rank() == 0:
        args.out.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
