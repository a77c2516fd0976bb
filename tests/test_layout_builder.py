"""Layouts built from shapes: published diagrams, promises, a slow twin of the fast packing, and time."""

from __future__ import annotations

import doctest
import math
import random
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfsdp_fn import layout_builder
from mfsdp_fn.errors import LayoutError
from mfsdp_fn.layout import GlobalLayout, Range, row_numel, validate_row_atomic
from mfsdp_fn.layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
    build_row_atomic_layout,
)
from mfsdp_fn.placement import ShardLayout

Shapes = list[tuple[int, ...]]

any_shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=12)
# Rows from a small set and many of them: tensors over and under a chunk, remainders that pair up, gaps.
packable = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 6])),
        st.tuples(st.integers(1, 40)),
        st.just(()),
        st.tuples(st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=40,
)
dp_sizes = st.integers(1, 17)
block_sizes = st.integers(1, 5)


def test_doctests_pass() -> None:
    result = doctest.testmod(layout_builder)
    assert result.attempted
    assert not result.failed


# The published diagrams.


def test_padded_diagram() -> None:
    layout = build_for_row_atomic([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5)
    assert layout == GlobalLayout(
        tuple(map(torch.Size, [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)])),
        (0, 12, 32, 28, 48),
        60,
        (0, 12, 24, 36, 48, 60),
    )
    assert layout.padding(2) == (Range(30, 32),)
    assert layout.padding(4) == (Range(54, 60),)


def test_unpadded_diagram_and_what_padding_would_cost() -> None:
    shapes = [(2, 6), (4, 4), (1, 2)]
    layout = build_for_row_atomic_unpadding(shapes, 2)
    assert (layout.tensor_to_offset, layout.size, layout.rank_to_offset) == ((0, 12, 28), 30, (0, 16, 30))
    assert build_for_row_atomic(shapes, 2).size == 48


def test_tensor_atomic_diagram() -> None:
    layout = build_for_tensor_atomic([(4, 4), (2, 6), (1, 2)], 2, tensor_owners=(0, 1, 1))
    assert (layout.tensor_to_offset, layout.size, layout.rank_to_offset) == ((0, 16, 28), 30, (0, 16, 30))


def test_tensor_atomic_packs_by_owner_and_keeps_ids_in_order() -> None:
    layout = build_for_tensor_atomic([(2,), (3,), (), (0,), (5,)], 4, tensor_owners=iter([2, 0, 2, 3, 0]))
    assert layout.tensor_shapes == ((2,), (3,), (), (0,), (5,))
    assert layout.tensor_to_offset == (8, 0, 10, 11, 3)
    assert layout.rank_to_offset == (0, 8, 8, 11, 11)


# Rules one by one.


def test_the_first_conjugate_that_fits_is_taken() -> None:
    # chunk 12; remainders 8, 8, 4: the second does not fit beside the first, the third does.
    layout = build_for_row_atomic([(5, 4), (5, 4), (4, 4), (3,), (1, 6)], 1)
    assert layout.tensor_to_offset == (0, 36, 20, 56, 60)
    assert layout.size == 72


def test_a_tensor_with_a_short_last_block_is_no_conjugate() -> None:
    # chunk 4 rows; three rows remain of the first, one of the second: it would fit, but start inside a block.
    layout = build_for_row_atomic([(7,), (5,), (1,)], 4, block_size=4)
    assert layout.tensor_to_offset == (0, 8, 16)
    # chunk 12; the second tensor is passed over for the third, which ends on a block.
    layout = build_for_row_atomic([(13,), (14,), (20,), (1, 3)], 2, block_size=4)
    assert layout.tensor_to_offset == (0, 36, 16, 60)


def test_tensors_without_elements_constrain_nothing() -> None:
    shapes = [(3, 2), (4, 2)]
    plain = build_for_row_atomic(shapes, 3)
    padded = build_for_row_atomic([(0, 7), *shapes, (5, 0), (0,)], 3)
    assert (padded.size, padded.rank_to_offset) == (plain.size, plain.rank_to_offset)
    assert padded.tensor_to_offset == (0, *plain.tensor_to_offset, 0, 0)


