"""Uneven segments on the wire: who is given lists, and that lists and padding give the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mfsdp_fn import collectives, communicators, ragged
from mfsdp_fn.testing import single_rank
from models import mesh_of
from pool import run_ranks


def lists(rank: int, world: int) -> None:
    """Gloo takes lists of even segments: the same calls, and the same waiting, as NCCL's uneven ones."""
    group = mesh_of(world).get_group(0)
    local = torch.arange(3.0) + 10 * rank
    flat, work = ragged.gather(local, [3] * world, group)
    pending = collectives.PendingCollective(flat, None, local.dtype, work, local)
    whole = torch.cat([torch.arange(3.0) + 10 * r for r in range(world)])
    assert pending.wait() is flat and torch.equal(flat, whole)
    as_bytes = collectives.PendingCollective(flat.view(torch.uint8), None, local.dtype, work, local)
    assert torch.equal(as_bytes.wait(), whole)
    assert collectives._ragged_group(local, mesh_of(world).get_group(0).group_name) is None


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_work_is_waited_for(world: int) -> None:
    run_ranks(world, lists)


def padded(rank: int, world: int) -> None:
    (axis,) = communicators.axes_of(mesh_of(world))
    for sizes in ([0] * (world - 1) + [5], list(range(1, world + 1)), [2] * world):
        whole = torch.arange(float(sum(sizes)))
        mine = whole.split(sizes)[rank]
        assert torch.equal(collectives.all_gather(mine, sizes, axis).wait(), whole)
        part = collectives.reduce_scatter(whole * (rank + 1), sizes, axis).wait()
        assert torch.equal(part, mine * (world * (world + 1) // 2))
        for dtype in (torch.bool, torch.float8_e4m3fn):  # as bytes
            assert collectives.all_gather(mine.to(dtype), sizes, axis).wait().dtype == dtype


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gloo_pads(world: int) -> None:
    run_ranks(world, padded)


def test_padding_comes_and_goes() -> None:
    flat = torch.arange(1.0, 6.0)
    padded = ragged.with_padding(flat, [2, 0, 3], 3)
    assert padded.tolist() == [1, 2, 0, 0, 0, 0, 3, 4, 5]
    assert torch.equal(ragged.without_padding(padded, [2, 0, 3]), flat)


@pytest.mark.parametrize(
    ("device", "backends", "level", "taken"),
    [
        ("cuda", "cuda:nccl", "OFF", True),
        ("cuda", "cpu:gloo,cuda:nccl", "INFO", True),
        ("cuda", "cpu:gloo,cuda:gloo", "OFF", False),
        ("cuda", "cuda:nccl", "DETAIL", False),  # its check takes shapes that differ for a fault
        ("cpu", "cpu:gloo,cuda:nccl", "OFF", False),
    ],
)
def test_nccl_takes_lists(monkeypatch: Any, device: str, backends: str, level: str, taken: bool) -> None:
    with single_rank() as mesh:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
        monkeypatch.setattr(dist, "get_debug_level", lambda: getattr(dist.DebugLevel, level))  # pyright: ignore[reportPrivateImportUsage]
        assert ragged.takes_lists(mesh.get_group(0), torch.device(device)) is taken


def test_backends_are_named_by_device() -> None:
    """What `takes_lists` takes apart."""
    with single_rank() as mesh:
        config = dist.get_backend_config(mesh.get_group(0))
        assert dict(part.split(":") for part in config.split(","))["cpu"] == "gloo"
