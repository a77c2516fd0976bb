"""Pytrees of tensors as templates: flatten with dotted paths, rebuild, and cut out a unit's subtree.

optree does the work for every container it knows, registered dataclasses included. Dicts are handled here, for
two reasons: their insertion order is the order of registration (optree sorts keys), and one key may hold
several path components (``"blocks.0.attn.weight"``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import optree

from .errors import PlanError, StateError, bad


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Place of leaf number `index`."""

    index: int


@dataclasses.dataclass(frozen=True)
class Absent:
    """Place of a subtree that was cut out of a sequence or dataclass; rebuilt as None."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One container: how to rebuild it, and its children by path entry."""

    kind: type
    entries: tuple[Any, ...]
    children: tuple[Template, ...]
    unflatten: Callable[[Sequence[Any]], Any] | None = dataclasses.field(compare=False)  # None: a dict


Template = Leaf | Node | Absent
_DICTS = (dict, OrderedDict, defaultdict)


def _rebuild(unflatten: Callable[..., Any], metadata: Any, values: Sequence[Any]) -> Any:
    return unflatten(metadata, list(values))


def _one_level(tree: Any, namespace: str) -> Node | None:
    """The node at the top of `tree`, its children still raw trees; None if `tree` is a leaf."""
    if type(tree) in _DICTS:
        kind = OrderedDict if type(tree) is OrderedDict else dict  # a default_factory is nothing to rebuild
        return Node(kind, tuple(tree.keys()), tuple(tree.values()), None)
    if optree.tree_is_leaf(tree, namespace=namespace):
        return None
    children, metadata, entries, unflatten = optree.tree_flatten_one_level(tree, namespace=namespace)
    if optree.is_namedtuple(tree):
        entries = type(tree)._fields  # optree says 0, 1, …
    raw: tuple[Any, ...] = tuple(children)
    return Node(type(tree), tuple(entries), raw, functools.partial(_rebuild, unflatten, metadata))


def components(entry: Any) -> tuple[str, ...]:
    """Path components of one entry; a dict key with dots has several."""
    return tuple(str(entry).split("."))


def flatten(
    tree: Any, namespace: str = "", *, is_leaf: Callable[[Any], bool] = lambda node: False
) -> tuple[list[Any], list[tuple[str, ...]], Template]:
    """Leaves in insertion order, the path components of each, and the template to rebuild with.

    >>> flatten({"b": [1, 2], "a.c": 3})[:2]
    ([1, 2, 3], [('b', '0'), ('b', '1'), ('a', 'c')])
    """
    leaves: list[Any] = []
    paths: list[tuple[str, ...]] = []
    return leaves, paths, _walk(tree, (), leaves, paths, namespace, is_leaf)


# Not a closure inside `flatten`: one that calls itself is a reference cycle, which would keep the leaves alive until
# a garbage collection.
def _walk(
    tree: Any,
    path: tuple[str, ...],
    leaves: list[Any],
    paths: list[tuple[str, ...]],
    namespace: str,
    is_leaf: Callable[[Any], bool],
) -> Template:
    node = None if is_leaf(tree) else _one_level(tree, namespace)
    if node is None:
        leaves.append(tree)
        paths.append(path)
        return Leaf(len(leaves) - 1)
    children = tuple(
        _walk(child, path + components(entry), leaves, paths, namespace, is_leaf)
        for entry, child in zip(node.entries, node.children, strict=True)
    )
    return dataclasses.replace(node, children=children)


def flatten_like(template: Template, tree: Any, argument: str, namespace: str = "") -> dict[int, Any]:
    """Leaves of `tree` by their index in `template`; None where the tree says None in a leaf's place.

    Raises:
        StateError: `tree` doesn't have the template's structure; names the first path where it differs.
    """
    leaves: dict[int, Any] = {}
    _match(template, tree, (), leaves, argument, namespace)
    return leaves


def _match(
    template: Template, tree: Any, path: tuple[str, ...], leaves: dict[int, Any], argument: str, namespace: str
) -> None:
    if isinstance(template, Absent):
        return
    where = ".".join(path) or "the top"
    if isinstance(template, Leaf):
        if tree is not None and _one_level(tree, namespace) is not None:
            raise StateError(
                bad(
                    argument,
                    f"a {type(tree).__name__} at {where}",
                    "a tensor or None",
                    "give the structure that was planned",
                )
            )
        leaves[template.index] = tree
        return
    node = _one_level(tree, namespace)
    same = node is not None and (node.kind is template.kind or node.unflatten is template.unflatten is None)
    if same and node is not None:
        same = (
            set(node.entries) == set(template.entries) if node.unflatten is None else node.entries == template.entries
        )
    if not same or node is None:
        got = f"a {type(tree).__name__} at {where}"
        if node is not None:
            differing = sorted(map(str, set(node.entries) ^ set(template.entries)))
            got += f" that differs in {differing[:3]}" if differing else ""
        raise StateError(
            bad(
                argument,
                got,
                f"a {template.kind.__name__} with {len(template.entries)} entries, as planned",
                "give the structure that was planned, or plan again",
            )
        )
    by_entry = dict(zip(node.entries, node.children, strict=True))
    for entry, child in zip(template.entries, template.children, strict=True):
        _match(child, by_entry[entry], path + components(entry), leaves, argument, namespace)


