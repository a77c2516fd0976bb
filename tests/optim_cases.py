"""What tests of optimizers share: a model whose gradients are its data, exact in floating point at every world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_fn as mf
from mfsdp_fn import optim

STRATEGIES: dict[str, Callable[[], mf.Placements]] = {
    "ddp": mf.ddp,
    "zero1": mf.zero1,
    "zero2": mf.zero2,
    "zero3": mf.zero3,
}
MICROBATCHES = 2
SHAPES = {
    "emb.weight": (5, 3),
    "norm.weight": (3,),
    "scale": (),
    "blocks.0.w": (4, 3),
    "blocks.0.norm.weight": (3,),
    "blocks.0.bias": (1,),
    "blocks.1.w": (2, 7),
    "blocks.1.empty": (0, 3),
    "frozen.w": (2, 2),
}


def make_params(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {path: torch.randn(shape, generator=generator).to(dtype) for path, shape in SHAPES.items()}
    return {path: p.requires_grad_(not path.startswith("frozen")) for path, p in params.items()}


def grad_scale(world_size: int) -> float:
    """One third is not exact in floating point: on three ranks, gradients are sums."""
    return 3.0 if world_size == 3 else 1.0


def data(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    """Small multiples of 12: sums over ranks and microbatches and their means are exact, in bfloat16 too."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return {path: 12.0 * torch.randint(-5, 6, shape, generator=generator) for path, shape in SHAPES.items()}


def loss_fn(state: mf.ShardState, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Linear, so that the gradient of each parameter is its data."""
    params = mf.unshard(state)
    return sum(((p * batch[path].to(p.dtype)).sum() for path, p in params.items()), torch.zeros(()))


def make_state(strategy: str, world_size: int, dtype: torch.dtype = torch.float32, **options: Any) -> mf.ShardState:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    params = make_params(dtype)
    spec = mf.plan(
        params, mesh, STRATEGIES[strategy](), units=("blocks.*",), grad_scale=grad_scale(world_size), **options
    )
    return mf.shard(params, spec)


def gradients(state: mf.ShardState, step: int, rank: int) -> mf.ShardState:
    """Gradients of one step, accumulated over microbatches."""
    grads = None
    for micro in range(MICROBATCHES):
        last = micro == MICROBATCHES - 1
        run = mf.value_and_grad(loss_fn, is_last_microbatch=last, accumulate=grads)
        _, grads = run(state, data(step, micro, rank))
    assert grads is not None
    return grads


def reference_gradients(step: int, world_size: int) -> dict[str, torch.Tensor]:
    """The same on the unsharded model: the sum over microbatches of the mean over ranks."""
    found: dict[str, torch.Tensor] = {}
    for micro in range(MICROBATCHES):
        per_rank = [data(step, micro, rank) for rank in range(world_size)]
        for path in SHAPES:
            mean = torch.stack([batch[path] for batch in per_rank]).sum(0) * (grad_scale(world_size) / world_size)
            found[path] = found[path] + mean if path in found else mean
    return found


def main_weights(state: mf.ShardState) -> dict[str, torch.Tensor]:
    """Whole main weights by path (a state without compute weights gives those)."""
    return mf.unshard(mf.tree_map(lambda buffer: buffer, state))


def fill_padding(state: mf.ShardState, value: float = float("nan")) -> None:
    """Write to everything in the state's main buffers that is no parameter's."""
    for group, buffer in zip(state.spec.groups, state.main, strict=True):
        if not buffer.numel():
            continue
        keep = torch.zeros(buffer.shape, dtype=torch.bool)
        for rows in group.local_views(keep, group.main_range).values():
            rows.fill_(True)
        buffer.masked_fill_(~keep, value)


def bits(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that travel between processes by themselves and not with their whole buffer."""
    return {path: tensor.detach().clone() for path, tensor in tree.items()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for path in got:
        torch.testing.assert_close(
            got[path], expected[path], rtol=0, atol=0, msg=lambda text, path=path: f"{path}: {text}"
        )


def abstract_state(placements: mf.Placements | None = None, **options: Any) -> mf.ShardState:
    """A state in this process, without a process group."""
    params = make_params()
    mesh = mf.AbstractMesh((1,), ("dp",))
    return mf.shard(params, mf.plan(params, mesh, placements or mf.ddp(), units=("blocks.*",), **options))


def make_grads(state: mf.ShardState) -> mf.ShardState:
    """Finished gradients of ones."""
    return mf.tree_map(torch.ones_like, mf.zeros_like(state))


class Trace:
    """Heavy-ball SGD as an optax-style transformation; its state is a dict and a count."""

    def __init__(self, lr: float, decay: float) -> None:
        self.lr, self.decay = lr, decay

    def init(self, params: dict[str, torch.Tensor]) -> Any:
        return {path: torch.zeros_like(p) for path, p in params.items()}, torch.zeros(())

    def update(self, updates: Any, state: Any, params: Any) -> Any:
        trace, count = state
        trace = {path: self.decay * trace[path] + grad for path, grad in updates.items()}
        return {path: -self.lr * t for path, t in trace.items()}, (trace, count + 1)


OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, 0.9),
    "adamw": lambda: optim.adamw(),
    "transformation": lambda: optim.from_gradient_transformation(Trace(0.1, 0.9)),
}


def leaves_of(tree: Any) -> list[torch.Tensor]:
    return optree.tree_leaves(tree)
