"""Plans whose shards are whole tensors, and placements that can't be."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import mfsdp_fn as mf

R, P, S, T = mf.Replicate(), mf.Partial(), mf.RowAtomic(), mf.TensorAtomic()
WHOLE = mf.Placements((T,), (T,), (T,))


def params() -> dict[str, torch.Tensor]:
    found = {"a": torch.ones(2, 2, requires_grad=True), "b": torch.ones(3, requires_grad=True), "f": torch.ones(1)}
    found["tied"] = found["a"]
    return found


def plan(placements: Any, shape: tuple[int, ...] = (2,), rank: int = 0, **options: Any) -> mf.ShardSpec:
    mesh = mf.AbstractMesh(shape, ("outer", "inner")[-len(shape) :], rank)
    return mf.plan(params(), mesh, placements, **options)


def held(placements: mf.Placements, shape: tuple[int, ...], owners: dict[str, int]) -> list[list[str]]:
    """Paths of what each rank of the mesh holds."""
    found = []
    for rank in range(torch.Size(shape).numel()):
        spec = plan(placements, shape, rank, owners=owners)
        found.append([g.paths[index] for g in spec.groups for index, _, _ in g.main_pieces])
    return found


def test_an_owner_is_a_rank_of_the_mesh() -> None:
    owners = {"a": 1, "b": 2, "f": 2}
    assert held(WHOLE, (3,), owners) == [[], ["a"], ["b", "f"]]
    # Over two axes too, although shards count the inner axis first.
    both = mf.Placements((R, T), (P, T), (T, T))
    assert held(both, (2, 2), owners) == [[], ["a"], ["b", "f"], []]
    # Over the sharded axis alone where the other one replicates.
    inner = mf.Placements((R, T), (P, T), (R, T))
    assert held(inner, (2, 2), {"a": 1, "b": 0, "f": 1}) == [["b"], ["a", "f"]] * 2


def test_owners_may_own_nothing_and_are_part_of_the_digest() -> None:
    spec = plan(WHOLE, (4,), owners={"a": 3, "b": 3, "f": 3})
    assert [group.layout.rank_to_offset for group in spec.groups] == [(0, 0, 0, 0, 7), (0, 0, 0, 0, 1)]
    assert spec.digest() != plan(WHOLE, (4,), owners={"a": 2, "b": 3, "f": 3}).digest()
    # A tied tensor by any of its paths, or by several that agree.
    for owners in ({"tied": 3, "b": 3, "f": 3}, {"tied": 3, "a": 3, "b": 3, "f": 3}):
        assert plan(WHOLE, (4,), owners=owners).digest() == spec.digest()


ALL = {"a": 0, "b": 1, "f": 0}


@pytest.mark.parametrize(
    ("owners", "text"),
    [
        (None, r"`owners` got no owner for 'a' \(and 2 more\); expected a rank in \[0, 2\) for every tensor; add it"),
        ({"a": 0, "f": 1}, r"`owners` got no owner for 'b'; expected"),
        (ALL | {"c": 0}, r"`owners` got 'c'; expected paths of planned tensors; see spec.leaves"),
        (ALL | {"b": 2}, r"`owners` got 2 for 'b'; expected a rank in \[0, 2\); count the ranks of the sharded axes"),
        (ALL | {"b": -1}, r"`owners` got -1 for 'b'"),
        (ALL | {"b": True}, r"`owners` got True for 'b'"),
        (ALL | {"tied": 1}, r"`owners` got 1 for 'tied' and another for 'a'; expected one owner for a tied tensor"),
        ([0, 1, 0], r"`owners` got \[0, 1, 0\]; expected a dict \{path: rank\}"),
    ],
)
def test_owners_that_do_not_fit_are_refused(owners: Any, text: str) -> None:
    with pytest.raises(mf.PlanError, match=text):
        plan(WHOLE, owners=owners)


@pytest.mark.parametrize(
    ("placements", "shape", "options", "text"),
    [
        # The seed's groups have one layout for all buffers.
        (mf.Placements((S,), (T,), (T,)), (2,), {}, r"`placements` got .* on axis 0; expected one kind of sharding"),
        (mf.Placements((S,), (S,), (mf.BlockAtomic(2),)), (2,), {}, r"expected one kind of sharding an axis"),
        (mf.Placements((R, T), (P, T), (S, T)), (2, 2), {}, r"expected TensorAtomic on all sharded axes or on none"),
        (mf.zero3(), (2,), {"owners": ALL}, r"`owners` got owners; expected None without a TensorAtomic placement"),
        (
            WHOLE,
            (2,),
            {"owners": ALL, "block_size": 2},
            r"`block_size` got 2; expected 1 with the optimizer placements",
        ),
        (mf.ddp(), (2,), {"block_size": 2}, r"`block_size` got 2; expected 1 with the optimizer placements"),
        (
            mf.Placements(*[(mf.BlockAtomic(0),)] * 3),
            (2,),
            {},
            r"`placements.parameter` got BlockAtomic\(block_size=0\) on axis 0; expected a positive block size",
        ),
        (
            mf.Placements(*[cast(Any, (mf.RowAtomic,))] * 3),
            (2,),
            {},
            r"`placements.parameter` got RowAtomic on axis 0; expected a placement; write Replicate\(\)",
        ),
        (
            mf.Placements(*[cast(Any, [S])] * 3),
            (2,),
            {},
            r"`placements.parameter` got \[RowAtomic\(\)\]; expected a tuple with one placement a mesh axis",
        ),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    placements: mf.Placements, shape: tuple[int, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(mf.PlanError, match=text):
        plan(placements, shape, **options)
