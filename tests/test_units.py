"""Unit patterns, and what `unshard` of a unit gives for them."""

from __future__ import annotations

from typing import Any

import optree
import optree.dataclasses as optree_dataclasses
import pytest
import torch

import mfsdp_fn as mf
from mfsdp_fn import units

NAMESPACE = "test_units"


@optree_dataclasses.dataclass(namespace=NAMESPACE)
class Layer:
    w: Any
    b: Any


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def planned(params: Any, *patterns: str) -> mf.ShardSpec:
    return mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), units=patterns, namespace=NAMESPACE)


def test_patterns_match_component_by_component() -> None:
    assert units.matches("blocks.*", ("blocks", "3"))
    assert not units.matches("blocks.*", ("blocks",))
    assert not units.matches("blocks.*", ("blocks", "3", "w"))
    assert units.matches("l*", ("l0",)) and not units.matches("l*", ("l0", "w"))
    assert units.matches("*.attn*", ("3", "attn_q"))
    assert units.matches("", ()) and not units.matches("", ("a",))


def test_longest_match_wins_whatever_the_order() -> None:
    paths = [("b", "0", "mlp", "w"), ("b", "0", "norm"), ("b", "1", "mlp", "w"), ("emb",)]
    expected = ["b.0.mlp", "b.0", "b.1.mlp", ""]
    for patterns in (["b.*", "b.*.mlp"], ["b.*.mlp", "b.*"], ["b.*.mlp", "b.*", "b.*"]):
        assert units.assign_units(paths, patterns) == expected


def test_twelve_blocks_keep_their_order() -> None:
    params = {"emb": leaf(2), **{f"blocks.{i}.w": leaf(2) for i in range(12)}, "head": leaf(2)}
    spec = planned(params, "blocks.*", "head")
    blocks = tuple(f"blocks.{i}" for i in range(12))
    assert spec.units == ("", *blocks, "head")
    assert spec.units_matching("blocks.*") == blocks
    assert [group.unit for group in spec.groups] == ["", *blocks, "head"]


def test_the_root_comes_first_wherever_its_leaves_are() -> None:
    assert planned({"l.0.w": leaf(1), "norm": leaf(1)}, "l.*").units == ("", "l.0")
    assert planned({"l.0.w": leaf(1)}, "l.*").units == ("l.0",)


def shapes(value: Any) -> Any:
    return optree.tree_map(lambda t: tuple(t.shape), value, namespace=NAMESPACE)


def test_nested_units() -> None:
    params = {"b": [{"mlp": {"w": leaf(1)}, "norm": leaf(2)}, {"mlp": {"w": leaf(3)}, "norm": leaf(4)}], "emb": leaf(5)}
    state = mf.shard(params, planned(params, "b.*", "b.*.mlp"))
    assert state.spec.units == ("", "b.0.mlp", "b.0", "b.1.mlp", "b.1")
    assert shapes(mf.unshard(state["b.0"])) == {"norm": (2,)}
    assert shapes(mf.unshard(state["b.1.mlp"])) == {"w": (3,)}
    assert shapes(mf.unshard(state[""])) == {"emb": (5,)}
    assert shapes(mf.unshard(state)) == shapes(params)


def test_units_of_dataclasses_and_lists() -> None:
    params = [Layer(leaf(1), leaf(2)), {"x.0.w": leaf(3), "x.1.w": leaf(4)}, Layer(leaf(5), leaf(6))]
    state = mf.shard(params, planned(params, "0", "1.x.*", "2.b"))
    assert state.spec.units == ("", "0", "1.x.0", "1.x.1", "2.b")
    assert shapes(mf.unshard(state["0"])) == Layer((1,), (2,))
    assert shapes(mf.unshard(state["1.x.1"])) == {"w": (4,)}
    assert mf.unshard(state["2.b"]).shape == (6,)
    root = mf.unshard(state[""])
    assert root[0] is None and root[1] is None and root[2].b is None and root[2].w.shape == (5,)


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ("blocks.*", r"`units` got 'blocks.\*'; expected a tuple of dotted patterns; write \('blocks.\*',\)"),
        (5, "`units` got 5; expected a tuple of dotted patterns"),
        (("a..b",), "`units` got 'a..b'; expected a dotted pattern such as"),
        ((3,), "`units` got 3; expected a dotted pattern"),
        (("layers.*",), r"`units` got 'layers.\*'; expected a pattern that matches the start of some path .*'l.0'"),
    ],
)
def test_bad_patterns_are_refused(patterns: Any, text: str) -> None:
    with pytest.raises(mf.PlanError, match=text):
        mf.plan({"l.0.w": leaf(1)}, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), units=patterns)


def test_unknown_units_are_refused() -> None:
    spec = planned({"l.0.w": leaf(1)}, "l.*")
    state = mf.shard({"l.0.w": leaf(1)}, spec)
    with pytest.raises(mf.PlanError, match=r"`unit` got 'l.7'; expected one of \['l.0'\]"):
        state["l.7"]
    with pytest.raises(mf.PlanError, match=r"`pattern` got 'k.\*'; expected a pattern that matches some of the units"):
        spec.units_matching("k.*")
    with pytest.raises(mf.PlanError, match=r"`path` got 'l.0'; expected one of the 1 planned paths"):
        spec.group_of("l.0")


def test_a_unit_partly_nested_and_partly_dotted_is_refused() -> None:
    params = {"l": {"0": {"w": leaf(1)}}, "l.0.b": leaf(1), "l.1.w": leaf(1)}
    with pytest.raises(mf.PlanError, match=r"unit 'l.0' both in a nested container and in dotted keys .at 'l.0.b'"):
        planned(params, "l.*")
    whole = planned(params)  # in the root there is nothing to cut
    assert whole.units == ("",)
