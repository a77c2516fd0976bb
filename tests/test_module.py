"""`functional_call`: unmodified modules on sharded states, against the modules themselves."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mfsdp_fn as mf
from mfsdp_fn.testing import single_rank
from models import mesh_of
from pool import run_ranks

Pair = namedtuple("Pair", "first second")


class Block(nn.Module):
    def __init__(self, remember: bool = False) -> None:
        super().__init__()
        self.norm, self.linear, self.remember = nn.LayerNorm(6), nn.Linear(6, 6), remember

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        if self.remember:
            return {"out": checkpoint(self.body, x, use_reentrant=False) * scale}
        return {"out": self.body(x) * scale}

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Tied(nn.Module):
    """Ties weights, calls a block twice, returns a dict, keeps running statistics."""

    def __init__(self, remember: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(Block(remember) for _ in range(3))
        self.stats = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, scale=0.5)["out"]
        return self.head(self.stats(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lstm = nn.Embedding(5, 6), nn.LSTM(6, 6, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.emb(ids)[None])[0]


class Borrower(nn.Module):
    """Reads a unit's parameter while the unit isn't running."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block = nn.Embedding(5, 6), Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.emb(ids))["out"] @ self.block.linear.weight


class Referring(nn.Module):
    """Refers to its parts in every way but by registering them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.a, self.b = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.fn: Any = {
            "closure": lambda x: self.a(x),
            "method": self.run,
            "partial": functools.partial(self.run, scale=2.0),
            "list": [[self.a]],
            "ordered": OrderedDict(a=(self.a,)),
            "pair": Pair(self.a, self.a.weight),
            "parameter": [self.a.weight],
            "hook": None,
        }[how]
        self.how = how
        if how == "hook":
            self.b.register_forward_hook(self.hook)

    def run(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.a(x) * scale

    def hook(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return self.a(out)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.b(self.emb(ids))
        match self.how:
            case "list":
                return self.fn[0][0](x)
            case "ordered":
                return self.fn["a"][0](x)
            case "pair":
                return F.linear(self.fn.first(x), self.fn.second)
            case "parameter":
                return F.linear(x, self.fn[0])
            case "hook":
                return x
        return self.fn(x)


REFERENCES = ("closure", "method", "partial", "list", "ordered", "pair", "parameter", "hook")
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "tied": (Tied, ("blocks.*",)),
    "tied, checkpointed": (functools.partial(Tied, remember=True), ("blocks.*",)),
    "nested units": (Tied, ("blocks.*", "blocks.*.linear")),
    "recurrent": (Recurrent, ("lstm",)),
    "recurrent, a unit a parameter": (Recurrent, ("lstm.*",)),
    "borrower": (Borrower, ("block",)),
    **{how: (functools.partial(Referring, how), ("a", "b")) for how in REFERENCES},
}


def batch(rank: int) -> torch.Tensor:
    return torch.randint(0, 5, (7,), generator=torch.Generator().manual_seed(rank))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def equals_the_module(rank: int, world: int, names: list[str]) -> None:
    for name in names:
        make, units = MODULES[name]
        torch.manual_seed(0)
        module, reference = make().double(), None
        torch.manual_seed(0)
        reference = make().double()
        for params in (mf.params_of(module), dict(module.named_parameters())):
            before = {key: value.clone() for key, value in module.state_dict().items()}
            attributes = {path: set(vars(m)) for path, m in module.named_modules()}
            precision = mf.MixedPrecisionPolicy(main=None)
            spec = mf.plan(params, mesh_of(world), mf.zero3(), units=units, precision=precision)
            state = mf.shard(params, spec)
            loss, grads = mf.value_and_grad(lambda s, x, m=module: loss_of(mf.functional_call(m, s, (x,))))(
                state, batch(rank)
            )
            # The module is as it was, but for its buffers, which are its own.
            for key, parameter in module.named_parameters():
                assert torch.equal(parameter, before[key]) and parameter.grad is None, (name, key)
            assert {path: set(vars(m)) for path, m in module.named_modules()} == attributes, name
            expected = [torch.zeros_like(p) for p in reference.parameters()]
            for other in range(world):
                torch.manual_seed(0)
                fresh = make().double()
                plain = loss_of(fresh(batch(other)))
                for total, grad in zip(expected, torch.autograd.grad(plain, list(fresh.parameters()), allow_unused=True), strict=True):  # fmt: skip  # noqa: E501
                    total += 0 if grad is None else grad / world
                if other == rank:
                    assert torch.equal(loss, plain.detach()), name
            got = mf.unshard(grads)
            for (key, _), value in zip(reference.named_parameters(), expected, strict=True):
                # fp64; ranks' sums and the two uses of a block are added in another order.
                torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-14, msg=f"{name} {key}")
    torch.manual_seed(0)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_equal_the_modules(world: int) -> None:
    run_ranks(world, equals_the_module, list(MODULES), timeout=120)


def planned(module: nn.Module, mesh: Any, units: tuple[str, ...] = ()) -> mf.ShardState:
    params = mf.params_of(module)
    return mf.shard(params, mf.plan(params, mesh, mf.zero3(), units=units))


def test_buffers_are_the_modules_own_and_evaluation_needs_no_gradient() -> None:
    with single_rank() as mesh:
        module = Tied()
        state = planned(module, mesh, ("blocks.*",))
        mean = module.stats.running_mean
        assert mean is not None
        with torch.no_grad():
            mf.functional_call(module, state, (batch(0),))
        assert module.stats.running_mean is mean
        assert mean.abs().sum() > 0
        assert module.stats.num_batches_tracked == 1
        module.eval()
        with torch.no_grad():
            torch.testing.assert_close(mf.functional_call(module, state, (batch(0),)), module(batch(0)), rtol=0, atol=0)


def test_a_forward_that_raises_leaves_everything_as_it_was() -> None:
    class Failing(Tied):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            super().forward(ids)
            raise KeyError("mine")

    with single_rank() as mesh:
        module = Failing()
        state = planned(module, mesh, ("blocks.*",))
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                mf.value_and_grad(lambda s: mf.functional_call(module, s, (batch(0),)))(state)
        assert module.emb.weight is module.head.weight
        assert isinstance(vars(module)["_parameters"], dict)
        Tied.forward(module, batch(0))


def test_nothing_keeps_the_state_alive() -> None:
    with single_rank() as mesh:
        gc.disable()
        try:
            for module in (Tied(), Recurrent(), Referring("closure")):
                state = planned(module, mesh)
                mf.functional_call(module, state, (batch(0),))
                mf.value_and_grad(lambda s, m=module: loss_of(mf.functional_call(m, s, (batch(0),))))(state)
                held = [weakref.ref(main) for main in state.main]
                del state
                if not isinstance(module, Referring):  # a closure over its own module is a cycle in itself
                    assert all(ref() is None for ref in held)
        finally:
            gc.enable()


class Helper:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


def test_what_cannot_be_served_is_refused_by_name() -> None:
    with single_rank() as mesh:
        module = Tied()
        state = planned(module, mesh, ("blocks.*",))
        with pytest.raises(mf.StateError, match=r"`module` got parameter 'weight', which is not in the state"):
            mf.functional_call(nn.Linear(2, 2), state, (batch(0),))
        with pytest.raises(mf.StateError, match=r"`args` got a Tensor; expected a tuple; write \(x,\)"):
            mf.functional_call(module, state, batch(0))  # pyright: ignore[reportArgumentType] (what is refused)
        with pytest.raises(mf.StateError, match=r"`kwargs` got a int; expected a dict"):
            mf.functional_call(module, state, (), 3)  # pyright: ignore[reportArgumentType] (what is refused)
        module.blocks[1].compile(backend="eager")
        with pytest.raises(mf.StateError, match=r"`module` got a compiled submodule at 'blocks.1'"):
            mf.functional_call(module, state, (batch(0),))
        module = Tied()
        vars(module)["helper"] = Helper(module.emb)
        with pytest.raises(mf.StateError, match=r"`module` got a Helper at 'helper' that refers to a submodule"):
            mf.functional_call(module, planned(module, mesh), (batch(0),))
        module = Tied()
        state = planned(module, mesh)
        module.get_parameter("blocks.0.linear.bias").requires_grad_(False)
        with pytest.raises(mf.StateError, match=r"requires_grad=False at 'blocks.0.linear.bias'.*plan again"):
            mf.functional_call(module, state, (batch(0),))


class ByName(nn.Module):
    """Asks for its parameters by name."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.block = nn.Parameter(torch.ones(6)), Block()
        self.register_parameter("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("none", "block", "missing"):
            with pytest.raises(AttributeError, match=name):
                self.get_parameter(name)
        x = x * self.get_parameter("own") + self.get_parameter("block.linear.bias")
        return x @ self.block.get_parameter("linear.weight")


def test_get_parameter_gives_the_states_weights() -> None:
    torch.manual_seed(0)
    module, x = ByName(), torch.randn(2, 6)
    params = mf.params_of(module)
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), units=("block",)))
    doubled = mf.tree_map(lambda buffer: buffer * 2, state)
    with torch.no_grad():
        assert torch.equal(mf.functional_call(module, state, (x,)), module(x))
        twice = mf.functional_call(module, mf.sync_model_weights(doubled), (x,))
        for parameter in module.parameters():
            parameter.mul_(2)
        assert torch.equal(twice, module(x))
    assert "get_parameter" not in vars(module)
