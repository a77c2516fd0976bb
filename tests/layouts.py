"""Every layout that a plan can have, and a model with every shape that could go wrong in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import mfsdp_fn as mf
from models import EXACT, VOCAB, Batch, Params, block, integers, mesh_of

LAYOUTS = ("padded", "unpadded", "auto", "block 1", "block 2", "block 4", "tensor")
WIDTH = 4
UNITS = ("blocks.*",)

_R, _P, _S = mf.Replicate(), mf.Partial(), mf.RowAtomic()
ONE_AXIS = {"zero1": mf.zero1(), "zero2": mf.zero2(), "zero3": mf.zero3()}
TWO_AXES = {
    "hsdp": mf.hsdp(),
    "hfsdp": mf.hfsdp(),
    "zero1 outside, zero2 inside": mf.Placements((_R, _R), (_P, _S), (_S, _S)),
    "zero3 over both": mf.Placements((_S, _S), (_S, _S), (_S, _S)),
    "ddp outside, zero1 inside": mf.Placements((_R, _R), (_P, _P), (_R, _S)),
}


def with_kind(placements: mf.Placements, kind: mf.RowAtomic | mf.TensorAtomic) -> mf.Placements:
    """`placements` with another way of sharding."""
    return mf.Placements(
        *(
            tuple(kind if p.is_sharded else p for p in per_axis)
            for per_axis in (placements.parameter, placements.gradient, placements.optimizer)
        )
    )


def owners_of(params: Mapping[str, torch.Tensor], ranks: int) -> dict[str, int]:
    """Round robin from the second rank on; the last rank owns nothing."""
    return {path: (number + 1) % max(1, ranks - 1) for number, path in enumerate(params)}


def planned(layout: str, placements: mf.Placements, params: Params, *shape: int, **options: Any) -> mf.ShardSpec:
    """A plan with one of `LAYOUTS`."""
    options = {"units": UNITS, "precision": EXACT} | options
    if layout == "tensor":
        placements = with_kind(placements, mf.TensorAtomic())
        ranks = 1
        for size, placement in zip(shape, placements.optimizer, strict=True):
            ranks *= size if placement.is_sharded else 1
        options["owners"] = owners_of(params, ranks)
        tied = options["owners"].keys() & {"blocks.0.tied"}
        for path in tied:
            del options["owners"][path]
    elif layout in ("block 1", "block 4"):  # said by placement
        placements = with_kind(placements, mf.BlockAtomic(int(layout[-1])))
    elif layout == "block 2":  # said by option
        options["block_size"] = 2
    else:
        options["shard_layout"] = layout
    return mf.plan(params, mesh_of(*shape), placements, **options)


def rich(dtype: torch.dtype = torch.float64) -> Params:
    """0-D, zero-size, tied, frozen and odd-sized tensors, in the root and in units."""

    def made(*shape: int, seed: int) -> torch.Tensor:
        return integers(*shape, seed=seed, dtype=dtype)

    params = {
        "embed": made(VOCAB, WIDTH, seed=1),
        "scale": made(seed=2),
        "empty": made(0, WIDTH, seed=3),
        "frozen": made(WIDTH, WIDTH, seed=4),
        "blocks.0.w": made(WIDTH, WIDTH, seed=10),
        "blocks.0.b": made(WIDTH, seed=11),
        "blocks.1.hole": made(3, 0, seed=12),
        "blocks.1.w": made(WIDTH, WIDTH, seed=13),
        "blocks.1.b": made(WIDTH, seed=14),
        "blocks.1.scale": made(seed=15),
        "blocks.2.w": made(WIDTH, WIDTH, seed=16),
        "blocks.2.wide": made(7, WIDTH, seed=17),
        "blocks.2.b": made(WIDTH, seed=18),
        "blocks.2.frozen": made(1, WIDTH, seed=19),
        "blocks.3.empty": made(0, 2, seed=20),  # a unit that holds nothing at all
    }
    params = {name: value.requires_grad_("frozen" not in name) for name, value in params.items()}
    params["blocks.0.tied"] = params["blocks.0.w"]
    return params


def rich_loss(
    root: Mapping[str, torch.Tensor],
    unit: Callable[[int], Mapping[str, torch.Tensor]],
    batch: Batch,
    factor: float,
    call: Callable[..., torch.Tensor] = block,
) -> torch.Tensor:
    """Linear in every tensor, so that three steps round nothing. `unit` gives a block's parameters, `call` runs it."""
    tokens, target = batch
    e = root["embed"][tokens]
    x = e @ root["frozen"]
    for number in range(3):
        p = unit(number)
        x = call({"w": p["w"], "b": p["b"]}, e, x)
        if number == 0:
            x = x + e @ p["tied"].T
        if number == 1:
            x = x + p["scale"] * e + p["hole"].sum()
        if number == 2:
            x = x + p["wide"].sum(0) + p["frozen"] * e
    return ((x * target).sum() + root["scale"] * target.sum() + root["empty"].sum() + unit(3)["empty"].sum()) * factor


def rich_sharded(
    state: mf.ShardState, batch: Batch, factor: float, call: Callable[..., torch.Tensor] = block
) -> torch.Tensor:
    """`rich_loss` of a state, a unit gathered where it is used."""
    return rich_loss(mf.unshard(state[""]), lambda i: mf.unshard(state[f"blocks.{i}"]), batch, factor, call)


def rich_plain(params: Mapping[str, torch.Tensor], batch: Batch, factor: float = 1.0) -> torch.Tensor:
    """The same, unsharded."""
    whole = {**params, "blocks.0.tied": params["blocks.0.w"]}

    def unit(number: int) -> dict[str, torch.Tensor]:
        start = f"blocks.{number}."
        return {name.removeprefix(start): value for name, value in whole.items() if name.startswith(start)}

    return rich_loss(whole, unit, batch, factor)
