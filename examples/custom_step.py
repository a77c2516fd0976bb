"""A sharded training step written by hand, to copy from: no module, a dict of tensors, a plain loop.

Run it with `.venv/bin/python examples/custom_step.py`, or on two ranks with
`.venv/bin/torchrun --nproc-per-node 2 examples/custom_step.py`.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_fn as mf


def main() -> None:
    """Everything in a function: meshes and states are gone before the interpreter ends, as their threads must be."""
    if "RANK" in os.environ:  # torchrun started this
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))

    torch.manual_seed(0)  # the same first weights on every rank
    params = {"inp.weight": torch.randn(64, 1), "inp.bias": torch.randn(64), "out.weight": torch.zeros(1, 64)}
    for layer in range(2):
        params |= {f"hidden.{layer}.weight": torch.randn(64, 64) / 8, f"hidden.{layer}.bias": torch.zeros(64)}
    params = {path: tensor.requires_grad_() for path, tensor in params.items()}

    spec = mf.plan(params, mesh, mf.zero3(), units=("hidden.*",))
    state = mf.shard(params, spec)
    optimizer = mf.optim.adamw(lr=3e-3, weight_decay=0.01, overrides={"bias": {"weight_decay": 0.0}})
    opt_state = optimizer.init(state)

    def loss_fn(state: mf.ShardState, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean squared error; every unit is gathered where it is used."""
        root = mf.unshard(state[""])
        h = torch.tanh(F.linear(x, root["inp.weight"], root["inp.bias"]))
        for unit in spec.units_matching("hidden.*"):
            p = mf.unshard(state[unit])
            h = h + torch.tanh(F.linear(h, p["weight"], p["bias"]))
        return F.mse_loss(F.linear(h, root["out.weight"]), y)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    for step in range(201):
        x = torch.rand(256, 1) * 6 - 3
        loss, grads = mf.value_and_grad(loss_fn)(state, x, torch.sin(2 * x))
        grads, norm = mf.optim.clip_by_global_norm(grads, 1.0)
        state, opt_state = optimizer.step(grads, opt_state, state, donate=True)
        if step % 50 == 0:
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(f"step {step:3}  loss {loss.item() / dist.get_world_size():.4f}  gradient norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