@pytest.mark.parametrize(
    ("shapes", "dp_size", "block_size", "boundaries"),
    [
        ([(4, 4)], 2, 1, (0, 8, 16)),
        ([(3, 2)], 2, 1, (0, 2, 6)),  # 3 is halfway between 2 and 4: down
        ([(1, 10)], 3, 1, (0, 0, 10, 10)),  # fewer rows than ranks
        ([(1, 10)], 2, 1, (0, 0, 10)),
        ([(5,), (3, 3)], 2, 1, (0, 8, 14)),
        ([(7,)], 2, 4, (0, 4, 7)),
        ([(9,)], 3, 6, (0, 0, 6, 9)),  # 3 is halfway
        ([(7,)], 3, 6, (0, 0, 6, 7)),
        ([(2,), (9,)], 2, 9, (0, 2, 11)),
        ([(0,), (2,), (0,), (2,), (0,)], 4, 1, (0, 1, 2, 3, 4)),
        ([()], 3, 1, (0, 0, 1, 1)),
        ([], 3, 1, (0, 0, 0, 0)),
    ],
)
def test_unpadded_boundaries(shapes: Shapes, dp_size: int, block_size: int, boundaries: tuple[int, ...]) -> None:
    assert build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size).rank_to_offset == boundaries


def test_unpadded_boundaries_are_exact_beyond_float_precision() -> None:
    rows = 2**60 + 1
    layout = build_for_row_atomic_unpadding([(rows,)], 2)
    assert layout.rank_to_offset == (0, 2**59, rows)


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 3), (4, 0)]])
def test_nothing_to_lay_out(shapes: Shapes) -> None:
    zeros = (0,) * len(shapes)
    for layout in (
        build_for_row_atomic(shapes, 3),
        build_for_row_atomic_unpadding(shapes, 3),
        build_for_tensor_atomic(shapes, 3, tensor_owners=zeros),
    ):
        assert (layout.tensor_to_offset, layout.size, layout.rank_to_offset) == (zeros, 0, (0, 0, 0, 0))


def test_shard_layout_selects_the_builder() -> None:
    shapes = [(3, 2), (5,)]
    padded = build_for_row_atomic(shapes, 2, block_size=2)
    assert build_row_atomic_layout(shapes, 2, block_size=2) == padded
    assert build_row_atomic_layout(iter(shapes), 2, block_size=2, shard_layout=ShardLayout.PADDED) == padded
    unpadded = build_for_row_atomic_unpadding(shapes, 2, block_size=2)
    assert build_row_atomic_layout(shapes, 2, block_size=2, shard_layout=ShardLayout.UNPADDED) == unpadded


# Promises, for all shapes.


@given(any_shapes | packable, dp_sizes, block_sizes)
def test_padded_promises(shapes: Shapes, dp_size: int, block_size: int) -> None:
    layout = build_for_row_atomic(shapes, dp_size, block_size=block_size)
    validate_row_atomic(layout, block_size)
    blocks = [block_size * row_numel(s) for s in shapes if math.prod(s)]
    assert layout.is_even
    assert layout.size % (math.lcm(*blocks) * dp_size) == 0
    assert layout.tensor_shapes == tuple(map(torch.Size, shapes))
    for index, shape in enumerate(shapes):
        if math.prod(shape):
            assert layout.tensor_to_offset[index] % (block_size * row_numel(shape)) == 0
    assert layout == build_for_row_atomic(map(list, shapes), dp_size, block_size=block_size)


@given(any_shapes | packable, dp_sizes, block_sizes)
def test_unpadded_promises(shapes: Shapes, dp_size: int, block_size: int) -> None:
    layout = build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size)
    validate_row_atomic(layout, block_size)
    assert layout.size == sum(map(math.prod, shapes))
    block = max([block_size * row_numel(s) for s in shapes if math.prod(s)], default=0)
    for rank in range(dp_size):
        assert abs(layout.rank_range(rank).size - Fraction(layout.size, dp_size)) <= block
    assert layout == build_for_row_atomic_unpadding(map(list, shapes), dp_size, block_size=block_size)