def build(template: Template, values: Any) -> Any:
    """The tree with ``values[index]`` in each leaf's place.

    >>> build(flatten({"a": [1, 2]})[2], [10, 20])
    {'a': [10, 20]}
    """
    if isinstance(template, Leaf):
        return values[template.index]
    if isinstance(template, Absent):
        return None
    children = [build(child, values) for child in template.children]
    if template.unflatten is None:
        return template.kind(zip(template.entries, children, strict=True))
    return template.unflatten(children)


def leaf_indices(template: Template) -> Iterator[int]:
    """Indices of all leaves below `template`."""
    if isinstance(template, Leaf):
        yield template.index
    elif isinstance(template, Node):
        for child in template.children:
            yield from leaf_indices(child)


def leaf_paths(template: Template, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Path components of all leaves below `template`, in order."""
    if isinstance(template, Leaf):
        yield path
    elif isinstance(template, Node):
        for entry, child in zip(template.entries, template.children, strict=True):
            yield from leaf_paths(child, path + components(entry))


def prune(template: Template, keep: Collection[int]) -> Template:
    """Cut out subtrees none of whose leaves are kept: dropped from dicts, None elsewhere."""
    if isinstance(template, Leaf):
        return template if template.index in keep else Absent()
    if isinstance(template, Absent):
        return template
    pairs = []
    for entry, child in zip(template.entries, template.children, strict=True):
        leaves = list(leaf_indices(child))
        cut = bool(leaves) and not any(index in keep for index in leaves)
        if cut and template.unflatten is None:
            continue
        pairs.append((entry, Absent() if cut else prune(child, keep)))
    return dataclasses.replace(
        template, entries=tuple(entry for entry, _ in pairs), children=tuple(child for _, child in pairs)
    )


def subtree(template: Template, path: tuple[str, ...], keep: Collection[int]) -> Template:
    """The part of `template` at `path`, pruned to `keep`.

    Where `path` ends inside dotted dict keys, a dict of the keys' remainders.

    >>> names = flatten({"l.0.w": 1, "l.0.b": 2, "l.1.w": 3})[2]
    >>> build(subtree(names, ("l", "0"), {0, 1}), "xyz")
    {'w': 'x', 'b': 'y'}
    """
    if not path or not isinstance(template, Node):
        return prune(template, keep)
    rest: list[tuple[str, Template]] = []
    for entry, child in zip(template.entries, template.children, strict=True):
        parts = components(entry)
        if path[: len(parts)] == parts:
            if any(index in keep for index in leaf_indices(child)):
                return subtree(child, path[len(parts) :], keep)
        elif template.unflatten is None and parts[: len(path)] == path:
            rest.append((".".join(parts[len(path) :]), child))
    node = Node(dict, tuple(key for key, _ in rest), tuple(child for _, child in rest), None)
    return prune(node, keep)


def is_mixed(template: Template) -> bool:
    """Whether some dict has a container at a key and dotted keys that lead into the same path.

    >>> is_mixed(flatten({"l": {"w": 1}, "l.b": 2})[2]), is_mixed(flatten({"l.w": 1, "l.b": 2})[2])
    (True, False)
    """
    if not isinstance(template, Node):
        return False
    if template.unflatten is None:
        pairs = zip(template.entries, template.children, strict=True)
        nested = {components(entry) for entry, child in pairs if isinstance(child, Node)}
        for entry in template.entries if nested else ():
            parts = components(entry)
            if any(parts[:depth] in nested for depth in range(1, len(parts))):
                return True
    return any(is_mixed(child) for child in template.children)


def check_paths(paths: Sequence[tuple[str, ...]]) -> None:
    """Refuse two leaves with one dotted path.

    Raises:
        PlanError: naming the path.
    """
    seen: set[tuple[str, ...]] = set()
    for path in paths:
        if path in seen:
            raise PlanError(
                bad(
                    "params",
                    f"two leaves at path {'.'.join(path)!r}",
                    "one leaf a path",
                    "rename one: nested keys and dotted keys share one name space",
                )
            )
        seen.add(path)
