"""Pytrees as templates: paths, order, rebuilding, and what a unit's subtree is."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import optree.dataclasses as optree_dataclasses
import pytest

from mfsdp_fn import PlanError, StateError, tree

Pair = namedtuple("Pair", ["left", "right"])
NAMESPACE = "test_tree"


@optree_dataclasses.dataclass(namespace=NAMESPACE)
class Layer:
    w: Any
    b: Any
    name: str = optree_dataclasses.field(default="layer", pytree_node=False)


def paths(value: Any, namespace: str = "") -> list[str]:
    return [".".join(path) for path in tree.flatten(value, namespace)[1]]


def cut(value: Any, path: str, keep: set[int], namespace: str = "") -> Any:
    leaves, _, template = tree.flatten(value, namespace)
    return tree.build(tree.subtree(template, tuple(path.split(".")) if path else (), keep), leaves)


def test_order_is_that_of_insertion() -> None:
    names = [f"blocks.{i}.w" for i in range(12)]
    assert paths({"z": 0, **dict.fromkeys(names, 1), "a": 2}) == ["z", *names, "a"]
    nested = {"z": 0, "blocks": {str(i): {"w": i} for i in range(12)}, "a": 1}
    assert paths(nested) == ["z", *names, "a"]
    assert list(tree.build(tree.flatten(nested)[2], range(14))) == ["z", "blocks", "a"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, (2, 3)], "b": {"c": 4}}, ["a.0", "a.1.0", "a.1.1", "b.c"]),
        (Pair({"x.y": 1}, [2]), ["left.x.y", "right.0"]),
        ({0: 1, 1: {2: 3}}, ["0", "1.2"]),
        (OrderedDict(b=1, a=2), ["b", "a"]),
        (7, [""]),
        ({"a": None, "b": 1, "c": {}}, ["b"]),
        (Layer(w={"q": 1}, b=2, name="n"), ["w.q", "b"]),
    ],
)
def test_paths_and_round_trip(value: Any, expected: list[str]) -> None:
    leaves, _, template = tree.flatten(value, NAMESPACE)
    assert paths(value, NAMESPACE) == expected
    back = tree.build(template, leaves)
    assert back == value and type(back) is type(value)
    assert tree.flatten_like(template, value, "x", NAMESPACE) == dict(enumerate(leaves))


def test_a_registered_node_needs_its_namespace() -> None:
    layer = Layer(w=1, b=2)
    assert tree.flatten(layer)[0] == [layer]
    assert tree.flatten(layer, NAMESPACE)[0] == [1, 2]


def test_a_defaultdict_comes_back_as_a_dict() -> None:
    value = defaultdict(list, b=1, a=2)
    leaves, _, template = tree.flatten(value)
    back = tree.build(template, leaves)
    assert type(back) is dict and list(back) == ["b", "a"]
    assert tree.flatten_like(template, {"a": 20, "b": 10}, "x") == {0: 10, 1: 20}


def test_subtree_of_nested_and_of_dotted_dicts() -> None:
    nested = {"emb": 0, "l": {"0": {"w": 1, "b": 2}, "1": {"w": 3}}}
    assert cut(nested, "l.0", {1, 2}) == {"w": 1, "b": 2}
    assert cut(nested, "", {0}) == {"emb": 0}
    assert cut(nested, "", {0, 3}) == {"emb": 0, "l": {"1": {"w": 3}}}
    dotted = {"emb": 0, "l.0.w": 1, "l.0.a.b": 2, "l.1.w": 3}
    assert cut(dotted, "l.0", {1, 2}) == {"w": 1, "a.b": 2}
    assert cut(dotted, "", {0}) == {"emb": 0}
    assert cut(dotted, "l.1.w", {3}) == 3
    half = {"model.l": {"0.w": 1, "1.w": 2}, "model.n": 3}
    assert cut(half, "model.l.0", {0}) == {"w": 1}
    assert cut(half, "model", {2}) == {"n": 3}


def test_subtree_of_sequences_and_dataclasses_has_none_where_it_was_cut() -> None:
    value = {"l": [Layer(1, 2), Layer(3, 4)], "t": (5, {"x": 6}), "p": Pair(7, 8)}
    assert cut(value, "l.1", {2, 3}, NAMESPACE) == Layer(3, 4)
    assert cut(value, "l.1", {2}, NAMESPACE) == Layer(3, None)
    assert cut(value, "", {4, 5, 6}, NAMESPACE) == {"t": (5, {"x": 6}), "p": Pair(7, None)}
    assert cut(value, "", {0, 5}, NAMESPACE) == {"l": [Layer(1, None), None], "t": (None, {"x": 6})}
    # Containers without leaves belong to nobody and are kept.
    assert cut({"a": {}, "b": [None], "c": 1}, "", {0}) == {"a": {}, "b": [None], "c": 1}


def test_two_leaves_at_one_path_are_refused() -> None:
    for value in ({"a.b": 1, "a": {"b": 2}}, {0: 1, "0": 2}):
        with pytest.raises(PlanError, match=r"`params` got two leaves at path '(a.b|0)'; expected one leaf a path"):
            tree.check_paths(tree.flatten(value)[1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1]}, r"`x` got a dict at the top that differs in \['b'\]; expected a dict with 2 entries, as planned"),
        ({"a": [1, 2], "b": 3}, "`x` got a list at a.*expected a list with 1 entries"),
        ({"a": (1,), "b": 3}, "`x` got a tuple at a; expected a list with 1 entries"),
        ({"a": [1], "b": {"c": 3}}, "`x` got a dict at b; expected a tensor or None; give the structure"),
        ([1, 2], "`x` got a list at the top"),
    ],
)
def test_another_structure_is_refused(value: Any, text: str) -> None:
    template = tree.flatten({"a": [1], "b": 2})[2]
    with pytest.raises(StateError, match=text):
        tree.flatten_like(template, value, "x")


def test_none_in_a_leafs_place_is_a_value() -> None:
    template = tree.flatten({"a": [1], "b": 2})[2]
    assert tree.flatten_like(template, {"b": None, "a": [5]}, "x") == {0: 5, 1: None}
