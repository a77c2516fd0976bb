"""A mixture of experts as a dict of tensors, on ranks that each hold some of them, and what it is without sharding.

As `models.bilinear`, everything is exact: the loss is linear in every unit. Tokens reach their experts by an
all-to-all over the ranks of the expert-parallel axis, which is the user's own business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp_fn as mf
from models import DIM, EXACT, VOCAB, Batch, Params, integers, mesh_of, trainable

EXPERTS, DEPTH = 12, 2
UNITS = ("blocks.*", "blocks.*.experts")
ON_EXPERTS = "blocks.*.experts"


def whole() -> Params:
    """All parameters, all experts."""
    params = {"embed": integers(VOCAB, DIM, seed=1)}
    for i in range(DEPTH):
        params[f"blocks.{i}.w"] = integers(DIM, DIM, seed=10 + i)
        params[f"blocks.{i}.experts.w"] = integers(EXPERTS, DIM, DIM, seed=20 + i)
        params[f"blocks.{i}.experts.b"] = integers(EXPERTS, DIM, seed=30 + i)
    return trainable(params)


@functools.cache
def expert_mesh(ep: int, *edp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ep, *edp), mesh_dim_names=("ep", "outer", "edp")[:: 3 - len(edp)])


def part(params: Mapping[str, torch.Tensor], place: int, ep: int) -> Params:
    """What the ranks at `place` of `ep` hold: of experts a slice."""
    held = EXPERTS // ep
    return {
        name: value.detach()[place * held : (place + 1) * held] if "experts" in name else value.detach()
        for name, value in params.items()
    }


class Exchange(torch.autograd.Function):
    """Row i of `x` to rank i of the group, and its row for this rank back; the transpose is the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        sizes = [1] * len(x)
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_to_all_single(x.contiguous(), sizes, sizes, group)
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Exchange.apply(grad, ctx.group), None


def choice(tokens: torch.Tensor) -> torch.Tensor:
    """Each token's expert, one-hot."""
    return torch.nn.functional.one_hot((5 * tokens + 2) % EXPERTS, EXPERTS).double()


def experts_alone(p: Mapping[str, torch.Tensor], chosen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What the experts of `p` give for those rows of `x` that chose one of them."""
    return torch.einsum("te,td,efd->tf", chosen, x, p["w"]) + chosen @ p["b"]


def dispatched(p: Mapping[str, torch.Tensor], tokens: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    """`experts_alone` of all experts, of which this rank holds some: rows go to where theirs are, and back."""
    held = len(p["b"])
    ep = EXPERTS // held
    chosen = choice(tokens).unflatten(1, (ep, held)).transpose(0, 1)  # (ep, tokens, held)
    sent = torch.cat([chosen, chosen.sum(2, keepdim=True) * x], dim=2)
    got = Exchange.apply(sent, group).flatten(0, 1)
    out = experts_alone(p, got[:, :held], got[:, held:])
    return Exchange.apply(out.unflatten(0, (ep, len(tokens))), group).sum(0)


def plain_loss(params: Mapping[str, torch.Tensor], batch: Batch, factor: float = 1.0) -> torch.Tensor:
    tokens, target = batch
    e = params["embed"][tokens]
    x = e
    for i in range(DEPTH):
        experts = {key: params[f"blocks.{i}.experts.{key}"] for key in "wb"}
        x = x + e @ params[f"blocks.{i}.w"].T + experts_alone(experts, choice(tokens), e)
    return (x * target).sum() * factor


def sharded_loss(state: mf.ShardState, batch: Batch, factor: float, group: str) -> torch.Tensor:
    tokens, target = batch
    e = mf.unshard(state[""])["embed"][tokens]
    x = e
    for name in state.spec.units_matching("blocks.*"):
        x = x + e @ mf.unshard(state[name])["w"].T
        x = x + dispatched(mf.unshard(state[f"{name}.experts"]), tokens, e, group)
    return (x * target).sum() * factor


def made(
    dense: Callable[[], mf.Placements],
    experts: Callable[[], mf.Placements],
    shape: tuple[int, ...],
    ep: int,
    edp: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[mf.ShardState, str]:
    """A state of this rank's part, and the communicator of the expert-parallel axis. `edp` is for two axes."""
    mesh = expert_mesh(ep, *(edp or (dist.get_world_size() // ep,)))
    params = trainable(part(whole(), mesh.get_local_rank("ep"), ep))
    spec = mf.plan(
        params,
        {"": mesh_of(*shape), ON_EXPERTS: mesh["outer", "edp"] if edp else mesh["edp"]},
        {"": dense(), ON_EXPERTS: experts()},
        grad_scale={ON_EXPERTS: 1 / ep},
        **({"units": UNITS, "precision": EXACT} | options),
    )
    return mf.shard(params, spec), mesh["ep"].get_group().group_name
