"""Global norms and clipping: each element once, the same value on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_fn as mf
from mfsdp_fn.optim import clip_by_global_norm, global_norm
from optim_cases import (
    STRATEGIES,
    abstract_state,
    assert_same,
    bits,
    fill_padding,
    gradients,
    main_weights,
    make_state,
    reference_gradients,
)
from pool import WORLD_SIZES, run_ranks

NORMS = (1.0, 2.0, 3.5, math.inf)


def assert_close(got: torch.Tensor, expected: torch.Tensor | None) -> None:
    """The norm of a shard is summed in another order than the whole tensor's, and 3.5 goes through pow: a few float32
    roundings of a sum of 50 terms.
    """
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=0.0)


def trainable(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {path: tensor for path, tensor in tree.items() if not path.startswith("frozen")}


def norms_and_clipped(rank: int, world_size: int, strategy: str) -> tuple[Any, ...]:
    grads = gradients(make_state(strategy, world_size), 0, rank)
    fill_padding(grads)
    before = [buffer.clone() for buffer in grads.main]
    norms = [global_norm(grads, norm_type) for norm_type in NORMS]
    clipped, norm = clip_by_global_norm(grads, 10.0)
    loose, _ = clip_by_global_norm(grads, 1e6)
    for old, now in zip(before, grads.main, strict=True):  # not donated: untouched, padding included
        assert torch.equal(old.view(torch.int32), now.view(torch.int32))
    pointers = [buffer.data_ptr() for buffer in grads.main]
    donated, _ = clip_by_global_norm(grads, 10.0, donate=True)
    assert [buffer.data_ptr() for buffer in donated.main] == pointers
    with pytest.raises(mf.DonatedError, match="donated to clip_by_global_norm"):
        global_norm(grads)
    results = [bits(trainable(mf.unshard(state))) for state in (clipped, loose, donated)]
    return norms, norm, results


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_the_unsharded_norm(world_size, strategy):
    expected = trainable(reference_gradients(0, world_size))
    everything = torch.cat([grad.reshape(-1) for grad in expected.values()])
    answers = run_ranks(world_size, norms_and_clipped, strategy)
    for norms, norm, (clipped, loose, donated) in answers:
        for got, norm_type in zip(norms, NORMS, strict=True):
            assert_close(got, torch.linalg.vector_norm(everything, norm_type))
        assert norm == norms[1]
        assert_same(loose, expected)  # clamped to 1: not changed at all
        params = [torch.nn.Parameter(torch.zeros(grad.shape)) for grad in expected.values()]
        for param, grad in zip(params, expected.values(), strict=True):
            param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(params, 10.0)
        for path, param in zip(expected, params, strict=True):
            assert_close(clipped[path], param.grad)
        assert_same(donated, clipped)
    assert all(torch.equal(torch.stack(norms), torch.stack(answers[0][0])) for norms, _, _ in answers)


def norm_with(rank: int, world_size: int, strategy: str, bad_rank: int, value: float) -> list[torch.Tensor]:
    grads = gradients(make_state(strategy, world_size), 0, rank)
    if rank == bad_rank:
        group, buffer = grads.spec.groups[0], grads.main[0]
        next(iter(group.local_views(buffer, group.main_range).values())).view(-1)[0] = value
    return [global_norm(grads, norm_type) for norm_type in NORMS]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_what_is_not_finite_on_one_rank_is_so_on_all(bad_rank, value):
    for norms in run_ranks(3, norm_with, "zero3", bad_rank, value):
        for norm in norms:
            assert math.isnan(norm) if math.isnan(value) else norm == math.inf


def norm_on_two_axes(rank: int, world_size: int, preset: str) -> tuple[torch.Tensor, int]:
    params = {"w": torch.arange(1.0, 10.0).reshape(9, 1).requires_grad_(), "b": torch.ones(1, requires_grad=True)}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    grads = mf.zeros_like(mf.shard(params, mf.plan(params, mesh, getattr(mf, preset)())))
    for group, buffer in zip(grads.spec.groups, grads.main, strict=True):
        for index, rows in group.local_views(buffer, group.main_range).items():
            first = max(group.main_range.start - group.views[index][0], 0)
            rows.copy_(params[group.paths[index]].detach()[first : first + len(rows)])
    fill_padding(grads)
    with CountGathers() as count:
        norm = global_norm(grads)
    return norm, count.found


class CountGathers(TorchDispatchMode):
    """Counts all-gathers, and that each rank sends one float."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_c10d_functional" in str(func) and "wait" not in str(func):
            assert "all_gather" in str(func) and args[0].numel() == 1
            self.found += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset, gathers", [("hsdp", 1), ("hfsdp", 2)])
