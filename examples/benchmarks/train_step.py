"""Time and memory of a training step beside PyTorch FSDP2 and DDP in the same run.

    torchrun --nproc-per-node N examples/benchmarks/train_step.py --size 2B --tokens 1024 4096 --step --out rows.json

First what the planner predicts. Then memory, each contender alone, and gradients compared; then time, all contenders in
turn, so that drift meets everyone. One that has no room is reported and left out. `--list` names the contenders.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from case import Case, Contender
from chart import try_to_draw
from comparison import Rows, compared, deviation
from contenders import BASE, CONTENDERS, quick
from measure import Clock, attempt, clean, iterations_for, memory
from model import SIZES
from prediction import describe, predict, predicted_spec
from table import table
from world import World, begin, end

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["2B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="tokens a rank")
    parser.add_argument("--reduce", choices=DTYPES, nargs="+", default=["fp32"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help="these contenders alone")
    parser.add_argument("--skip", nargs="+", choices=CONTENDERS, metavar="NAME", default=[], help="all but these")
    parser.add_argument("--quick", action="store_true", help="without those that compile or need a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, help="timed iterations a round; by default about 0.3 seconds")
    parser.add_argument("--step", action="store_true", help="time the whole step too, with AdamW")
    parser.add_argument("--limit", type=float, help="of a gradient's deviation; default 1e-2, with reduce bf16 2e-2")
    parser.add_argument("--out", type=Path, help="write the rows as JSON here, and a chart beside it as PNG")
    parser.add_argument("--list", action="store_true", help="name the contenders and end")
    return parser.parse_args()


def case_of(world: World, size: str, tokens: int, reduce: str) -> Case:
    generator = torch.Generator().manual_seed(world.rank)
    data = torch.randint(0, SIZES[size].vocab, (2, 1, tokens), generator=generator).to(world.device)
    return Case(SIZES[size], world.mesh, world.device, data[0], data[1], torch.bfloat16, DTYPES[reduce])


def alone(world: World, case: Case, name: str) -> tuple[dict[str, float], torch.Tensor | None]:
    """Memory and gradient norms of one contender with nothing else alive."""
    contender = CONTENDERS[name](case.alone())
    contender.forward_backward()  # compiles
    used = memory(world, contender)
    return used, contender.norms() if contender.norms else None


def measured(world: World, case: Case, names: list[str], args: argparse.Namespace) -> Rows:
    """The rows of one regime."""
    rows: Rows = {name: {"note": ""} for name in names}
    norms: dict[str, torch.Tensor] = {}
    for name in names:
        clean(world)
        done, rows[name]["note"] = attempt(world, lambda name=name: alone(world, case, name))
        if done is not None:
            rows[name] |= done[0]
            if done[1] is not None:
                norms[name] = done[1]
        used = ", ".join(f"{key} {value:.2f}" for key, value in rows[name].items() if key != "note")
        world.say(f"  {name}, alone: {rows[name]['note'] or used}")
    if BASE in norms:
        for name, found in norms.items():
            rows[name]["deviation"] = deviation(found, norms[BASE])
    time_all(world, case.alone(), rows, args)
    clean(world)
    return rows


def time_all(world: World, case: Case, rows: Rows, args: argparse.Namespace) -> None:
    """Interleaved rounds of forward and backward, then of whole steps."""
    contenders: dict[str, Contender] = {}
    for name, row in rows.items():
        if row["note"]:
            continue
        made, row["note"] = attempt(world, lambda name=name: CONTENDERS[name](case))
        if made is not None:
            contenders[name] = made
        elif row["note"] == "out of memory":
            row["note"] = "no room beside the others: try it with --only"
        clean(world)
    rounds(world, contenders, rows, args, step=False)
    if args.step:
        for name in [name for name, contender in contenders.items() if contender.step is None]:
            del contenders[name]  # graphs hold the memory that optimizer states need
        case.shared.pop("graph pool", None)
        clean(world)
        rounds(world, contenders, rows, args, step=True)


def rounds(
    world: World,
    contenders: dict[str, Contender],
    rows: Rows,
    args: argparse.Namespace,
    step: bool,
) -> None:
    clock = Clock(world.device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    iterations: dict[str, int] = {}
    for number in range(args.rounds + 1):
        for name in list(contenders):
            work = contenders[name].step if step else contenders[name].forward_backward
            assert work is not None
            if not number:  # warms up, and tells how long it takes
                found, note = attempt(world, lambda work=work: [clock.time(work, 1) for _ in range(2)][1])
                iterations[name] = args.iterations or iterations_for(world, found[0] if found else 1.0)
            else:
                found, note = attempt(world, lambda work=work, n=iterations[name]: clock.time(work, n))
            if found is None:
                rows[name]["note"] = f"{'step' if step else 'beside the others'}: {note}"
                del contenders[name]
                clean(world)
            elif number:
                times[name].append(found)
    for name in contenders:
        elapsed, launching = sorted(t for t, _ in times[name]), [c for _, c in times[name]]
        if step:
            rows[name] |= {"step_ms": statistics.median(elapsed), "step_min": elapsed[0], "step_max": elapsed[-1]}
        else:
            rows[name] |= {"fb_ms": statistics.median(elapsed), "fb_min": elapsed[0], "fb_max": elapsed[-1]}
            rows[name] |= {"cpu_ms": statistics.median(launching)}


def main() -> int:
    args = parse()
    if args.list:
        print(*CONTENDERS, sep="\n")
        return 0
    world = begin()
    names = args.only or (quick() if args.quick else list(CONTENDERS))
    names = [name for name in names if name not in args.skip]
    if compiling := set(names) - set(quick()):
        # A contender that ran out of recompilations would go on eagerly in silence.
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 4096
    regimes = [(s, t, r) for s in args.size for r in args.reduce for t in args.tokens]
    world.say(world.describe())
    result: dict[str, Any] = {"machine": world.describe(), "ranks": world.size, "predictions": {}, "rows": []}
    for size, reduce in dict.fromkeys((s, r) for s, _, r in regimes):
        world.say(*describe(f"{size}, reduce in {reduce}", SIZES[size], world.size, DTYPES[reduce]))
        spec = predicted_spec(SIZES[size], world.size, torch.bfloat16, DTYPES[reduce])
        result["predictions"][f"{size} {reduce}"] = dataclasses.asdict(predict(spec))
    for size, tokens, reduce in regimes:
        if compiling:
            torch.compiler.reset()
        rows = measured(world, case_of(world, size, tokens, reduce), names, args)
        limit = args.limit or {"fp32": 1e-2, "bf16": 2e-2}[reduce]
        compared(rows, limit, 5 * limit)
        regime = {"size": size, "tokens": tokens, "reduce": reduce, "rounds": args.rounds}
        fresh = [{**regime, "contender": name, **row} for name, row in rows.items()]
        result["rows"] += fresh
        world.say(*table(fresh, ranks=world.size))
        if args.out and world.rank == 0:  # after every regime: a long run that is cut short leaves what it had
            args.out.write_text(json.dumps(result, indent=1))
    if args.out and world.rank == 0:
        print(f"wrote {args.out}", try_to_draw(result, args.out.with_suffix(".png")), sep="\n")
    end()
    return 1 if any("failed" in row["note"] or "DIFFER" in row["note"] for row in result["rows"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
