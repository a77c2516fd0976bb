"""The peers, each as its documentation has it, and compute alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from case import LR, Blocks, Case, Contender, NotHereError, norms_of
from model import Model, build
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def _adamw(module: nn.Module, case: Case) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LR, fused=case.device.type == "cuda")


@dataclasses.dataclass
class _Trained:
    """Weights that contenders share, and their optimizer, which has no state before its first step."""

    blocks: Blocks
    module: nn.Module
    optimizer: torch.optim.Optimizer


def _make_fsdp2(case: Case) -> _Trained:
    module = build(case.config, case.device)
    blocks = Blocks(module)
    policy = MixedPrecisionPolicy(param_dtype=case.compute, reduce_dtype=case.reduce)
    # As torchtitan groups them; by its default the last group is not gathered again in backward.
    for part in (module.emb, *module.blocks):
        fully_shard(part, mesh=case.mesh, mp_policy=policy)
    fully_shard([module.norm, module.head], mesh=case.mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(module, mesh=case.mesh, mp_policy=policy)
    return _Trained(blocks, module, _adamw(module, case))


def _set_prefetch(module: Model, ahead: int) -> None:
    blocks: list[FSDPModule] = [block for block in module.blocks if isinstance(block, FSDPModule)]
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(number - ahead, 0) : number][::-1])


def fsdp2(case: Case, *, compiled: bool = False, prefetch: bool = False) -> Contender:
    """PyTorch FSDP2: a group a block, the embedding, norm with head; `prefetch`: two blocks ahead, set explicitly."""
    made = case.once("FSDP2", lambda: _make_fsdp2(case))

    def ready() -> nn.Module:
        module = made.blocks.use(compiled=compiled)
        if case.shared.get("FSDP2 prefetch", False) is not prefetch:
            _set_prefetch(module, 2 if prefetch else 0)
            case.shared["FSDP2 prefetch"] = prefetch
        return module

    def forward_backward() -> torch.Tensor:
        loss = ready()(case.tokens, case.targets)
        loss.backward()
        made.optimizer.zero_grad()
        return loss.detach()

    def step() -> torch.Tensor:
        loss = ready()(case.tokens, case.targets)
        loss.backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        return loss.detach()

    def norms() -> torch.Tensor:
        module = ready()
        module(case.tokens, case.targets).backward()
        parameters = dict(module.named_parameters())
        parts = [(name, p.grad.to_local()) for name, p in parameters.items() if p.grad is not None]  # type: ignore[attr-defined]
        found = norms_of(parts, parameters, sharded=True)
        made.optimizer.zero_grad()
        return found

    return Contender(forward_backward, step, norms)


def _make_ddp(case: Case) -> _Trained:
    if case.reduce != torch.float32 and case.device.type != "cuda":
        raise NotHereError("its reduction in bf16 needs CUDA")
    module = build(case.config, case.device)
    ids = [case.device.index] if case.device.type == "cuda" else None
    wrapped = DistributedDataParallel(module, ids, process_group=case.mesh.get_group(), gradient_as_bucket_view=True)
    if case.reduce == torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        wrapped.register_comm_hook(None, bf16_compress_hook)
    return _Trained(Blocks(module), wrapped, _adamw(module, case))


def ddp(case: Case) -> Contender:
    """DistributedDataParallel: fp32 weights, bf16 autocast, gradients as views of its buckets.

    Reduction in bf16 is its documented `bf16_compress_hook`. Autocast keeps norms and the residual stream in fp32, so
    its gradients differ more from the sharded forms' than those do among themselves.
    """
    made = case.once("DDP", lambda: _make_ddp(case))

    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        with torch.autocast(case.device.type, dtype=case.compute):
            yield

    def loss_and_backward() -> torch.Tensor:
        with autocast():
            loss = made.module(case.tokens, case.targets)
        loss.backward()
        return loss.detach()

    def forward_backward() -> torch.Tensor:
        loss = loss_and_backward()
        made.optimizer.zero_grad()
        return loss

    def step() -> torch.Tensor:
        loss = loss_and_backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        return loss

    def norms() -> torch.Tensor:
        loss_and_backward()
        parameters = dict(made.blocks.module.named_parameters())
        parts = [(name, p.grad) for name, p in parameters.items() if p.grad is not None]
        found = norms_of(parts, parameters, sharded=False)
        made.optimizer.zero_grad()
        return found

    return Contender(forward_backward, step, norms)


def compute_alone(case: Case, *, compiled: bool = False) -> Contender:
    """A floor: the same model in the compute dtype on one device, nothing sharded, nothing reduced."""
    blocks = case.once("compute", lambda: Blocks(build(case.config, case.device).to(case.compute)))
    parameters = list(blocks.module.parameters())

    def forward_backward() -> torch.Tensor:
        loss = blocks.use(compiled=compiled)(case.tokens, case.targets)
        torch.autograd.grad(loss, parameters)
        return loss.detach()

    return Contender(forward_backward)