def test_replicated_axes_count_once_and_each_sharded_axis_gathers_once(preset, gathers):
    answers = run_ranks(4, norm_on_two_axes, preset)
    expected = torch.linalg.vector_norm(torch.cat([torch.arange(1.0, 10.0), torch.ones(1)]))
    for norm, found in answers:
        assert_close(norm, expected)
        assert norm == answers[0][0]
        assert found == gathers


def test_several_states_have_one_norm():
    grads = {"a": mf.zeros_like(abstract_state()), "b": [mf.zeros_like(abstract_state(mf.zero3()))]}
    grads["a"].main[0].fill_(3.0)
    grads["b"][0].main[1].fill_(-4.0)
    sizes = [sum(shape.numel() for shape in grads["a"].spec.groups[n].layout.tensor_shapes) for n in (0, 1)]
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(9 * sizes[0] + 16 * sizes[1]))
    assert list(clipped) == ["a", "b"] and isinstance(clipped["b"], list)
    assert global_norm(clipped).item() == pytest.approx(1.0, rel=1e-5)
    assert global_norm(grads, math.inf) == 4.0
    clip_by_global_norm(grads, 1.0, donate=True)
    with pytest.raises(mf.DonatedError, match=r"`grads\.a` got a state whose buffers were donated"):
        global_norm(grads)


def test_low_precision_gradients_keep_their_dtype_and_sum_in_float32():
    state = abstract_state(precision=mf.MixedPrecisionPolicy(grad=torch.bfloat16))
    grads = mf.ShardState(
        tuple(torch.ones_like(buffer, dtype=torch.bfloat16) for buffer in mf.zeros_like(state).main),
        (None,) * len(state.main),
        state.spec,
    )
    count = sum(leaf.shape.numel() for leaf in state.spec.leaves if leaf.requires_grad)
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert norm.dtype == torch.float32
    assert_close(norm, torch.tensor(math.sqrt(count)))
    assert {buffer.dtype for buffer in clipped.main} == {torch.bfloat16}


def test_double_precision_stays():
    params = {"w": torch.ones(3, dtype=torch.float64, requires_grad=True)}
    precision = mf.MixedPrecisionPolicy(main=torch.float64)
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp(), precision=precision))
    assert global_norm(state).dtype == torch.float64
    assert global_norm({"a": state, "b": mf.zeros_like(abstract_state())}).dtype == torch.float64


def test_a_norm_that_is_not_finite_clips_as_torch_does():
    grads = mf.zeros_like(abstract_state())
    grads.main[0][0] = math.inf
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert norm == math.inf
    assert clipped.main[0][0].isnan() and clipped.main[0][1] == 0.0


def test_max_norm_may_be_a_tensor_or_infinite():
    grads = mf.tree_map(torch.ones_like, mf.zeros_like(abstract_state()))
    by_number, _ = clip_by_global_norm(grads, 2.0)
    by_tensor, _ = clip_by_global_norm(grads, torch.tensor(2.0))
    measured, _ = clip_by_global_norm(grads, math.inf)
    assert all(torch.equal(a, b) for a, b in zip(by_number.main, by_tensor.main, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(measured.main, grads.main, strict=True))


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan, True, "2", -math.inf])
def test_bad_norm_types_are_refused(norm_type):
    with pytest.raises(mf.MfsdpError, match=r"`norm_type` got .*; expected a positive number or float\('inf'\)"):
        global_norm(mf.zeros_like(abstract_state()), norm_type)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, None, torch.ones(2)])
def test_bad_max_norms_are_refused(max_norm):
    with pytest.raises(mf.MfsdpError, match=r"`max_norm` got .*; expected a number >= 0 or a 0-D tensor"):
        clip_by_global_norm(mf.zeros_like(abstract_state()), max_norm)


def refuse_accumulating(rank: int, world_size: int) -> None:
    state = make_state("zero1", world_size)
    _, grads = mf.value_and_grad(lambda s: mf.unshard(s)["scale"].sum(), is_last_microbatch=False)(state)
    with pytest.raises(mf.StateError, match=r"`grads` got gradients that still accumulate; .*finish_grad_sync"):
        global_norm(grads)
    global_norm(mf.finish_grad_sync(grads))


def test_accumulating_gradients_are_refused():
    run_ranks(2, refuse_accumulating)


def test_what_is_no_state_is_refused():
    with pytest.raises(mf.StateError, match="`grads` got a Tensor; expected a ShardState"):
        global_norm(torch.ones(2))
    with pytest.raises(mf.StateError, match="`grads` got no state"):
        global_norm([])


def test_the_frozen_group_does_not_count():
    state = abstract_state()
    spec = state.spec
    assert main_weights(state)["frozen.w"].abs().sum() > 0
    zero = mf.tree_map(torch.zeros_like, state)  # weights as gradients: the frozen group's values are there
    assert any(buffer.any() for buffer in zero.main) and not spec.groups[-1].requires_grad
    assert global_norm(zero) == 0.0
