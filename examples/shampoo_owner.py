"""Shampoo through `owner_map`: each matrix' preconditioners live with its owner, gradients and updates travel.

    python examples/shampoo_owner.py

starts two local Gloo processes and trains a small network. Source: Gupta, Koren and Singer, "Shampoo" (2018).
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

import mfsdp_fn as mf
from mfsdp_fn.owner_compute import owner_map
from mfsdp_fn.owner_planning import GroupOwnerLayout, plan_owners

RANKS, STEPS, LR = 2, 60, 0.1


def inverse_root(matrix: torch.Tensor, root: int = 4) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** (-1 / root)) @ vectors.T


class Shampoo:
    """Preconditioners are kept whole, at the owner only: `statistics` has those of the matrices this rank owns."""

    def __init__(self) -> None:
        self.statistics: list[list[torch.Tensor]] = []
        self.next = 0

    def precondition(self, grad: torch.Tensor) -> torch.Tensor:
        # A rank's matrices come in the same order every step.
        if self.next == len(self.statistics):
            self.statistics.append([1e-4 * torch.eye(n) for n in grad.shape])
        left, right = self.statistics[self.next]
        self.next += 1
        left += grad @ grad.T
        right += grad.T @ grad
        return inverse_root(left) @ grad @ inverse_root(right)

    def __call__(self, grads: mf.ShardState, owners: dict[mf.GroupSpec, GroupOwnerLayout]) -> mf.ShardState:
        self.next = 0
        return owner_map(self.precondition)(grads, owners)


def loss_fn(state: mf.ShardState, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p = mf.unshard(state)
    return ((torch.tanh(x @ p["a"].T + p["b"]) @ p["c"].T - y) ** 2).mean()


def train(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    params = {"a": 0.3 * torch.randn(32, 8), "b": torch.zeros(32), "c": 0.3 * torch.randn(3, 32)}
    x, target = torch.randn(256, 8), torch.randn(8, 3)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    spec = mf.plan({name: value.requires_grad_() for name, value in params.items()}, mesh, mf.zero3())
    state, owners, shampoo = mf.shard(params, spec), plan_owners(spec), Shampoo()
    mine, loss = slice(rank * 128, (rank + 1) * 128), torch.zeros(())
    for step in range(STEPS):
        loss, grads = mf.value_and_grad(loss_fn)(state, x[mine], torch.sin(x[mine] @ target))
        updates = shampoo(grads, owners)
        state = mf.sync_model_weights(mf.tree_map(lambda w, u: w - LR * u, state, updates))
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3} loss {loss.item():.4f}")
    print(f"rank {rank} owns {[owner for o in owners.values() for owner in o.owned]}; loss {loss.item():.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (os.path.join(folder, "store"),), RANKS)