@given(any_shapes, dp_sizes, block_sizes)
def test_unpadded_boundaries_are_the_nearest_allowed(shapes: Shapes, dp_size: int, block_size: int) -> None:
    layout = build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size)
    allowed, start = {0}, 0
    for shape in shapes:
        if math.prod(shape):
            stop = start + math.prod(shape)
            allowed |= {*range(start, stop, block_size * row_numel(shape)), stop}
            start = stop
    for rank in range(1, dp_size):
        target = Fraction(rank * layout.size, dp_size)
        assert layout.rank_to_offset[rank] == min(sorted(allowed), key=lambda p: abs(p - target))


@given(any_shapes, dp_sizes, st.data())
def test_tensor_atomic_promises(shapes: Shapes, dp_size: int, data: st.DataObject) -> None:
    count = len(shapes)
    owners = data.draw(st.lists(st.integers(0, dp_size - 1), min_size=count, max_size=count))
    layout = build_for_tensor_atomic(shapes, dp_size, tensor_owners=owners)
    validate_row_atomic(layout, max([1, *(s[0] for s in shapes if s)]))  # whole tensors, so any block size
    assert layout.size == sum(map(math.prod, shapes))
    for index, owner in enumerate(owners):
        assert layout.local_range(index, owner) == layout.tensor_range(index)
    for rank in range(dp_size):
        assert not layout.padding(rank)
        mine = [i for i, owner in enumerate(owners) if owner == rank and math.prod(shapes[i])]
        assert layout.local_tensors(rank) == tuple(mine)


# The fast packing against a plain one that follows the rule word by word, in quadratic time.


def plain_offsets(shapes: Shapes, block_size: int) -> tuple[list[int], int]:
    def up(value: int, multiple: int) -> int:
        return (value + multiple - 1) // multiple * multiple

    numel = [math.prod(s) for s in shapes]
    block = [block_size * math.prod(s[1:]) for s in shapes]
    some = [i for i in range(len(shapes)) if numel[i]]
    chunk = math.lcm(*(block[i] for i in some))
    offsets = [0] * len(shapes)
    queue = [i for i in some if numel[i] >= chunk]
    fragments = sorted((i for i in some if numel[i] < chunk), key=lambda i: (-numel[i], i))
    end = 0
    while queue:
        i = queue.pop(0)
        offsets[i] = end
        gap, rest = end + numel[i], numel[i] % chunk
        end = up(gap, chunk)
        if not rest:
            continue
        gap_stop = end
        for j in queue:
            rest2 = numel[j] % chunk
            if rest2 and numel[j] % block[j] == 0 and rest + rest2 <= chunk:
                offsets[j] = gap_stop = end - rest2
                end += numel[j] // chunk * chunk
                queue.remove(j)
                break
        for j in list(fragments):
            start = up(gap, block[j])
            if start + numel[j] <= gap_stop:
                offsets[j] = start
                gap = start + numel[j]
                fragments.remove(j)
    for j in fragments:
        offsets[j] = up(end, block[j])
        end = offsets[j] + numel[j]
    return offsets, up(end, chunk)


@settings(max_examples=500)
@given(packable, dp_sizes, block_sizes)
def test_padded_packing_is_the_plain_one(shapes: Shapes, dp_size: int, block_size: int) -> None:
    layout = build_for_row_atomic(shapes, dp_size, block_size=block_size)
    offsets, end = plain_offsets(shapes, block_size)
    assert list(layout.tensor_to_offset) == offsets
    assert 0 <= layout.size - end < math.lcm(*(block_size * row_numel(s) for s in shapes if math.prod(s))) * dp_size


