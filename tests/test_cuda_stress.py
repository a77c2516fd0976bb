"""Two hundred steps with ranks and streams held up at random equal the undisturbed run, bit for bit.

A delay is busy work on the compute stream ahead of a collective, of another length on each rank: the transfer then
starts late on that rank, so that the other's stays open on its communication stream until the peer comes. What runs on
NCCL's own streams can't be held up from outside, but this is how it looks to whoever waits for it. Further delays come
between products, so that compute is now ahead of communication and now behind. A buffer that is reused too early, a
wait that is missing or a reduction out of order then shows in the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_fn as mf
from models import EXACT, accumulated, batch_of, bilinear, plain_training, sgd, sharded_loss
from test_cuda import GPUS, mesh, on_device, on_gpus

pytestmark = pytest.mark.cuda

STEPS, MICROBATCHES = 200, 2
BF16 = mf.MixedPrecisionPolicy(compute=torch.bfloat16, reduce=torch.bfloat16)


class Delay(TorchDispatchMode):
    """Busy work of random length before collectives and products, drawn anew for each rank and each seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.busy = torch.ones(256, 256, device="cuda")
        self.delays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        most = 40 if "c10d" in name else 8 if name.startswith(("aten::mm", "aten::addmm")) else 0
        if most:
            turns = int(torch.randint(0, most, (), generator=self.generator))
            self.delays += turns > 0
            for _ in range(turns):
                torch.mm(self.busy, self.busy)
        return func(*args, **(kwargs or {}))


def trained(rank: int, world: int, steps: int, precision: mf.MixedPrecisionPolicy, dtype: torch.dtype) -> Any:
    """Weights after `steps` of accumulation, from fresh ones."""
    params = bilinear(dtype=dtype)
    spec = mf.plan(params, mesh(world), mf.zero3(), units=("blocks.*",), precision=precision)
    state = mf.shard(params, spec)
    # A small rate, at which two hundred steps neither overflow nor round to nothing.
    for step in range(steps):
        batches = [on_device(batch_of(step, micro, rank)) for micro in range(MICROBATCHES)]
        batches = [(tokens, target.to(precision.compute or dtype)) for tokens, target in batches]
        state = sgd(state, accumulated(sharded_loss, state, batches, float(world)), lr=2.0**-10)
    return state


@contextlib.contextmanager
def delays(seed: int) -> Iterator[None]:
    with Delay(seed) as delay:
        yield
    assert delay.delays > STEPS  # it did something


def stress(rank: int, world: int, seed: int) -> None:
    for precision, dtype in ((EXACT, torch.float64), (BF16, torch.float32)):
        calm = trained(rank, world, STEPS, precision, dtype)
        with delays(100 * seed + rank):
            held_up = trained(rank, world, STEPS, precision, dtype)
        for before, after in zip(calm.main, held_up.main, strict=True):
            assert before.isfinite().all()
            assert torch.equal(before, after), (precision, seed)
    # And it is training: with exact data the first steps are those of the unsharded model.
    exact = bilinear()
    state = mf.shard(exact, mf.plan(exact, mesh(world), mf.zero3(), units=("blocks.*",), precision=EXACT))
    with Delay(seed * 1000 + rank):
        for step in range(3):
            batches = [on_device(batch_of(step, micro, rank)) for micro in range(MICROBATCHES)]
            state = sgd(state, accumulated(sharded_loss, state, batches, float(world)))
    got = {name: value.cpu() for name, value in mf.unshard(state).items()}
    for name, value in plain_training(exact, world, steps=3, micros=MICROBATCHES).items():
        assert torch.equal(got[name], value.detach()), name


@pytest.mark.parametrize("world", GPUS)
def test_delays_change_no_bit(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, stress, 1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("world", GPUS)
def test_more_delays_change_no_bit(tmp_path: Any, world: int, seed: int) -> None:
    on_gpus(tmp_path, world, stress, seed)
