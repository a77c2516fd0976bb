"""What `plan` does with layouts: "auto", 16-byte boundaries, groups by row size, matrices in turn; and why."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from deepseek import DENSE_LAYER, FUSED_LAYER, PER_EXPERT_LAYER, Shape
from mfsdp_fn.explain import misaligned, misaligned_segments
from mfsdp_fn.layout import validate_row_atomic
from mfsdp_fn.layout_choice import Wire, choose_layout
from models import EXACT, assert_equal, integers, mesh_of, trainable
from pool import run_ranks
from simulated import run_simulated

BF16 = mf.MixedPrecisionPolicy(compute=torch.bfloat16, reduce=torch.bfloat16)


def meta(shapes: list[Shape]) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.empty(shape, device="meta").requires_grad_() for i, shape in enumerate(shapes)}


def planned(params: Any, size: int, rank: int = 0, **options: Any) -> mf.ShardSpec:
    return mf.plan(params, mf.AbstractMesh((size,), ("dp",), rank), mf.zero3(), **options)


def padding(spec: mf.ShardSpec) -> float:
    return sum(group.layout.size for group in spec.groups) / spec.numel - 1


def test_auto_picks_by_predicted_segments_and_explains() -> None:
    params = meta([(64, 8), (400, 7, 8), (400, 8, 9), (33, 8)])
    names = dict(zip(("a.w", "b.w", "b.v", "c.w"), params.values(), strict=True))
    spec = planned(names, 16, shard_layout="auto", units=("*",), precision=BF16)
    picked = {group.unit: (group.choice.picked, group.layout.is_even) for group in spec.groups}
    assert picked == {"a": ("padded", True), "b": ("unpadded", False), "c": ("padded", True)}
    table = spec.explain().splitlines()
    assert table[0] == "4 leaves in 3 groups of 3 units over 16 ranks"
    (line,) = [row for row in table[5:] if row.startswith("b ")]
    choice = spec.groups[1].choice
    for number in (choice.padding, choice.chunk_rule, choice.padded, choice.ragged):
        assert f" {2 * number:,} " in line  # bytes of the compute dtype
    assert line.endswith("unpadded  padded is 8.62 % longer: more than 1/32")
    (line,) = [row for row in table[5:] if row.startswith("a ")]
    assert line.endswith("padded    unpadded is no shorter")


def test_auto_pads_up_to_the_threshold_and_no_further() -> None:
    wide = planned(meta([(128, 64), (128, 65)]), 128, shard_layout="auto").groups[0].choice
    assert wide.picked == "unpadded" and wide.padded * 32 > wide.ragged * 33
    near = planned(meta([(6400, 64), (6400, 65)]), 3, shard_layout="auto").groups[0].choice
    assert near.picked == "padded" and near.ragged <= near.padded <= near.ragged * 33 / 32


@pytest.mark.parametrize(
    ("shapes", "ranks", "picked", "why"),
    [
        ([(17, 4096)], 16, "unpadded", "padded sends 88.24 % more: more than 1/8"),
        ([(16, 4096)], 16, "padded", "unpadded is no shorter"),  # costs nothing
        ([(15, 4096)], 16, "padded", "unpadded is no shorter"),  # 6.67 %: a sixteenth of the ranks hold nothing
        ([(1, 4096)], 2, "padded", "unpadded is no shorter"),  # twice as much, but little: 16 KiB
        ([(1, 16384)], 2, "padded", "unpadded is no shorter"),  # just 64 KiB
        ([(1, 16388)], 2, "unpadded", "padded sends 100.00 % more: more than 1/8"),
        ([(0, 4096)], 16, "padded", "unpadded is no shorter"),
        ([()], 4, "padded", "unpadded is no shorter"),
        ([(128, 64), (128, 65)], 128, "unpadded", "padded is 2066.67 % longer: more than 1/32"),  # segments come first
    ],
)
def test_auto_goes_by_all_that_is_gathered_where_segments_are_alike(
    shapes: list[Shape], ranks: int, picked: str, why: str
) -> None:
    (group,) = planned(meta(shapes), ranks, shard_layout="auto").groups
    assert (group.choice.picked, group.choice.why) == (picked, why)
    numel = sum(map(math.prod, shapes))
    assert group.layout.size == (numel if picked == "unpadded" else group.choice.padded * ranks)


def test_auto_never_gathers_more_than_an_eighth_and_64_kib_of_padding() -> None:
    draw = random.Random(0)
    kinds, found = ("sends", "longer: more", "no shorter"), set()
    for _ in range(300):
        shapes = [(draw.randint(1, 40), draw.choice((1, 64, 4096, 5000))) for _ in range(draw.randint(1, 4))]
        ranks = draw.randint(1, 20)
        (group,) = planned(meta(shapes), ranks, shard_layout="auto").groups
        numel, choice = sum(map(math.prod, shapes)), group.choice
        sent = group.layout.size - numel
        assert sent * 8 <= numel or 4 * sent <= 2**16
        if choice.padded * 32 <= choice.ragged * 33 and choice.padding * 8 <= numel:
            assert choice.picked == "padded"
        found.update(kind for kind in kinds if kind in choice.why)
    assert found == {*kinds}


def gathered(rank: int, world: int) -> tuple[str, str, int]:
    """What auto picks for five rows of 32 KiB over this mesh, and how many elements a gather makes."""
    params = {"w": torch.ones(world + 1, 8192, requires_grad=True)}
    state = mf.shard(params, mf.plan(params, mesh_of(world), mf.zero3(), shard_layout="auto"))
    whole = mf.unshard(state)["w"]
    assert torch.equal(whole, params["w"])
    (group,) = state.spec.groups
    return group.choice.picked, group.choice.why, whole.untyped_storage().nbytes() // 4


def test_auto_knows_how_uneven_segments_travel() -> None:
    assert run_simulated(4, gathered) == [("unpadded", "padded sends 60.00 % more: more than 1/8", 5 * 8192)] * 4
    # Gloo would pad them to the largest: as much on the wire, and a copy.
    assert run_ranks(4, gathered) == [("padded", "unpadded is no shorter", 8 * 8192)] * 4


def test_auto_pads_for_symmetric_memory() -> None:
    _, choice = choose_layout((torch.Size([17, 4096]),), 16, shard_layout=None, wire=Wire.EQUAL_ONLY)
    assert choice.picked == "padded" and choice.why == "symmetric memory takes only equal segments"
    # So what is refused on the CPU is not auto's choice.
    runtime = mf.RuntimePolicy(use_symmetric_memory=True)
    with pytest.raises(mf.PlanError, match=r"`runtime.use_symmetric_memory` got True, but"):
        planned(meta([(17, 4096)]), 16, shard_layout="auto", runtime=runtime)
    with pytest.raises(mf.PlanError, match=r"`runtime.use_symmetric_memory` got True with ragged segments"):
        planned(meta([(17, 4096)]), 16, shard_layout="unpadded", runtime=runtime)


def test_the_choice_is_the_same_on_every_rank() -> None:
    params = meta(DENSE_LAYER)
    specs = [planned(params, 64, rank, shard_layout="auto", block_size=32) for rank in (0, 1, 63)]
    assert len({spec.digest() for spec in specs}) == 1
    assert len({spec.groups[0].choice for spec in specs}) == 1


@pytest.mark.parametrize("shapes", [DENSE_LAYER, PER_EXPERT_LAYER, FUSED_LAYER], ids=["dense", "experts", "fused"])
@pytest.mark.parametrize("block_size", [1, 32])
def test_auto_bounds_the_largest_segment(shapes: list[Shape], block_size: int) -> None:
    (group,) = planned(meta(shapes), 256, shard_layout="auto", block_size=block_size).groups
    validate_row_atomic(group.layout, block_size)
    widest = max(group.layout.rank_range(rank).size for rank in range(256))
    assert widest * 32 <= group.choice.ragged * 33
    assert misaligned_segments(group) == 0 and misaligned(group) == 0


def test_a_dense_layer_split_by_row_size() -> None:
    whole = planned(meta(DENSE_LAYER), 256)
    spec = planned(meta(DENSE_LAYER), 256, split_by_row_size=True)
    assert 0.35 < padding(whole) < 0.36 and padding(spec) < 0.02
    assert [group.name for group in spec.groups] == [
        "(root) float32 rows of 7168",
        "(root) float32 rows of 18432",
        "(root) float32 rows of 16384",
    ]
    for group in spec.groups:  # in each one row size is a multiple of all others
        rows = {shape[1:].numel() for shape in group.layout.tensor_shapes}
        assert all(max(rows) % row == 0 for row in rows)
    assert spec.unit_groups("") == (0, 1, 2) and len({spec.digest(), whole.digest()}) == 2
    assert sorted(path for group in spec.groups for path in group.paths) == sorted(leaf.path for leaf in spec.leaves)


def test_splitting_is_for_groups_that_padding_costs_much() -> None:
    cheap = planned(meta(PER_EXPERT_LAYER), 256, block_size=32)
    assert planned(meta(PER_EXPERT_LAYER), 256, block_size=32, split_by_row_size=True) == cheap
    one_row_size = meta([(3, 8), (2, 8), (8,)])  # much padding, but nothing to part
    assert planned(one_row_size, 16, split_by_row_size=True) == planned(one_row_size, 16)


def test_fused_experts_cut_inside_experts() -> None:
    whole = planned(meta(FUSED_LAYER), 256, shard_layout="padded")
    finer = planned(meta(FUSED_LAYER), 256, shard_layout="padded", leading_dims=2)
    assert padding(whole) > 0.3 and padding(finer) < 0.02
    assert padding(planned(meta(FUSED_LAYER), 256, leading_dims={"p14": 2, "p15": 2, "p16": 2})) == padding(finer)


def test_segments_are_multiples_of_16_bytes_where_the_rule_has_room() -> None:
    params = meta([(31, 12), (45, 20), (7,), (129, 8)])
    for size in (2, 3, 4, 8):
        for precision in (None, BF16):
            (group,) = planned(params, size, precision=precision).groups
            rule = mf.build_for_row_atomic(group.layout.tensor_shapes, size)
            assert group.layout.size <= rule.size
            assert misaligned_segments(group) == 0
    # A vector alone: the rule has no padding, and is kept as it is.
    (group,) = planned(meta([(7,)]), 7).groups
    assert group.layout.rank_to_offset == tuple(range(8)) and misaligned_segments(group) == 6
    assert planned(meta([(7,)]), 7).explain().splitlines()[2].endswith("6")


def test_a_group_smaller_than_its_world() -> None:
    (group,) = planned(meta([(2, 3), (1, 5)]), 16).groups
    assert group.layout.size <= mf.build_for_row_atomic([(2, 3), (1, 5)], 16).size
    assert sum(1 for rank in range(16) if group.layout.local_tensors(rank)) <= 3


def test_layers_that_look_alike_lay_out_their_matrices_in_turn() -> None:
    layer: dict[str, Shape] = {"a": (8, 4), "n": (4,), "b": (16, 4), "c": (8, 4)}
    params = {f"l.{i}.{k}": torch.empty(s, device="meta").requires_grad_() for i in range(4) for k, s in layer.items()}
    spec = planned(params, 2, units=("l.*",))
    orders = [[path.rsplit(".", 1)[1] for path in group.paths] for group in spec.groups]
    # Of 128 elements the turns begin at 0, 32, 64 and 96: at a, b (twice: 64 is as near to 32 as to 96) and c.
    assert orders == [list("anbc"), list("bnca"), list("bnca"), list("cnab")]
    assert len({group.layout.size for group in spec.groups}) == 1
    # An odd one stays last, so that it shifts nobody.
    params = {
        f"l.{i}.{k}": torch.empty(s, device="meta").requires_grad_()
        for i in range(3)
        for k, s in {"odd": (3, 3), "a": (8, 4), "b": (8, 4)}.items()
    }
    assert {group.paths[-1].rsplit(".", 1)[1] for group in planned(params, 2, units=("l.*",)).groups} == {"odd"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"split_by_row_size": 1}, "`split_by_row_size` got 1; expected True or False"),
    ({"split_by_row_size": True, "shard_layout": "unpadded"}, "`split_by_row_size` got True; expected False without"),
    ({"leading_dims": 0}, "`leading_dims` got 0; expected a positive integer"),
    ({"leading_dims": True}, "`leading_dims` got True"),
    ({"leading_dims": "p0"}, "`leading_dims` got 'p0'"),
    ({"leading_dims": {"x": 2}}, "`leading_dims` got 'x'; expected patterns that match some path"),
    ({"leading_dims": {"p1": 2}}, r"`leading_dims\['p1'\]` got 2 for 'p1' of shape \(4, 3\); expected fewer than"),
    ({"leading_dims": {"p0": 1.5}}, r"`leading_dims\['p0'\]` got 1.5"),
]


@pytest.mark.parametrize(("options", "text"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(mf.PlanError, match=text):
        planned(meta([(2, 3, 4), (4, 3)]), 2, **options)


def test_rules_about_rows_mean_nothing_to_whole_tensors() -> None:
    whole = mf.Placements((mf.TensorAtomic(),), (mf.TensorAtomic(),), (mf.TensorAtomic(),))
    rules: list[tuple[str, Any, str]] = [
        ("leading_dims", 2, "2"),
        ("split_by_row_size", True, "True"),
        ("shard_layout", "unpadded", "'unpadded'"),
        ("shard_layout", mf.ShardLayout.UNPADDED, "'unpadded'"),
        ("shard_layout", "auto", "'auto'"),
    ]
    for name, value, shown in rules:
        options: dict[str, Any] = {name: value}
        text = f"`{name}` got {shown}; expected none with TensorAtomic, which cuts no tensor; leave it out, or use Row"
        with pytest.raises(mf.PlanError, match=text):
            mf.plan(meta([(2, 3, 4)]), mf.AbstractMesh((2,), ("dp",)), whole, owners={"p0": 0}, **options)


def test_tied_tensors_are_cut_alike() -> None:
    tied = torch.zeros(2, 3, 4, requires_grad=True)
    with pytest.raises(mf.PlanError, match="`leading_dims` got 1 for 'a' and 2 for 'b', one tensor"):
        planned({"a": tied, "b": tied}, 2, leading_dims={"b": 2})
    assert planned({"a": tied, "b": tied}, 2, leading_dims=2).groups[0].layout.leading_dims == (2,)


# A unit with several groups of one kind works like any other.

SPLIT: dict[int, tuple[int, list[Shape]]] = {  # by world: block size and shapes that are better off in two groups
    2: (2, [(12, 5), (8, 11)]),
    3: (1, [(9, 11), (4, 5), (8, 5)]),
    4: (2, [(8, 7), (4, 3), (5, 3)]),
}


def split_training(rank: int, world: int) -> None:
    block_size, shapes = SPLIT[world]
    params = {"embed": integers(8, 4, seed=1)} | {f"l.0.p{i}": integers(*s, seed=i) for i, s in enumerate(shapes)}
    params = trainable(params)

    def data(name: str, micro: int, at: int) -> torch.Tensor:
        return integers(*params[name].shape, seed=7 + micro + 10 * at)

    def loss(state: mf.ShardState, micro: int) -> torch.Tensor:
        whole = {**mf.unshard(state[""]), **{f"l.0.{name}": p for name, p in mf.unshard(state["l.0"]).items()}}
        return sum(((p * data(name, micro, rank)).sum() for name, p in whole.items()), torch.zeros(()))

    options: dict[str, Any] = {"units": ("l.*",), "precision": EXACT, "block_size": block_size}
    for preset in (mf.zero3(), mf.zero2()):
        spec = mf.plan(params, mesh_of(world), preset, split_by_row_size=True, grad_scale=float(world), **options)
        assert len(spec.unit_groups("l.0")) == 2 and len({group.name for group in spec.groups}) == 3
        assert padding(spec) < padding(mf.plan(params, mesh_of(world), preset, **options))
        state, grads = mf.shard(params, spec), None
        for micro in range(2):
            grads = mf.value_and_grad(loss, is_last_microbatch=micro == 1, accumulate=grads)(state, micro)[1]
        assert grads is not None
        wanted = {name: sum(data(name, m, r) for m in range(2) for r in range(world)) for name in params}
        assert_equal(mf.unshard(grads), wanted, world)  # pyright: ignore[reportArgumentType]
        assert_equal(mf.unshard(state), params, world)
        assert list(mf.to_dtensors(state)) == list(params)


@pytest.mark.parametrize("world", SPLIT)
def test_a_unit_of_several_groups_of_one_dtype(world: int) -> None:
    run_ranks(world, split_training)
