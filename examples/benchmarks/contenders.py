"""What is measured: each contender is made by a function and gives a forward+backward and a whole step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Config, build
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mfsdp_fn as mf


@dataclasses.dataclass
class Contender:
    """Two things to time, and a check."""

    forward_backward: Callable[[], torch.Tensor]
    step: Callable[[], torch.Tensor] | None
    gradient_norm: Callable[[], torch.Tensor] | None


@dataclasses.dataclass(frozen=True)
class Case:
    """One regime."""

    config: Config
    mesh: DeviceMesh
    device: torch.device
    tokens: torch.Tensor
    targets: torch.Tensor
    compute: torch.dtype
    reduce: torch.dtype


def fsdp2(case: Case, *, compiled: bool) -> Contender:
    """PyTorch FSDP2 as its documentation has it: one group a block, the rest in the root."""
    module = build(case.config, case.device)
    policy = MixedPrecisionPolicy(param_dtype=case.compute, reduce_dtype=case.reduce)
    for block in module.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=case.mesh, mp_policy=policy)
    fully_shard(module, mesh=case.mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=case.device.type == "cuda")

    def forward_backward() -> torch.Tensor:
        loss = module(case.tokens, case.targets)
        loss.backward()
        optimizer.zero_grad()
        return loss.detach()

    def step() -> torch.Tensor:
        loss = module(case.tokens, case.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def gradient_norm() -> torch.Tensor:
        module(case.tokens, case.targets).backward()
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        optimizer.zero_grad()
        return norm.full_tensor()  # type: ignore[attr-defined]

    return Contender(forward_backward, step, gradient_norm)


def ours(case: Case, *, how: str, runtime: mf.RuntimePolicy | None = None) -> Contender:
    """This library: eager, with blocks compiled, or the module unchanged through functional_call."""
    module = build(case.config, case.device)
    params = mf.params_of(module)
    precision = mf.MixedPrecisionPolicy(compute=case.compute, reduce=case.reduce)
    spec = mf.plan(params, case.mesh, mf.zero3(), units=("blocks.*",), precision=precision, runtime=runtime)
    state = mf.shard(params, spec)
    skeleton = module.to("meta")
    block_module, width = skeleton.blocks[0], case.config.width
    names = spec.units_matching("blocks.*")

    def block(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(block_module, params, (x,))

    if how == "blocks compiled":
        block = torch.compile(block)

    def written_out(state: mf.ShardState, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        root = mf.unshard(state[""])
        x = F.embedding(tokens, root["emb.weight"])
        for name in names:
            x = block(mf.unshard(state[name]), x)
        x = F.rms_norm(x, (width,), root["norm.weight"])
        return F.cross_entropy(F.linear(x, root["head.weight"]).flatten(0, 1).float(), targets.flatten())

    def bridged(state: mf.ShardState, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mf.functional_call(skeleton, state, (tokens, targets))

    value_and_grad = mf.value_and_grad(bridged if how == "module" else written_out)
    if how == "one graph":
        value_and_grad = mf.compile(value_and_grad)

    def forward_backward() -> torch.Tensor:
        return value_and_grad(state, case.tokens, case.targets)[0]

    held: list[tuple[mf.ShardState, object]] = []

    def step() -> torch.Tensor:
        nonlocal state
        if not held:
            held.append((state, optimizer.init(state)))
        current, opt_state = held.pop()
        state, opt_state, loss = whole(current, opt_state)
        held.append((state, opt_state))
        return loss

    def whole_step(state: mf.ShardState, opt_state: Any) -> tuple[mf.ShardState, Any, torch.Tensor]:
        loss, grads = value_and_grad(state, case.tokens, case.targets)
        state, opt_state = optimizer.step(grads, opt_state, state, donate=True)
        return state, opt_state, loss

    optimizer = mf.optim.adamw(lr=1e-4)
    whole = mf.compile(whole_step) if how == "one graph" else whole_step

    def gradient_norm() -> torch.Tensor:
        grads = value_and_grad(state, case.tokens, case.targets)[1]
        squares = torch.stack([main.float().square().sum() for main in grads.main]).sum()
        dist.all_reduce(squares)
        return squares.sqrt()

    return Contender(forward_backward, step, gradient_norm)


def compute_alone(case: Case, *, compiled: bool) -> Contender:
    """The floor: the same model in the compute dtype on one device, nothing sharded."""
    module = build(case.config, case.device).to(case.compute)
    if compiled:
        for block in module.blocks:
            block.compile()
    parameters = list(module.parameters())

    def forward_backward() -> torch.Tensor:
        loss = module(case.tokens, case.targets)
        torch.autograd.grad(loss, parameters)
        return loss.detach()

    return Contender(forward_backward, None, None)


def wire_alone(case: Case) -> Contender:
    """The other floor: the collectives of one zero3 microbatch, one after the other, through this library."""
    params = mf.params_of(build(case.config, case.device))
    precision = mf.MixedPrecisionPolicy(compute=case.compute, reduce=case.reduce)
    spec = mf.plan(params, case.mesh, mf.zero3(), units=("blocks.*",), precision=precision)
    state = mf.shard(params, spec)
    del params
    from mfsdp_fn.collectives import all_gather, reduce_scatter

    def forward_backward() -> torch.Tensor:
        for group, main, compute in zip(spec.groups, state.main, state.compute, strict=True):
            move = group.gathers[0]
            local = main if compute is None else compute
            all_gather(local, move.sizes, move.axis).wait()
            full = all_gather(local, move.sizes, move.axis).wait()
            reduce_scatter(full.to(case.reduce), move.sizes, move.axis).wait()
        return torch.zeros(())

    return Contender(forward_backward, None, None)


CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    "FSDP2": lambda case: fsdp2(case, compiled=False),
    "FSDP2, blocks compiled": lambda case: fsdp2(case, compiled=True),
    "mfsdp_fn": lambda case: ours(case, how="eager"),
    "mfsdp_fn, cast at gather": lambda case: ours(
        case, how="eager", runtime=mf.RuntimePolicy(store_compute_weights=False)
    ),
    "mfsdp_fn, module": lambda case: ours(case, how="module"),
    "mfsdp_fn, blocks compiled": lambda case: ours(case, how="blocks compiled"),
    "mfsdp_fn, one graph": lambda case: ours(case, how="one graph"),
    "compute alone": lambda case: compute_alone(case, compiled=False),
    "compute alone, blocks compiled": lambda case: compute_alone(case, compiled=True),
    "wire alone": wire_alone,
}
