"""Owner exchanges that pack nothing: the same values as the packed ones, from where they are to where they belong.

On GPUs they are what NCCL gets (tests/test_cuda.py); here Gloo sends one message after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_fn as mf
from mfsdp_fn import collectives, communicators, messages, owner_exchange
from mfsdp_fn.gather_scatter import gather_to_owner, scatter_from_owner
from mfsdp_fn.owner_planning import GroupOwnerLayout, assign_owner_work
from models import mesh_of
from pool import run_ranks
from test_gather_scatter import LAYOUTS, shards_of, values


def served(peers: Any, device: torch.device) -> bool:
    """As on GPUs: not inside a compiler, and only where there are ranks to talk to."""
    return not torch.compiler.is_compiling() and peers.group is not None


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Messages instead of packed exchanges, in a group of their own: the debug mode of these ranks numbers collectives,
    and not all ranks send as many messages."""
    group, launch = dist.new_group(), messages.launch
    assert isinstance(group, dist.ProcessGroup)

    def launched(sends: Any, receives: Any, _: dist.ProcessGroup) -> messages.PendingMessages:
        return launch(sends, receives, group)

    with mock.patch.multiple(collectives, takes_messages=served), mock.patch.multiple(messages, launch=launched):
        yield


def owners_of(name: str, world: int, dtype: torch.dtype) -> tuple[GroupOwnerLayout, list[torch.Tensor]]:
    build, shapes = LAYOUTS[name]
    layout, mesh = build(shapes, world), mesh_of(world)
    owned = assign_owner_work(layout, mesh, [i for i, shape in enumerate(shapes) if len(shape) > 1])
    return GroupOwnerLayout(mesh, layout, owned, dtype=dtype), values(shapes, dtype)


class Copies(TorchDispatchMode):
    """Joins and casts: what packing is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))

    def packed(self) -> bool:
        return any(name in ("aten::cat", "_c10d_functional::all_to_all_single") for name in self.names)


def same(rank: int, world: int) -> None:
    for name in LAYOUTS:
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            owners, fulls = owners_of(name, world, dtype)
            shards = shards_of(fulls, owners)
            before = {index: shard.clone() for index, shard in shards.items()}
            for use_out in (False, True):
                out = {i: torch.zeros_like(fulls[i]) for i in owners.owned} if use_out else None
                with unpacked(), Copies() as copies:
                    gathered = gather_to_owner(shards, owners, out=out)
                assert not copies.packed()
                assert sorted(gathered) == sorted(owners.owned)
                for index, full in gathered.items():
                    assert torch.equal(full, fulls[index])
                    assert out is None or full is out[index]
                results = {index: full + 1 for index, full in gathered.items()}
                there = {i: torch.zeros_like(shard) for i, shard in shards.items()} if use_out else None
                with unpacked(), Copies() as copies:
                    scattered = scatter_from_owner(results, owners, out=there)
                assert not copies.packed()
                for index, shard in scattered.items():
                    assert torch.equal(shard, before[index] + 1)
                    assert torch.equal(shards[index], before[index])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_unpacked_exchanges_give_the_same(world: int) -> None:
    run_ranks(world, same, timeout=120)


def several(rank: int, world: int) -> None:
    """Groups of two dtypes in one exchange; a cast on the way is packed."""
    pairs = [owners_of("padded", world, torch.float32), owners_of("uneven", world, torch.float16)]
    owners = {str(number): layout for number, (layout, _) in enumerate(pairs)}
    shards = {str(number): shards_of(full, layout) for number, (layout, full) in enumerate(pairs)}
    with unpacked(), Copies() as copies:
        gathered = gather_to_owner(shards, owners)
    assert not copies.packed()
    for number, (_, fulls) in enumerate(pairs):
        for index, full in gathered[str(number)].items():
            assert torch.equal(full, fulls[index])
    with unpacked(), Copies() as copies:
        narrow = gather_to_owner(shards, owners, wire_dtype=torch.bfloat16)
    assert copies.packed()
    packed = gather_to_owner(shards, owners, wire_dtype=torch.bfloat16)
    for number in shards:
        for index, full in narrow[number].items():
            assert torch.equal(full, packed[number][index])
    with unpacked(), mock.patch.object(owner_exchange, "_MOST_MESSAGES", 1), Copies() as copies:
        gather_to_owner(shards, owners)
    assert copies.packed()  # too many for one batch


def test_groups_share_a_batch() -> None:
    run_ranks(3, several, timeout=60)


def mapped(rank: int, world: int) -> None:
    torch.manual_seed(0)
    params: dict[str, Any] = {
        f"l.{i}.{n}": torch.randn(5 + i, 3).requires_grad_() for i in range(3) for n in ("a", "b")
    }
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=("l.*",))
    state, owners = mf.shard(params, spec), mf.plan_owners(spec)

    def fn(full: torch.Tensor) -> torch.Tensor:
        return full @ full.T @ full

    with unpacked():
        results = [mf.owner_map(fn)(state, owners) for _ in range(2)]
    for result in results:
        for name, value in params.items():
            assert torch.equal(mf.unshard(result)[name], fn(value.detach()))
    for main, kept in zip(state.main, mf.shard(params, spec).main, strict=True):
        assert torch.equal(main, kept)


@pytest.mark.parametrize("world", [2, 4])
def test_owner_map_without_packing(world: int) -> None:
    run_ranks(world, mapped, timeout=60)


def idle(rank: int, world: int) -> int:
    """A rank without messages; gives the all-reduces of two exchanges."""
    mesh, layout = mesh_of(world), mf.build_for_row_atomic_unpadding([(world, 2), (4, 1)], world)
    holders = [r for r in range(world) if layout.rank_range(r).intersect(layout.tensor_range(1)).size]
    assert len(holders) < world
    owners = GroupOwnerLayout(mesh, layout, {1: holders[0]}, dtype=torch.float32)
    fulls = values([(world, 2), (4, 1)])
    with unpacked(), Copies() as copies:
        communicators._connected.clear()
        for _ in range(2):
            for index, full in gather_to_owner(shards_of(fulls, owners), owners).items():
                assert torch.equal(full, fulls[index])
    return copies.names.count("_c10d_functional::all_reduce")


def test_ranks_without_messages_join_the_first_exchange() -> None:
    # NCCL connects a communicator at its first call, and waits for every rank.
    assert run_ranks(4, idle, timeout=60) == [1] * 4


def failing(rank: int, world: int) -> None:
    params: dict[str, Any] = {f"l.{i}.w": torch.randn(7, 3).requires_grad_() for i in range(4)}
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=("l.*",))
    state, owners = mf.shard(params, spec), mf.plan_owners(spec)
    assert {owner for layout in owners.values() for owner in layout.tensor_to_owner.values()} == set(range(world))

    def refuse(full: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no")

    launched: list[messages.PendingMessages] = []
    waited: list[messages.PendingMessages] = []
    wait = messages.PendingMessages.wait

    def watched(self: messages.PendingMessages) -> None:
        waited.append(self)
        wait(self)

    with unpacked(), mock.patch.object(messages.PendingMessages, "wait", watched):
        send = collectives.send_and_receive

        def kept(*args: Any) -> messages.PendingMessages:
            launched.append(send(*args))
            return launched[-1]

        with mock.patch.object(collectives, "send_and_receive", kept), pytest.raises(ArithmeticError):
            mf.owner_map(refuse)(state, owners)
        assert launched
        assert {id(one) for one in launched} == {id(one) for one in waited}


def test_nothing_is_left_under_way() -> None:
    run_ranks(2, failing, timeout=60)
