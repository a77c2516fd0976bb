"""Queries on layouts, and the check that a layout is sound. Integers only: no process groups."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import math
import pathlib
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_fn import layout as layout_module
from mfsdp_fn.errors import LayoutError
from mfsdp_fn.layout import GlobalLayout, Range, row_numel, validate_row_atomic
from mfsdp_fn.layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
)

SEED_SHAPES = [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)]


def seed_layout() -> GlobalLayout:
    return build_for_row_atomic(SEED_SHAPES, 5)


@st.composite
def layouts(draw: st.DrawFn) -> GlobalLayout:
    dims = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    shapes = draw(st.lists(dims, max_size=10))
    dp_size = draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["padded", "unpadded", "owned"]))
    if kind == "padded":
        return build_for_row_atomic(shapes, dp_size, block_size=draw(st.integers(1, 3)))
    if kind == "unpadded":
        return build_for_row_atomic_unpadding(shapes, dp_size, block_size=draw(st.integers(1, 3)))
    owners = draw(st.lists(st.integers(0, dp_size - 1), min_size=len(shapes), max_size=len(shapes)))
    return build_for_tensor_atomic(shapes, dp_size, tensor_owners=owners)


def test_doctests_pass() -> None:
    result = doctest.testmod(layout_module)
    assert result.attempted
    assert not result.failed


PURE = ["ranges", "layout", "chunk_packing", "layout_builder", "packing_search", "ragged_boundaries", "layout_choice"]


@pytest.mark.parametrize("name", [f"{name}.py" for name in PURE])
def test_source_imports_no_torch_distributed(name: str) -> None:
    assert layout_module.__file__
    source = (pathlib.Path(layout_module.__file__).parent / name).read_text()
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not any("distributed" in module for module in imported)
    assert "distributed" not in {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_range() -> None:
    assert Range(2, 5).size == len(Range(2, 5)) == 3
    assert Range(2, 5).intersect(Range(4, 9)) == Range(4, 5)
    assert Range(2, 5).intersect(Range(7, 9)) == Range(7, 7)
    assert Range(7, 9).intersect(Range(2, 5)).size == 0
    assert Range(3, 3), "an empty range is not a missing one"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Range(0, 1).start = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_row_numel() -> None:
    assert [row_numel(s) for s in [(), (5,), (5, 3), (5, 3, 2), (0, 3), (3, 0)]] == [1, 1, 3, 6, 3, 0]


def test_layout_is_hashable_comparable_frozen_and_picklable() -> None:
    one, two = seed_layout(), seed_layout()
    one.local_tensors(0)  # what a layout remembers about itself is no part of its value
    assert one == two
    assert hash(one) == hash(two)
    assert one != build_for_row_atomic(SEED_SHAPES, 6)
    assert pickle.loads(pickle.dumps(one)) == two
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.size = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_queries_on_the_seed_layout() -> None:
    layout = seed_layout()
    assert layout.dp_size == 5
    assert layout.is_even
    assert layout.rank_range(2) == Range(24, 36)
    assert layout.tensor_range(2) == Range(32, 48)
    assert layout.local_range(1, 2) == Range(24, 28)
    assert layout.local_range(1, 4).size == 0
    assert [layout.local_shape(1, rank) for rank in range(5)] == [(0, 4), (3, 4), (1, 4), (0, 4), (0, 4)]
    assert [layout.local_tensors(rank) for rank in range(5)] == [(0,), (1,), (1, 3, 2), (2,), (4,)]
    assert [layout.ranks_of(i) for i in range(5)] == [
        range(0, 1),
        range(1, 3),
        range(2, 4),
        range(2, 3),
        range(4, 5),
    ]
    assert [layout.padding(rank) for rank in range(5)] == [(), (), (Range(30, 32),), (), (Range(54, 60),)]


def test_local_shape_of_0d_and_empty_tensors() -> None:
    layout = build_for_row_atomic([(), (0, 4), (3, 0)], 2)
    assert [layout.local_shape(0, rank) for rank in (0, 1)] == [torch.Size([]), torch.Size([0])]
    assert [layout.local_shape(1, rank) for rank in (0, 1)] == [torch.Size([0, 4])] * 2
    assert [layout.local_shape(2, rank) for rank in (0, 1)] == [torch.Size([0, 0])] * 2
    assert layout.ranks_of(1) == layout.ranks_of(2) == range(0)
    assert layout.local_tensors(0) == (0,)
    assert layout.local_tensors(1) == ()
    assert layout.padding(1) == (Range(1, 2),)


def test_ranks_of_spans_an_empty_segment_between_holders() -> None:
    layout = build_for_row_atomic_unpadding([(2, 10)], 4)
    assert layout.rank_to_offset == (0, 0, 10, 10, 20)
    assert layout.ranks_of(0) == range(1, 4)
    assert [layout.local_shape(0, rank)[0] for rank in layout.ranks_of(0)] == [1, 0, 1]
    assert not layout.is_even


def test_coarsen() -> None:
    layout = build_for_row_atomic(SEED_SHAPES, 6)
    coarse = layout.coarsen(3)
    assert coarse.rank_to_offset == (0, 36, 72)
    assert dataclasses.replace(coarse, rank_to_offset=layout.rank_to_offset) == layout
    assert layout.coarsen(1) == layout
    assert layout.coarsen(6).rank_to_offset == (0, 72)


@given(layouts())
def test_queries_agree_with_each_other(layout: GlobalLayout) -> None:
    count, ranks = len(layout.tensor_shapes), range(layout.dp_size)
    holders = [[r for r in ranks if layout.local_range(i, r).size] for i in range(count)]
    for index in range(count):
        span, of = layout.tensor_range(index), layout.ranks_of(index)
        assert sum(layout.local_range(index, r).size for r in ranks) == span.size
        assert set(holders[index]) <= set(of)
        assert ([of[0], of[-1]] if of else []) == [*holders[index][:1], *holders[index][-1:]]
        assert all(r in holders[index] or not layout.rank_range(r).size for r in of)
        for rank in ranks:
            local = layout.local_shape(index, rank)
            assert local.numel() == layout.local_range(index, rank).size
            assert local[1:] == layout.tensor_shapes[index][1:]
    for rank in ranks:
        local = layout.local_tensors(rank)
        assert sorted(local) == [i for i in range(count) if rank in holders[i]]
        assert [layout.tensor_to_offset[i] for i in local] == sorted(layout.tensor_to_offset[i] for i in local)
        covered = [e for i in local for e in range(*dataclasses.astuple(layout.local_range(i, rank)))]
        gaps = layout.padding(rank)
        assert all(gap.size for gap in gaps)
        covered += [e for gap in gaps for e in range(gap.start, gap.stop)]
        segment = layout.rank_range(rank)
        assert sorted(covered) == list(range(segment.start, segment.stop))
    assert layout.is_even == (len({layout.rank_range(r).size for r in ranks}) <= 1)


@given(layouts(), st.integers(1, 12))
def test_coarsen_merges_segments(layout: GlobalLayout, k: int) -> None:
    k = math.gcd(k, layout.dp_size)
    coarse = layout.coarsen(k)
    assert coarse.dp_size * k == layout.dp_size
    for rank in range(coarse.dp_size):
        parts = [layout.rank_range(rank * k + j) for j in range(k)]
        assert coarse.rank_range(rank) == Range(parts[0].start, parts[-1].stop)
    validate_row_atomic(coarse)


@pytest.mark.parametrize("k", [0, -1, 2, 10, True, 5.0])
def test_coarsen_refuses(k: int) -> None:
    with pytest.raises(LayoutError) as error:
        seed_layout().coarsen(k)
    assert str(error.value) == (
        f"`k` got {k!r}; expected a positive integer that divides the layout's 5 ranks; "
        "pass the size of the mesh axis whose ranks' segments are to be merged."
    )


@pytest.mark.parametrize("rank", [-1, 5])
def test_unknown_rank_is_refused(rank: int) -> None:
    layout = seed_layout()
    for ask in (
        layout.rank_range,
        layout.local_tensors,
        layout.padding,
        lambda r: layout.local_shape(0, r),
        lambda r: layout.local_range(0, r),
    ):
        with pytest.raises(LayoutError) as error:
            ask(rank)
        assert str(error.value) == (
            f"`rank` got {rank}; expected a rank of this layout, 0 <= rank < 5; "
            "pass the rank inside the mesh axis that the layout is for, not the global rank."
        )


@pytest.mark.parametrize("index", [-1, 5])
def test_unknown_tensor_is_refused(index: int) -> None:
    layout = seed_layout()
    for ask in (
        layout.tensor_range,
        layout.ranks_of,
        lambda i: layout.local_shape(i, 0),
        lambda i: layout.local_range(i, 0),
    ):
        with pytest.raises(LayoutError) as error:
            ask(index)
        assert str(error.value) == (
            f"`index` got {index}; expected a tensor of this layout, 0 <= index < 5; "
            "pass the tensor's position in the shapes that the layout was built from."
        )


MEND = "make layouts with the functions of layout_builder."


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"tensor_to_offset": (0, 12)},
            "`layout` got 2 offsets for 5 tensors; expected one offset a tensor; ",
        ),
        (
            {"rank_to_offset": (0, 12, 24, 36, 48)},
            "`layout` got rank_to_offset with 5 entries that don't tile the buffer; "
            "expected ascending offsets, one more than ranks, from 0 to the size 60; ",
        ),
        (
            {"rank_to_offset": (0, 24, 12, 60)},
            "`layout` got rank_to_offset with 4 entries that don't tile the buffer; "
            "expected ascending offsets, one more than ranks, from 0 to the size 60; ",
        ),
        (
            {"rank_to_offset": (12, 60)},
            "`layout` got rank_to_offset with 2 entries that don't tile the buffer; "
            "expected ascending offsets, one more than ranks, from 0 to the size 60; ",
        ),
        (
            {"size": 0, "rank_to_offset": (0,)},
            "`layout` got rank_to_offset with 1 entries that don't tile the buffer; "
            "expected ascending offsets, one more than ranks, from 0 to the size 0; ",
        ),
        (
            {"tensor_to_offset": (0, 12, 32, 28, 56)},
            "`layout` got tensor 4 at [56, 62); expected every tensor inside [0, 60); ",
        ),
        (
            {"tensor_to_offset": (-1, 12, 32, 28, 48)},
            "`layout` got tensor 0 at [-1, 11); expected every tensor inside [0, 60); ",
        ),
        (
            {"tensor_to_offset": (0, 12, 32, 31, 48)},
            "`layout` got tensors 3 and 2, both with element 32; expected tensors that don't overlap; ",
        ),
        (
            {"rank_to_offset": (0, 14, 60)},
            "`layout` got a rank boundary at 14, inside a row of tensor 1 at [12, 28); "
            "expected boundaries that don't cut a row; ",
        ),
    ],
)
def test_validate_row_atomic_refuses(change: dict[str, tuple[int, ...]], text: str) -> None:
    validate_row_atomic(seed_layout())
    broken = dataclasses.replace(seed_layout(), **change)  # pyright: ignore[reportArgumentType]
    with pytest.raises(LayoutError) as error:
        validate_row_atomic(broken)
    assert str(error.value) == text + MEND


def test_validate_row_atomic_knows_blocks() -> None:
    layout = GlobalLayout((torch.Size([5, 2]),), (0,), 10, (0, 2, 10))
    validate_row_atomic(layout)
    validate_row_atomic(dataclasses.replace(layout, rank_to_offset=(0, 4, 8, 10)), 2)
    with pytest.raises(LayoutError) as error:
        validate_row_atomic(layout, 2)
    assert str(error.value) == (
        "`layout` got a rank boundary at 2, inside a block of 2 rows of tensor 0 at [0, 10); "
        "expected boundaries that don't cut a block of 2 rows; " + MEND
    )
    with pytest.raises(LayoutError) as error:
        validate_row_atomic(layout, 0)
    assert str(error.value) == "`block_size` got 0; expected a positive integer; pass 1 for single rows."
