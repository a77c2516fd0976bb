"""What a caller may get wrong: refused by a ValueError that names the argument, or simply right."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import mfsdp_fn as mf

MESH = mf.AbstractMesh((1,), ("dp",))


def weights(**values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: value.clone().requires_grad_() for name, value in values.items()}


def state_of(params: Any, **options: Any) -> mf.ShardState:
    return mf.shard(params, mf.plan(params, MESH, mf.zero3(), **options))


P = weights(w=torch.eye(2))


def kept_pullback() -> Any:
    return mf.vjp(lambda s: mf.unshard(s)["w"].sum(0), state_of(P))[1]


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "precision": (
        lambda: mf.plan(P, MESH, mf.zero3(), precision=torch.bfloat16),  # pyright: ignore[reportArgumentType]
        r"`precision` got torch.bfloat16; expected a MixedPrecisionPolicy; write MixedPrecisionPolicy\(compute=",
    ),
    "runtime": (
        lambda: mf.plan(P, MESH, mf.zero3(), runtime={"forward_prefetch": 0}),  # pyright: ignore[reportArgumentType]
        r"`runtime` got \{'forward_prefetch': 0\}; expected a RuntimePolicy",
    ),
    "no mesh": (
        lambda: mf.plan(P, None, mf.zero3()),  # pyright: ignore[reportArgumentType]
        r"`mesh` got None; expected a DeviceMesh or an AbstractMesh",
    ),
    "mesh": (
        lambda: mf.plan(P, mf.AbstractMesh(2, "dp"), mf.zero3()),  # pyright: ignore[reportArgumentType]
        r"`mesh` got AbstractMesh\(2, 'dp'\); expected two tuples",
    ),
    "namespace": (
        lambda: mf.plan(P, MESH, mf.zero3(), namespace=None),  # pyright: ignore[reportArgumentType]
        r"`namespace` got None; expected the name of an optree namespace",
    ),
    "state for spec": (
        lambda: mf.reduce(P, state_of(P)),  # pyright: ignore[reportArgumentType]
        r"`spec` got a ShardState; expected a ShardSpec; pass the plan: state.spec",
    ),
    "shape from tree_map": (
        lambda: mf.tree_map(lambda t: t[:1], state_of(P)),
        r"`fn` got a function that gives \(1,\) for the buffer of '\(root\) float32'; expected a tensor of its shape",
    ),
    "cotangent": (
        lambda: kept_pullback()(torch.ones(3)),
        r"`cotangent` got shape \(3,\); expected a tensor of shape \(2,\)",
    ),
    "accumulate": (
        lambda: mf.value_and_grad(
            lambda s: mf.unshard(s["a"])["w"].sum(), accumulate={"b": mf.zeros_like(state_of(P))}
        )({"a": state_of(P)}),
        r"`accumulate` got states at \['b'\]; expected states at \['a'\], as in `state`",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_refused_by_name(name: str) -> None:
    call, text = CALLS[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_a_pullback_survives_a_bad_cotangent() -> None:
    pullback = kept_pullback()
    with pytest.raises(mf.StateError, match="`cotangent`"):
        pullback(torch.ones(3))
    assert torch.equal(pullback(torch.ones(2))[0].main[0], torch.ones(4))


def test_registration_order_may_change_from_call_to_call() -> None:
    params = weights(**{f"l.{i}.w": torch.eye(4) for i in range(3)})
    state = state_of(params, units=("l.*",))

    def loss(state: mf.ShardState, uses: int) -> torch.Tensor:
        x = torch.ones(1, 4)
        for i in range(uses):
            x = x @ mf.unshard(state[f"l.{i}"])["w"]
        return x.sum()

    transformed = mf.value_and_grad(loss)
    for uses in (3, 2, 3, 1):
        _, grads = transformed(state, uses)
        assert [bool(main.any()) for main in grads.main] == [i < uses for i in range(3)]


@pytest.mark.parametrize("outside", [True, False])
def test_reentrant_checkpoints_are_refused_wherever_weights_come_from(outside: bool) -> None:
    state = state_of(P)

    def loss(state: mf.ShardState) -> torch.Tensor:
        w = mf.unshard(state)["w"]
        x = torch.ones(2, 2, requires_grad=True)  # as models do that want their inputs' gradients
        body = (lambda x: x @ w) if outside else (lambda x: x @ mf.unshard(state)["w"])
        return checkpoint(body, x, use_reentrant=True).sum()  # pyright: ignore[reportOptionalMemberAccess]

    def pull(state: mf.ShardState) -> Any:
        _, pullback = mf.vjp(lambda s: {"loss": loss(s), "text": "no tensor"}, state)
        return pullback({"loss": torch.ones(()), "text": None})

    for call in (mf.value_and_grad(loss), pull):
        with pytest.raises(mf.StateError, match=r"use_reentrant=True\); expected use_reentrant=False"):
            call(state)


@dataclasses.dataclass(frozen=True)
class Record:
    loss: torch.Tensor
    parts: list[Any]


class Bag(dict[str, Any]):
    pass


def test_aux_is_detached_in_objects_too() -> None:
    plain = Record(torch.ones(1), [2])

    def loss(state: mf.ShardState) -> Any:
        total = mf.unshard(state)["w"].sum()
        return total, [Record(2 * total, [3 * total, None]), Bag(a=total), plain]

    (total, (record, bag, same)), _ = mf.value_and_grad(loss, has_aux=True)(state_of(P))
    assert total == 2 and same is plain
    assert type(record) is Record and record.loss == 4 and record.parts == [6, None]
    assert type(bag) is Bag and bag["a"] == 2
    assert not any(t.requires_grad for t in (record.loss, record.parts[0], bag["a"]))


def test_outputs_that_no_cotangent_reaches_are_refused() -> None:
    with pytest.raises(mf.StateError, match="`fn` got a function that returns a Record, with tensors that require"):
        mf.vjp(lambda s: Record(mf.unshard(s)["w"].sum(), []), state_of(P))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda w: w, r"a tensor of shape \(2, 2\)"),
        (lambda w: w.sum().to(torch.complex64), "a scalar of torch.complex64"),
        (lambda w: w.sum().long(), "a scalar of torch.int64"),
        (lambda w: 3.0, "a float"),
    ],
)
def test_a_loss_is_a_floating_point_scalar(loss: Any, got: str) -> None:
    with pytest.raises(
        mf.StateError, match=f"`loss_fn` got a function returning {got}; expected a scalar tensor of floats"
    ):
        mf.value_and_grad(lambda s: loss(mf.unshard(s)["w"]))(state_of(P))


def test_gradients_accumulate_by_the_name_of_their_state() -> None:
    state = state_of(weights(w=torch.ones(2)))

    def loss(states: dict[str, mf.ShardState]) -> torch.Tensor:
        return mf.unshard(states["a"])["w"].sum() + 3 * mf.unshard(states["b"])["w"].sum()

    states = {"a": state, "b": state}
    _, once = mf.value_and_grad(loss)(states)
    _, twice = mf.value_and_grad(loss, accumulate={"b": once["b"], "a": once["a"]})(states)
    assert twice["a"].main[0].tolist() == [2, 2]
    assert twice["b"].main[0].tolist() == [6, 6]


def test_inference_mode_is_refused_and_no_grad_is_not() -> None:
    state = state_of(P)
    transformed = mf.value_and_grad(lambda s: mf.unshard(s)["w"].sum())
    with torch.no_grad():
        assert torch.equal(transformed(state)[1].main[0], torch.ones(4))
    with torch.inference_mode(), pytest.raises(mf.StateError, match="`state` got a state in inference mode"):
        transformed(state)


def test_states_are_nodes_of_torchs_pytrees_with_and_without_compute_weights() -> None:
    for precision in (mf.MixedPrecisionPolicy(), mf.MixedPrecisionPolicy(compute=torch.bfloat16)):
        state = state_of(P, precision=precision)
        doubled = _pytree.tree_map(lambda t: t * 2, state)
        assert torch.equal(mf.unshard(doubled)["w"], mf.unshard(state)["w"] * 2)
        assert torch.equal(_pytree.tree_map(lambda t: t * 2, state[""]).main[0], state.main[0] * 2)


def test_a_template_of_plain_containers_can_be_pickled() -> None:
    params = {"l": [torch.ones(2, requires_grad=True)], "t": (torch.ones(1, requires_grad=True),)}
    spec = mf.plan(params, MESH, mf.zero3())
    state = mf.shard(params, spec)
    again = pickle.loads(pickle.dumps(state))
    assert torch.equal(mf.unshard(again)["l"][0], torch.ones(2))


def test_writes_to_what_backward_needs_are_refused() -> None:
    """Under hooks autograd doesn't check that nothing wrote to what it saved: the tape does."""
    params = {"w": torch.tensor([0.0, 1.0, 2.0], requires_grad=True)}
    for preset in (mf.ddp, mf.zero3):
        state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), preset()))

        def loss(state: mf.ShardState) -> torch.Tensor:
            y = mf.unshard(state)["w"].exp()
            y.add_(1)
            return y.sum()

        with pytest.raises(mf.StateError, match=r"got an in-place write to a tensor of shape .* that backward needs"):
            mf.value_and_grad(loss)(state)
        out, pullback = mf.vjp(lambda state: mf.unshard(state)["w"].exp(), state)
        out.zero_()
        with pytest.raises(mf.StateError, match="in-place write"):
            pullback(torch.ones(3))


