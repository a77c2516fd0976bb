"""Padded packings that are denser than the chunk rule's: valid for all shapes, never bigger, and quick."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek import DENSE_LAYER, PER_EXPERT_LAYER
from mfsdp_fn.layout import row_numel, validate_row_atomic
from mfsdp_fn.layout_builder import build_for_row_atomic, build_for_row_atomic_unpadding
from mfsdp_fn.layout_choice import choose_layout, unit_of
from mfsdp_fn.packing_search import pack_segments
from mfsdp_fn.placement import ShardLayout

Shapes = list[tuple[int, ...]]

any_shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=12)
awkward = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 60), st.sampled_from([1, 4, 5, 6, 7, 8, 12])),
        st.tuples(st.integers(1, 60)),
        st.just(()),
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6)),
    ),
    max_size=40,
)


def sizes(shapes: Shapes) -> tuple[torch.Size, ...]:
    return tuple(map(torch.Size, shapes))


@settings(max_examples=200, deadline=None)
@given(any_shapes | awkward, st.integers(1, 18), st.integers(1, 5), st.sampled_from([1, 4, 8]), st.integers(1, 2))
def test_padded_layouts_are_sound_and_never_bigger(
    shapes: Shapes, ranks: int, block_size: int, unit: int, depth: int
) -> None:
    depths = tuple(depth if len(shape) > depth else 1 for shape in shapes)
    rows = [(math.prod(s[:d]), *s[d:]) if s else s for s, d in zip(shapes, depths, strict=True)]
    seed = build_for_row_atomic(rows, ranks, block_size=block_size)
    layout, choice = choose_layout(sizes(shapes), ranks, block_size=block_size, unit=unit, leading_dims=depths)
    assert layout.is_even and layout.tensor_shapes == sizes(shapes) and layout.dp_size == ranks
    validate_row_atomic(layout, block_size)
    assert layout.size <= seed.size
    if layout.tensor_to_offset != seed.tensor_to_offset:
        assert layout.rank_to_offset[1] % unit == 0
    numel = sum(map(math.prod, shapes))
    assert (choice.padding, choice.chunk_rule) == (layout.size - numel, seed.size - numel)
    assert (choice.padded, choice.picked, choice.why) == (layout.rank_to_offset[1], "padded", "as asked for")
    for index in range(len(shapes)):
        held = [layout.local_shape(index, rank).numel() for rank in range(ranks)]
        assert sum(held) == math.prod(shapes[index])
    for part in (k for k in range(1, ranks + 1) if ranks % k == 0):
        validate_row_atomic(layout.coarsen(part), block_size)


@settings(max_examples=100, deadline=None)
@given(any_shapes | awkward, st.integers(1, 18), st.integers(1, 5), st.sampled_from([1, 4, 8]))
def test_layouts_without_padding_stay_sound(shapes: Shapes, ranks: int, block_size: int, unit: int) -> None:
    rule = build_for_row_atomic_unpadding(shapes, ranks, block_size=block_size)
    layout, choice = choose_layout(
        sizes(shapes), ranks, block_size=block_size, unit=unit, shard_layout=ShardLayout.UNPADDED
    )
    validate_row_atomic(layout, block_size)
    assert (layout.tensor_to_offset, layout.size) == (rule.tensor_to_offset, rule.size)
    assert choice.ragged == max(layout.rank_range(rank).size for rank in range(ranks))
    for mine, theirs in zip(layout.rank_to_offset[1:-1], rule.rank_to_offset[1:-1], strict=True):
        assert mine == theirs or mine % unit == 0 or mine in layout.rank_to_offset[:-1]
        assert abs(mine - theirs) * ranks * 64 <= rule.size or mine > theirs


def test_boundaries_go_to_the_nearest_aligned_row_end() -> None:
    draw = random.Random(0)
    for _ in range(200):
        rows, row, unit, ranks = draw.randint(2000, 4000), draw.randint(1, 9), draw.choice([4, 8]), draw.randint(2, 5)
        first = draw.randint(0, 3)
        shapes = sizes([(first,), (rows, row)])
        layout, _ = choose_layout(shapes, ranks, unit=unit, shard_layout=ShardLayout.UNPADDED)
        allowed = [end for end in range(first, layout.size, row) if end % unit == 0]
        for rank in range(1, ranks):
            split = rank * layout.size
            got = layout.rank_to_offset[rank]
            if allowed:
                assert abs(got * ranks - split) == min(abs(end * ranks - split) for end in allowed)
            else:  # no row ends on 16 bytes: the nearest of all
                assert got in build_for_row_atomic_unpadding(shapes, ranks).rank_to_offset


@pytest.mark.parametrize(
    ("ranks", "block_size", "rule", "most"),
    [(256, 32, 0.22, 0.0032), (64, 32, 0.16, 0.0005), (8, 32, 0.12, 0.0001), (256, 1, 0.01, 0.0003)],
)
def test_a_layer_of_single_experts_needs_next_to_no_padding(
    ranks: int, block_size: int, rule: float, most: float
) -> None:
    layout, choice = choose_layout(sizes(PER_EXPERT_LAYER), ranks, block_size=block_size, unit=8)
    validate_row_atomic(layout, block_size)
    numel = layout.size - choice.padding
    assert choice.chunk_rule > rule * numel
    assert choice.padding < most * numel
    assert layout.rank_to_offset[1] % 8 == 0
    assert not any(offset % 8 for offset, s in zip(layout.tensor_to_offset, PER_EXPERT_LAYER, strict=True) if s[1:])


def test_long_tensors_of_several_row_sizes_need_their_common_multiple() -> None:
    """Each is longer than two segments, so two boundaries fall inside it: the segment is a multiple of its row."""
    _, choice = choose_layout(sizes(DENSE_LAYER), 256, unit=8)
    chunk = math.lcm(*(row_numel(s) for s in DENSE_LAYER))
    assert choice.padded == 3 * chunk and choice.padding == choice.chunk_rule
    numel = sum(map(math.prod, DENSE_LAYER))
    assert 2 * chunk * 256 < numel < 3 * chunk * 256


@pytest.mark.parametrize("ranks", [2, 3])
def test_five_and_seven_rows(ranks: int) -> None:
    layout, choice = choose_layout(sizes([(5, 3), (7, 4), (7,), (5,), (5, 7)]), ranks, unit=4)
    validate_row_atomic(layout)
    assert choice.padding < choice.chunk_rule
    assert layout.rank_to_offset[1] % 4 == 0


def test_a_gate_over_16_ranks() -> None:
    layout, choice = choose_layout(sizes([(72, 64)]), 16, unit=8)
    assert (choice.padded, layout.size) == (5 * 64, 80 * 64)  # 72 rows are 4.5 a rank
    _, choice = choose_layout(sizes([(72, 64)]), 16, unit=8, shard_layout=None)
    assert (choice.ragged, choice.picked, choice.why) == (5 * 64, "padded", "unpadded is no shorter")


def test_one_giant_table_and_many_tiny_norms() -> None:
    shapes = sizes([(129_280, 7168), *[(512,), (1536,), (7168,)] * 300])
    layout, choice = choose_layout(shapes, 64, unit=8)
    validate_row_atomic(layout)
    assert choice.padding <= choice.chunk_rule and choice.padding < 64 * 7168
    assert layout.padding(0) == ()


def test_units_are_16_bytes() -> None:
    assert [unit_of((size,)) for size in (1, 2, 4, 8, 16)] == [16, 8, 4, 2, 1]
    assert unit_of((4, 2)) == 8


def test_nothing_to_pack() -> None:
    assert pack_segments((0, 0), (3, 0), 4, 8, 100) is None
    assert pack_segments((7,), (7,), 4, 1, 7) is None


DRAW = random.Random(0)
MANY: dict[str, Shapes] = {
    "few shapes": [(512,), (512, 512), (128, 512), (1792, 512), (512, 1792), (7,)] * 10_000,
    "all different": [(DRAW.randint(1, 5000), DRAW.randint(1, 5000)) for _ in range(60_000)],
}


@pytest.mark.parametrize("name", MANY)
def test_60_000_tensors_over_1_024_ranks_take_seconds(name: str) -> None:
    start = time.process_time()
    _, choice = choose_layout(sizes(MANY[name]), 1024, block_size=32, unit=8)
    seconds = time.process_time() - start
    assert choice.padding <= choice.chunk_rule
    assert seconds < 15  # takes two to three; a guard against quadratic work