@pytest.mark.parametrize("seed", range(20))
def test_padded_packing_is_the_plain_one_for_long_lists(seed: int) -> None:
    draw = random.Random(seed)
    rows = draw.choice([[1, 2, 3, 4, 6, 12], [8, 12, 18], [1, 64, 96], [5, 7, 35, 1]])
    most = draw.choice([4, 30, 300])
    shapes: Shapes = [(draw.randint(1, most), draw.choice(rows)) for _ in range(400)]
    block_size = draw.choice([1, 1, 2, 3])
    assert (
        list(build_for_row_atomic(shapes, 3, block_size=block_size).tensor_to_offset)
        == (plain_offsets(shapes, block_size)[0])
    )


# Time: 60,000 tensors over 1,024 ranks.


def transformer(draw: random.Random) -> Shapes:
    attention: Shapes = [(4096,), (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    mlp: Shapes = [(4096,), (14336, 4096), (14336, 4096), (4096, 14336)]
    return (attention + mlp) * 6667


def experts(draw: random.Random) -> Shapes:
    return [(2048, 7168), (2048, 7168), (7168, 2048)] * 20_000


def fragments_and_remainders(draw: random.Random) -> Shapes:
    # chunk 2 * 7 * 1024: half are under it, and nearly all others leave a remainder.
    kinds: list[Callable[[], tuple[int, ...]]] = [
        lambda: (draw.randint(1, 15), 1024),
        lambda: (draw.randint(1, 14_000),),
        lambda: (draw.randint(1, 100), 1792),
        lambda: (draw.randint(14, 400), 1024),
        lambda: (draw.randint(50, 500), 512),
    ]
    return [draw.choice(kinds)() for _ in range(60_000)]


def many_alignments(draw: random.Random) -> Shapes:
    # Rows are divisors of 720: thirty alignments, with tensors around a chunk in size.
    rows = [d for d in range(1, 721) if 720 % d == 0]
    return [(draw.randint(1, max(2, 1440 // row)), row) for row in draw.choices(rows, k=60_000)]


def many_alignments_and_remainders(draw: random.Random) -> Shapes:
    # 120 alignments, no two gaps alike, and fragments of all sizes to search for each of them.
    rows = [d for d in range(1, 55_441) if 55_440 % d == 0]
    small: Shapes = [(draw.randint(1, 55_440 // row), row) for row in draw.choices(rows, k=30_000)]
    return small + [(draw.randint(55_440, 500_000),) for _ in range(30_000)]


def small_gaps_no_fragment_fits(draw: random.Random) -> Shapes:
    return [(draw.randint(720, 10_000),) for _ in range(30_000)] + [
        (draw.randint(1, 2), draw.choice([240, 360, 144, 180])) for _ in range(30_000)
    ]


def distinct_shapes(draw: random.Random) -> Shapes:
    return [(draw.randint(1, 5000), draw.choice([64, 96, 128, 160]) * draw.randint(1, 16)) for _ in range(60_000)]


def all_rows_distinct(draw: random.Random) -> Shapes:
    # The chunk has thousands of digits here and everything is a fragment.
    return [(1 + i % 7, 1 + i) for i in range(60_000)]


def owned_round_robin(shapes: Shapes, dp_size: int) -> GlobalLayout:
    return build_for_tensor_atomic(shapes, dp_size, tensor_owners=(i % dp_size for i in range(len(shapes))))


@pytest.mark.parametrize("build", [build_for_row_atomic, build_for_row_atomic_unpadding, owned_round_robin])
@pytest.mark.parametrize(
    "mix",
    [
        transformer,
        experts,
        fragments_and_remainders,
        many_alignments,
        many_alignments_and_remainders,
        small_gaps_no_fragment_fits,
        distinct_shapes,
        all_rows_distinct,
    ],
)
def test_near_linear_time(build: Callable[[Shapes, int], GlobalLayout], mix: Callable[[random.Random], Shapes]) -> None:
    shapes = mix(random.Random(0))
    assert len(shapes) >= 60_000
    start = time.process_time()
    layout = build(shapes, 1024)
    seconds = time.process_time() - start
    validate_row_atomic(layout)
    assert seconds < 2


# Errors.

BUILDERS: list[Callable[..., GlobalLayout]] = [
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    build_row_atomic_layout,
    lambda shapes, dp_size: build_for_tensor_atomic(shapes, dp_size, tensor_owners=(0,)),
]


@pytest.mark.parametrize("dp_size", [0, -2, True, 2.0, "2", None])
@pytest.mark.parametrize("build", BUILDERS)
def test_bad_dp_size(build: Callable[..., GlobalLayout], dp_size: Any) -> None:
    with pytest.raises(LayoutError) as error:
        build([(2, 2)], dp_size)
    assert str(error.value) == (
        f"`dp_size` got {dp_size!r}; expected a positive integer; pass the number of ranks that share the buffer."
    )


@pytest.mark.parametrize("block_size", [0, -1, True, 1.5])
@pytest.mark.parametrize("build", BUILDERS[:3])
def test_bad_block_size(build: Callable[..., GlobalLayout], block_size: Any) -> None:
    with pytest.raises(LayoutError) as error:
        build([(2, 2)], 2, block_size=block_size)
    assert str(error.value) == (
        f"`block_size` got {block_size!r}; expected a positive integer; pass the number of rows to keep together."
    )


@pytest.mark.parametrize("shape", [(2, -1), (2.0, 3), (True, 2), 7, None, "ab"])
@pytest.mark.parametrize("build", BUILDERS)
def test_bad_shape(build: Callable[..., GlobalLayout], shape: Any) -> None:
    with pytest.raises(LayoutError) as error:
        build([(2, 2), shape], 2)
    assert str(error.value) == (
        f"`shapes` got {shape!r} for tensor 1; expected a tuple of non-negative integers for every tensor; "
        "pass one shape a tensor, such as [p.shape for p in params]."
    )


@pytest.mark.parametrize("build", BUILDERS)
def test_shapes_must_be_iterable(build: Callable[..., GlobalLayout]) -> None:
    with pytest.raises(LayoutError) as error:
        build(3, 2)
    assert str(error.value) == (
        "`shapes` got 3; expected an iterable of shapes; pass one shape a tensor, such as [p.shape for p in params]."
    )


@pytest.mark.parametrize("owner", [-1, 2, True, 1.0, None])
def test_bad_owner(owner: Any) -> None:
    with pytest.raises(LayoutError) as error:
        build_for_tensor_atomic([(2,), (3,)], 2, tensor_owners=[0, owner])
    assert str(error.value) == (
        f"`tensor_owners` got {owner!r} for tensor 1; expected an integer in [0, dp_size=2); "
        "pass one owner rank a tensor, in tensor-id order."
    )


@pytest.mark.parametrize("owners", [(), (0,), (0, 1, 1)])
def test_wrong_number_of_owners(owners: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError) as error:
        build_for_tensor_atomic([(2,), (3,)], 2, tensor_owners=owners)
    assert str(error.value) == (
        f"`tensor_owners` got {len(owners)} owners; expected 2, as many as `shapes`; "
        "pass one owner rank a tensor, in tensor-id order."
    )


def test_owners_must_be_iterable() -> None:
    with pytest.raises(LayoutError) as error:
        build_for_tensor_atomic([(2,)], 2, tensor_owners=1)  # pyright: ignore[reportArgumentType]
    assert str(error.value) == (
        "`tensor_owners` got 1; expected an iterable of 1 ranks; pass one owner rank a tensor, in tensor-id order."
    )


@pytest.mark.parametrize("shard_layout", ["padded", None, 1])
def test_bad_shard_layout(shard_layout: Any) -> None:
    with pytest.raises(LayoutError) as error:
        build_row_atomic_layout([(2,)], 2, shard_layout=shard_layout)
    assert str(error.value) == (
        f"`shard_layout` got {shard_layout!r}; expected a member of ShardLayout; "
        "pass ShardLayout.PADDED or ShardLayout.UNPADDED."
    )