def test_a_step_between_forward_and_backward_is_refused() -> None:
    """A step that reuses the weights' buffers must come after the backward that reads them."""
    params = {"w": torch.tensor([0.0, 1.0, 2.0], requires_grad=True)}
    opt = mf.optim.sgd(lr=1.0)
    for preset in (mf.ddp, mf.zero3):
        for late in (False, True):
            state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), preset()))
            _, pullback = mf.vjp(lambda state: mf.unshard(state)["w"].square().sum(), state)
            if late:
                pullback.inputs(torch.ones(()))
            opt.step(mf.zeros_like(state), opt.init(state), state, donate=True)
            with pytest.raises(mf.DonatedError, match="`state` got a state whose buffers were donated to sgd"):
                pullback.weights() if late else pullback(torch.ones(()))


def test_a_cotangent_may_be_received_into_again() -> None:
    params = {"w": torch.ones(4, requires_grad=True)}
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    cotangent = torch.ones(4)
    _, pullback = mf.vjp(lambda state: mf.unshard(state)["w"] * 2, state)
    pullback.inputs(cotangent)
    cotangent.fill_(7)
    assert torch.equal(mf.unshard(pullback.weights())["w"], torch.full((4,), 2.0))


def test_weights_are_no_gradients_to_add_to() -> None:
    params = {"w": torch.ones(4, requires_grad=True)}
    precision = mf.MixedPrecisionPolicy(compute=torch.bfloat16)
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), precision=precision))
    with pytest.raises(mf.StateError, match="`accumulate` got a state of weights; expected gradients"):
        mf.value_and_grad(lambda state: mf.unshard(state)["w"].sum(), accumulate=state)(state)
