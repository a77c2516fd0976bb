"""Small models as dicts of tensors, and what they train to without sharding.

`bilinear` is made so that everything is exact: parameters are small integers in fp64 and its loss is linear in every
unit, so three steps of SGD with a power of two as learning rate round nothing, whatever the order of summation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp_fn as mf
from mfsdp_fn.testing import SimulatedMesh
from simulated import here

Params = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]

EXACT = mf.MixedPrecisionPolicy(main=None)
LR = 2.0**-4
# Dynamo of torch 2.11 writes `add_(x, alpha=a)` as a product and a sum; the eager kernel rounds once.
ROUNDS_ALPHA = torch.__version__.startswith("2.11.")
DIM, VOCAB = 4, 5
PRESETS: dict[str, Callable[[], mf.Placements]] = {
    "ddp": mf.ddp,
    "zero1": mf.zero1,
    "zero2": mf.zero2,
    "zero3": mf.zero3,
    "hsdp": mf.hsdp,
    "hfsdp": mf.hfsdp,
}
BLOCKS = ("blocks.*",)


def layouts_of(preset: str, *layouts: str) -> tuple[str, ...]:
    """Those that are taken: where nothing is cut, leaving padding out is refused."""
    return tuple(layout for layout in layouts if (preset, layout) != ("ddp", "unpadded"))


def mesh_of(*shape: int) -> DeviceMesh | SimulatedMesh:
    """A mesh over the whole world: of this process' pool (made once), or of the simulation that the caller is in."""
    names = ("outer", "inner")[-len(shape) :]
    simulated = here()
    return _real_mesh_of(shape, names) if simulated is None else simulated.reshaped(shape, names)


@functools.cache
def _real_mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def integers(*shape: int, seed: int, high: int = 2, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=generator).to(dtype)


def trainable(params: Mapping[str, torch.Tensor]) -> Params:
    return {name: value.clone().requires_grad_() for name, value in params.items()}


def bilinear(depth: int = 3, dtype: torch.dtype = torch.float64) -> Params:
    """An embedding (root) and `depth` equal-sized units."""
    params = {"embed": integers(VOCAB, DIM, seed=1, dtype=dtype)}
    for i in range(depth):
        params[f"blocks.{i}.w"] = integers(DIM, DIM, seed=10 + i, dtype=dtype)
        params[f"blocks.{i}.b"] = integers(DIM, seed=50 + i, dtype=dtype)
    return trainable(params)


def made(
    preset: str = "zero3", *shape: int, depth: int = 3, params: Any = None, **options: Any
) -> tuple[mf.ShardState, Params]:
    """A sharded state of `params`, by default `bilinear`'s, and what it was made from."""
    params = bilinear(depth) if params is None else params
    options = {"units": BLOCKS, "precision": EXACT} | options
    return mf.shard(params, mf.plan(params, mesh_of(*shape), PRESETS[preset](), **options)), params


def block(p: Mapping[str, torch.Tensor], e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Adds to `x` what is bilinear in `e` and the unit: backward needs the unit's weights."""
    return x + e @ p["w"].T + p["b"]


def batch_of(step: int, micro: int, rank: int) -> Batch:
    seed = 1000 + 100 * step + 10 * micro + rank
    tokens = torch.randint(0, VOCAB, (3,), generator=torch.Generator().manual_seed(seed))
    return tokens, integers(3, DIM, seed=seed, high=1)


def sharded_loss(state: mf.ShardState, batch: Batch, factor: float = 1.0, call: Callable[..., Any] = block) -> Any:
    """The loss of `bilinear`, a unit gathered where it is used. `call` runs one block."""
    tokens, target = batch
    e = mf.unshard(state[""])["embed"][tokens]
    x = e
    for name in state.spec.units_matching("blocks.*"):
        x = call(mf.unshard(state[name]), e, x)
    return (x * target).sum() * factor


def plain_loss(params: Mapping[str, torch.Tensor], batch: Batch, factor: float = 1.0) -> torch.Tensor:
    """The same, unsharded."""
    tokens, target = batch
    e = params["embed"][tokens]
    x = e
    for i in range(sum(name.endswith(".w") for name in params)):
        x = block({"w": params[f"blocks.{i}.w"], "b": params[f"blocks.{i}.b"]}, e, x)
    return (x * target).sum() * factor


def plain_grads(
    params: Mapping[str, torch.Tensor], losses: Sequence[Callable[[Params], torch.Tensor]], ranks: int
) -> Params:
    """Sum over `losses` (one a microbatch a rank) of gradients, divided by the number of ranks."""
    leaves = trainable(params)
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for loss in losses:
        found = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True)
        for name, grad in zip(leaves, found, strict=True):
            if grad is not None:
                total[name] += grad
    return {name: grad / ranks for name, grad in total.items()}


def plain_training(
    params: Mapping[str, torch.Tensor],
    ranks: int,
    *,
    steps: int,
    micros: int,
    scale: float = 1.0,
    loss: Callable[..., torch.Tensor] = plain_loss,
    first: int = 0,
) -> Params:
    """Parameters after `steps` of SGD on all ranks' batches; each loss is multiplied by `ranks`, so means are exact."""
    now = {name: value.detach().clone() for name, value in params.items()}
    for step in range(first, first + steps):
        losses = [
            lambda p, s=step, m=micro, r=rank: loss(p, batch_of(s, m, r), float(ranks))
            for micro in range(micros)
            for rank in range(ranks)
        ]
        grads = plain_grads(now, losses, ranks)
        now = {name: value - LR * scale * grads[name] for name, value in now.items()}
    return now


def sgd(state: mf.ShardState, grads: mf.ShardState, lr: float = LR) -> mf.ShardState:
    """One hand-written step, compute weights refreshed."""
    return mf.sync_model_weights(mf.tree_map(lambda w, g: w - lr * g.to(w.dtype), state, grads))


def accumulated(
    loss_fn: Callable[..., Any], state: Any, batches: Sequence[Batch], *args: Any, donate: bool = False
) -> Any:
    """Gradients of several microbatches."""
    grads = None
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        step = mf.value_and_grad(loss_fn, is_last_microbatch=last, accumulate=grads, donate=donate)
        _, grads = step(state, batch, *args)
    return grads


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: object = "") -> None:
    """Bit for bit, the first path that differs named."""
    assert list(got) == list(expected), what
    for name in expected:
        torch.testing.assert_close(
            got[name].detach(), expected[name].detach(), rtol=0, atol=0, msg=lambda text, n=name: f"{what} {n}: {text}"
        )
