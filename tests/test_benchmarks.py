"""The benchmarks on the CPU: that they run, what they write, and that what they predict is what happens."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import chart
import pytest
import torch
from comparison import compared
from measure import attempt
from model import SIZES
from overlap import read
from prediction import describe, predict
from table import table
from torch.distributed.device_mesh import DeviceMesh
from world import ALONE, World

import mfsdp_fn as mf
from counting import Counting
from models import PRESETS, accumulated, batch_of, made, sharded_loss
from pool import run_ranks
from test_examples import EXAMPLES, run

MICROBATCHES = 2
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


@needs_matplotlib
def test_train_step_writes_a_table_rows_and_a_chart(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    only = ("--only", "FSDP2", "mfsdp_fn", "mfsdp_fn, CUDA graph of eager", "wire alone", "compute alone", "DDP")
    options = ("--size", "tiny", "--tokens", "64", "--rounds", "1", "--iterations", "1", "--step", "--out", out)
    done = run(EXAMPLES / "benchmarks" / "train_step.py", *options, *only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a step: nothing is sent" in done.stdout and ALONE in done.stdout
    assert "overlap" not in done.stdout
    result = json.loads(out.read_text())
    rows = {row["contender"]: row for row in result["rows"]}
    assert set(rows) == set(only[1:])
    assert rows.pop("mfsdp_fn, CUDA graph of eager")["note"] == "needs CUDA"
    assert rows.pop("wire alone")["note"] == "one rank sends nothing"
    for name, row in rows.items():
        assert row["note"] == "" and 0 < row["fb_min"] <= row["fb_ms"] <= row["fb_max"], name
    assert rows["FSDP2"]["ratio"] == 1.0
    assert rows["mfsdp_fn"]["step_ms"] > 0 and rows["mfsdp_fn"]["deviation"] < 1e-5
    assert 1e-5 < rows["DDP"]["deviation"] < 5e-2  # it is compared at all
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert result["predictions"]["tiny fp32"]["traffic"] == {}


def made_up_rows(**changes: Any) -> dict[str, dict[str, Any]]:
    figures = {"FSDP2": 100.0, "mfsdp_fn": 80.0, "compute alone": 50.0, "wire alone": 60.0}
    rows = {name: {"fb_ms": ms, "peak": ms / 10, "note": "", "deviation": 1e-3} for name, ms in figures.items()}
    rows["mfsdp_fn"] |= changes
    return rows


@pytest.mark.parametrize("bad", [0.5, float("nan")])
def test_gradients_that_differ_are_flagged(bad: float) -> None:
    rows = made_up_rows(deviation=bad)
    compared(rows, 1e-2, 5e-2)
    assert rows["mfsdp_fn"]["note"] == "GRADIENTS DIFFER" and not rows["FSDP2"]["note"]
    assert rows["mfsdp_fn"]["ratio"] == 0.8
    assert rows["mfsdp_fn"]["ratio_floor"] == pytest.approx(80 / 60)


def test_only_one_rank_is_said_to_be_alone() -> None:
    rows = made_up_rows()
    compared(rows, 1e-2, 5e-2)
    regime = {"size": "2B", "tokens": 8, "reduce": "fp32", "rounds": 5}
    listed = [{**regime, "contender": name, **row} for name, row in rows.items()]
    assert table(listed, ranks=1)[-1] == ALONE
    assert ALONE not in table(listed, ranks=2)


@needs_matplotlib
def test_a_chart_of_several_regimes(tmp_path: Path) -> None:
    rows = []
    for tokens in (1024, 4096):
        found = made_up_rows()
        compared(found, 1e-2, 5e-2)
        found["DDP"] = {"note": "out of memory"}
        rows += [{"size": "2B", "tokens": tokens, "reduce": "fp32", "contender": n, **r} for n, r in found.items()]
    said = chart.try_to_draw({"machine": "m", "ranks": 2, "rows": rows}, tmp_path / "chart.png")
    assert said == f"wrote {tmp_path / 'chart.png'}"
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def failures(rank: int, world: int) -> list[tuple[Any, str]]:
    from models import mesh_of

    mesh = mesh_of(world)
    assert isinstance(mesh, DeviceMesh)
    here = World(torch.device("cpu"), mesh, rank, world)

    def exhausted() -> None:
        if rank == world - 1:
            raise torch.OutOfMemoryError("no room")

    return [attempt(here, exhausted), attempt(here, lambda: "done")]


@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks_give_up_what_one_has_no_memory_for(world: int) -> None:
    texts = ["out of memory on another rank"] * (world - 1) + ["out of memory"]
    assert run_ranks(world, failures) == [[(None, text), ("done", "")] for text in texts]


def predicted(rank: int, world: int, preset: str, shape: tuple[int, ...], layout: str, kept: tuple[str, ...]) -> None:
    runtime = mf.RuntimePolicy(keep_gathered=kept)
    state, _ = made(preset, *shape, shard_layout=layout, runtime=runtime)
    batches = [batch_of(0, micro, rank) for micro in range(MICROBATCHES)]
    opt = mf.optim.sgd(lr=0.5)
    opt_state = opt.init(state)
    with Counting() as counting:
        grads = accumulated(sharded_loss, state, batches)
        new_state, _ = opt.step(grads, opt_state, state)
    expected = predict(state.spec, microbatches=MICROBATCHES)
    assert counting.counts() == {kind: traffic.count for kind, traffic in expected.traffic.items()}
    for kind, traffic in expected.traffic.items():
        assert max(counting.bytes(kind)) == traffic.bytes, kind
    resident = sum(t.nbytes for t in (*new_state.main, *new_state.compute) if t is not None)
    assert resident == expected.resident
    assert sum(main.nbytes for main in grads.main) == expected.gradients


@pytest.mark.parametrize(
    ("preset", "shape", "layout", "kept"),
    [
        ("zero3", (2,), "padded", ()),
        ("zero3", (2,), "unpadded", ("blocks.1",)),
        ("zero3", (1,), "padded", ()),
        ("zero2", (2,), "padded", ()),
        ("zero1", (3,), "unpadded", ()),
        ("ddp", (2,), "padded", ()),
        ("hsdp", (2, 2), "padded", ()),
        ("hfsdp", (2, 2), "padded", ()),
    ],
)
def test_what_is_predicted_is_what_is_counted(
    preset: str, shape: tuple[int, ...], layout: str, kept: tuple[str, ...]
) -> None:
    assert preset in PRESETS
    world = torch.Size(shape).numel()
    run_ranks(world, predicted, preset, shape, layout, kept)


def test_a_prediction_needs_no_ranks() -> None:
    text = "\n".join(describe("tiny", SIZES["tiny"], 64, torch.float32))
    assert "over 64 rank(s)" in text and "11 all-gathers" in text and "6 reduce-scatters" in text


def kernel(name: str, stream: int, start: float, duration: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_a_trace_is_read() -> None:
    gather, reduction = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)"
    trace = {
        "traceEvents": [
            kernel(gather, 20, 0.0, 10.0),  # beside nothing
            kernel(gather, 20, 10.0, 10.0),  # beside both products, which overlap each other
            kernel("nvjet_tst_128x256", 7, 12.0, 4.0),
            kernel("void cutlass::Kernel2<cutlass_80_wmma>", 7, 14.0, 4.0),
            kernel("vectorized_elementwise_kernel", 7, 0.0, 9.0),
            kernel(reduction, 24, 17.0, 10.0),
            {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0},
            {"ph": "M", "name": "process_name"},
        ]
    }
    reading = read(trace)
    assert [(c.kind, c.beside_product, c.beside_other) for c in reading.collectives] == [
        ("gather", 0.0, 0.0),
        ("gather", 6.0, 3.0),
        ("reduction", 1.0, 3.0),
    ]
    assert reading.streams("gather") == (20,) and reading.streams("reduction") == (24,)
    assert reading.product_streams == (7,) and reading.products == 2
    assert (reading.overlapping("gather"), reading.overlapping("reduction")) == (1, 1)


PROGRAMS = {
    ("collective_bandwidth.py", "--megabytes", "0.5", "--rounds", "1", "--dtype", "fp32"): "no owner exchange",
    ("overlap.py",): "nothing to read",
    ("contention.py", "--millions", "0.1", "--width", "8", "--hidden", "8", "--rounds", "1"): "cost the products",
    ("prediction.py", "--size", "tiny"): "over 64 rank(s)",
    ("optimizer_step.py", "--size", "tiny", "--tokens", "16", "--rounds", "1", "--brief"): "muon iteration over",
}


def test_other_programs_run() -> None:
    benchmarks = EXAMPLES / "benchmarks"
    # One after the other in one process: importing torch takes longer than they do.
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(benchmarks)!r})\n"
        f"for name, *options in {list(PROGRAMS)!r}:\n"
        f"    sys.argv = [name, *options]; runpy.run_path({str(benchmarks)!r} + '/' + name, run_name='__main__')\n"
        "    print('=====')\n"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = done.stdout.split("=====")
    for (options, said), output in zip(PROGRAMS.items(), outputs, strict=False):
        assert said in output, options
