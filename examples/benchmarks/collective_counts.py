"""Collectives and bytes of one training step for each strategy, counted on two CPU ranks.

python examples/benchmarks/collective_counts.py
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import SIZES, build
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_fn as mf

RANKS, MICROBATCHES, CONFIG = 2, 2, SIZES["tiny"]
KINDS = {"all_gather": "gathers", "reduce_scatter": "reduce-scatters", "all_reduce": "all-reduces"}


class Count(TorchDispatchMode):
    """Counts launches and the bytes that this rank's buffer has on the wire's fuller side."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            for start, kind in KINDS.items():
                if func.name().split("::")[1].startswith(start):
                    self.launches[kind] += 1
                    self.bytes[kind] += max(args[0].nbytes, result.nbytes)
        return result


def count(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    module = build(CONFIG, torch.device("cpu"))
    params = mf.params_of(module)
    precision = mf.MixedPrecisionPolicy(compute=torch.bfloat16)
    data = torch.randint(0, CONFIG.vocab, (2, 1, 16))
    opt = mf.optim.adamw(lr=1e-3)
    for name, preset in {"ddp": mf.ddp, "zero1": mf.zero1, "zero2": mf.zero2, "zero3": mf.zero3}.items():
        spec = mf.plan(params, mesh, preset(), units=("blocks.*",), precision=precision)
        state = mf.shard(params, spec)
        opt_state, grads = opt.init(state), None
        loss = mf.value_and_grad(lambda s: mf.functional_call(module, s, (data[0], data[1])))
        with Count() as counted:
            for number in range(MICROBATCHES):
                last = number == MICROBATCHES - 1
                _, grads = loss.with_options(accumulate=grads, is_last_microbatch=last)(state)
            assert grads is not None
            state, opt_state = opt.step(grads, opt_state, state)
        if rank == 0:
            parts = [
                f"{counted.launches[k]} {k} ({counted.bytes[k]:,} B)" for k in KINDS.values() if counted.launches[k]
            ]
            print(f"{name}: {', '.join(parts)}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    units = CONFIG.layers + 1
    numel = sum(p.numel() for p in build(CONFIG, torch.device("meta")).parameters())
    print(f"{units} units, {numel:,} parameters, fp32 main weights and reduction, bf16 compute, {RANKS} ranks, "
          f"{MICROBATCHES} microbatches a step; bytes are those of the whole buffers")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        assert Path(folder).is_dir()
        start_processes(count, (folder,), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
