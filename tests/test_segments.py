"""Segments: runs of equal labels in a rank's buffers, padding left out."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mfsdp_fn as mf
from mfsdp_fn.segments import Segment, segments


def plan(shapes: dict[str, tuple[int, ...]], size: int, rank: int, placements: mf.Placements | None = None, **options):
    params = {path: torch.empty(shape, device="meta", requires_grad=True) for path, shape in shapes.items()}
    return mf.plan(params, mf.AbstractMesh((size,), ("dp",), rank), placements or mf.zero3(), **options)


def test_equal_labels_that_touch_are_one_segment():
    spec = plan({"a": (4,), "b": (4,), "c": (4,)}, 1, 0)
    assert segments(spec, {"a": 1, "b": 1, "c": 2}) == ((Segment(1, 0, 8), Segment(2, 8, 12)),)
    assert segments(spec, lambda path: path == "b") == (
        (Segment(False, 0, 4), Segment(True, 4, 8), Segment(False, 8, 12)),
    )


def test_padding_separates_segments():
    """Rows of 5 and of 7: the second tensor starts on 16 bytes, at 8."""
    shapes = {"a": (1, 5), "b": (1, 7)}
    assert segments(plan(shapes, 1, 0), lambda _: "x") == ((Segment("x", 0, 5), Segment("x", 8, 15)),)
    assert segments(plan(shapes, 2, 1), lambda _: "x") == ((Segment("x", 0, 7),),)


def test_a_rank_without_rows_has_none():
    assert segments(plan({"a": (1, 2)}, 3, 2), lambda _: None) == ((),)


def test_zero_sized_and_scalar_tensors():
    spec = plan({"none": (0, 3), "scalar": (), "last": (0,)}, 1, 0)
    assert segments(spec, lambda path: path) == ((Segment("scalar", 0, 1),),)


def test_replicated_weights_are_whole_on_every_rank():
    for rank in range(2):
        assert segments(plan({"a": (4, 2)}, 2, rank, mf.ddp()), lambda _: 0) == ((Segment(0, 0, 8),),)


def test_ranks_of_one_spec_have_their_own():
    """Specs of different ranks are equal: nothing may be cached by spec."""
    first, second = (plan({"a": (3,)}, 2, rank) for rank in range(2))
    assert first == second
    assert segments(first, lambda _: 0) == ((Segment(0, 0, 2),),)
    assert segments(second, lambda _: 0) == ((Segment(0, 0, 1),),)


def test_each_group_has_its_own():
    params = {"a": torch.zeros(2, requires_grad=True), "frozen": torch.zeros(3)}
    spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3())
    assert segments(spec, lambda _: 0) == ((Segment(0, 0, 2),), (Segment(0, 0, 3),))


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)


@given(
    shapes,
    st.integers(1, 4),
    st.lists(st.integers(0, 1), min_size=8, max_size=8),
    st.sampled_from(["padded", "unpadded"]),
)
def test_segments_tile_exactly_the_elements(shapes, size, labels, layout):
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    by_path = dict(zip(named, labels, strict=False))
    counts = {0: 0, 1: 0}
    for rank in range(size):
        spec = plan(named, size, rank, shard_layout=layout)
        group = spec.groups[0]
        # A buffer that says for each element which tensor it is of, -1 for padding.
        local = torch.full((group.main_range.stop - group.main_range.start,), -1)
        for index, rows in group.local_views(local, group.main_range).items():
            rows.fill_(by_path[group.paths[index]])
        (row,) = segments(spec, by_path)
        painted = torch.full_like(local, -1)
        for segment in row:
            assert isinstance(segment.label, int)
            painted[segment.start : segment.stop] = segment.label
            counts[segment.label] += segment.stop - segment.start
        assert torch.equal(local, painted)
        for left, right in itertools.pairwise(row):
            assert left.stop < right.start or left.label != right.label  # maximal
        assert torch.equal(local >= 0, runs_mask(group, len(local)))
    numel = {path: torch.Size(shape).numel() for path, shape in named.items()}
    assert counts == {label: sum(n for path, n in numel.items() if by_path[path] == label) for label in (0, 1)}


def runs_mask(group: mf.GroupSpec, size: int) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    for start, stop in group.main_runs:
        mask[start:stop] = True
    return mask


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("norm*", {"blocks.0.norm1.weight", "norm.weight"}),
        ("blocks.*", {"blocks.0.norm1.weight", "blocks.0.w"}),
        ("blocks.*.w", {"blocks.0.w"}),
        ("weight", {"blocks.0.norm1.weight", "norm.weight"}),
        ("0.w", {"blocks.0.w"}),
    ],
)
def test_select_matches_consecutive_components(pattern, expected):
    spec = plan({"blocks.0.norm1.weight": (2,), "blocks.0.w": (2,), "norm.weight": (2,)}, 1, 0)
    assert spec.select([pattern]) == expected


@pytest.mark.parametrize("pattern", ["nor", "blocks.w", "a.b.c.d.e.f"])
def test_select_refuses_what_matches_nothing(pattern):
    spec = plan({"blocks.0.norm1.weight": (2,), "blocks.0.w": (2,)}, 1, 0)
    with pytest.raises(mf.PlanError, match=f"`pattern` got '{pattern}'; expected a pattern that matches consecutive"):
        spec.select([pattern])
