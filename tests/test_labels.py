"""Profiler traces name every launch and wait by unit and phase."""

from __future__ import annotations

from collections import Counter

from torch.profiler import ProfilerActivity, profile

import mfsdp_fn as mf
from models import EXACT, PRESETS, batch_of, bilinear, mesh_of, sharded_loss
from pool import run_ranks


def labels_of_a_step(rank: int, world: int, preset: str) -> Counter[str]:
    params = bilinear()
    spec = mf.plan(params, mesh_of(world), PRESETS[preset](), units=("blocks.*",), precision=EXACT)
    state, opt = mf.shard(params, spec), mf.optim.sgd(lr=0.5)
    opt_state, batch = opt.init(state), batch_of(0, 0, rank)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        _, grads = mf.value_and_grad(sharded_loss)(state, batch)
        opt.step(grads, opt_state, state)
    return Counter(event.name for event in trace.events() or () if event.name.startswith("mfsdp_fn"))


def test_a_trace_names_unit_and_phase() -> None:
    groups = [f"{unit} float64" for unit in ("(root)", "blocks.0", "blocks.1", "blocks.2")]
    for found in run_ranks(2, labels_of_a_step, "zero3"):
        expected = Counter(
            {
                f"mfsdp_fn: {kind} {group} ({phase})": 1
                for group in groups
                for kind, phase in [
                    ("launch all-gather", "forward"),
                    ("wait for all-gather", "forward"),
                    ("launch all-gather", "backward"),
                    ("wait for all-gather", "backward"),
                    ("launch reduce-scatter", "backward"),
                    ("wait for reduction", "backward"),
                ]
            }
        )
        assert found == expected
    for found in run_ranks(2, labels_of_a_step, "zero1"):
        kinds = [
            ("launch reduce-scatter", "last microbatch"),
            ("wait for reduction", "last microbatch"),
            ("launch all-gather", "sync"),
            ("wait for all-gather", "sync"),
        ]
        assert found == Counter(f"mfsdp_fn: {kind} {group} ({phase})" for group in groups for kind, phase in kinds)


def labels_of_a_muon_step(rank: int, world: int, buckets: int) -> Counter[str]:
    params = bilinear()
    state = mf.shard(params, mf.plan(params, mesh_of(world), mf.zero3(), units=("blocks.*",), precision=EXACT))
    opt = mf.optim.muon(0.5, fallback=mf.optim.sgd(0.5), buckets=buckets)
    opt_state = opt.init(state)
    _, grads = mf.value_and_grad(sharded_loss)(state, batch_of(0, 0, rank))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        opt.step(grads, opt_state, state)
    return Counter(event.name for event in trace.events() or () if event.name.startswith("mfsdp_fn"))


def test_a_trace_names_exchanges_with_owners() -> None:
    for found in run_ranks(2, labels_of_a_muon_step, 1):
        assert found == Counter(
            f"mfsdp_fn: {kind} owner exchange of 4 groups ({phase})"
            for kind in ("launch", "wait for")
            for phase in ("gather", "scatter")
        )
    for found in run_ranks(2, labels_of_a_muon_step, 2):
        for phase in ("gather", "scatter"):
            launched, waited = (
                sum(n for name, n in found.items() if f"{kind} owner exchange" in name and phase in name)
                for kind in ("launch", "wait for")
            )
            assert launched == waited == 2
