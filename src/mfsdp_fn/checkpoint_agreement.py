"""What ranks tell each other of a checkpoint: what they hold, whether it is the same, and whether it went well."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optree
import torch

from .checkpoint_entries import OPTIMIZER, Cells, Entry, OptLeaf, is_rows, of_rows, of_state, of_whole, opt_leaves
from .communicators import exchange_objects, ranks_of, this_rank
from .errors import StateError, bad
from .spec import ShardSpec
from .state import ShardState

T = TypeVar("T")


class Ranks:
    """All ranks that a plan's parameters lie on: its mesh, and the axes that DTensors lie over beside it."""

    def __init__(self, spec: ShardSpec) -> None:
        self.mesh = spec.mesh
        self.beside = next((leaf.parallel.mesh for leaf in spec.leaves if leaf.parallel is not None), None)
        self.number = 0

    def agree(self, fn: Callable[[], T], *, send: Callable[[T], Any] = lambda result: result) -> tuple[list[Any], T]:
        """What `fn` gave on every rank, and here.

        Raises:
            Exception: what `fn` raised here.
            StateError: telling what it raised on another rank.
        """
        failure, result, sent = None, None, None
        try:
            result = fn()
            sent = send(result)
        except Exception as error:
            failure = error
        rank = this_rank(self.mesh)
        told = exchange_objects(self.mesh, (rank, failure and f"{type(failure).__name__}: {failure}", sent))
        if self.beside is not None:
            told = [one for row in exchange_objects(self.beside, told) for one in row]
        self.number = [one[0] for one in told].index(rank)
        if failure is not None:
            raise failure
        for other, text, _ in told:
            if text is not None:
                raise StateError(f"rank {other} failed, and so no rank went on: {text}")
        made: Any = result
        return [one for _, _, one in told], made


@dataclasses.dataclass(frozen=True, eq=False)
class Described:
    """What ranks tell each other before anything is written or read; `leaves` and `treespec` stay here."""

    path: str
    names: str
    meshes: tuple[tuple[int, ...], ...]
    rows: tuple[bool, ...]  # by leaf: whether it may be this rank's rows of a parameter
    digests: tuple[str, ...]  # by leaf: of what must be the same on every rank; "" of what need not
    extra: str
    leaves: Sequence[OptLeaf] = ()
    treespec: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "leaves": (), "treespec": None}


def describe(path: str, spec: ShardSpec, opt_state: Any, extra: Any) -> Described:
    """This rank's description.

    Raises:
        StateError: an optimizer's state that can't be saved, by name.
    """
    leaves, treespec = opt_leaves(opt_state, spec)
    rows = tuple(
        isinstance(leaf.value, torch.Tensor)
        and leaf.parameter is not None
        and is_rows(leaf.value, leaf.parameter, spec)
        for leaf in leaves
    )
    alike = [
        not isinstance(leaf.value, ShardState) and not (mine and leaf.value.dim())
        for leaf, mine in zip(leaves, rows, strict=True)
    ]
    return Described(
        path=path,
        names=_digest([(leaf.name, type(leaf.value).__name__) for leaf in leaves]),
        meshes=tuple(ranks_of(mesh) for mesh in spec.meshes),
        rows=rows,
        digests=tuple(_digest(leaf.value) if same else "" for leaf, same in zip(leaves, alike, strict=True)),
        extra=_digest(extra),
        leaves=leaves,
        treespec=treespec,
    )


def _digest(tree: Any) -> str:
    """The same for equal values: pickles also tell which objects are one."""
    leaves, treespec = optree.tree_flatten(tree, none_is_leaf=True)
    found = hashlib.sha256(repr(treespec).encode())
    for leaf in leaves:
        stream = io.BytesIO()
        if isinstance(leaf, torch.Tensor):
            torch.save(leaf.detach().to("cpu", copy=True).contiguous(), stream)
        found.update(stream.getvalue() or repr(leaf).encode())
    return found.hexdigest()


def check_same(told: list[Described]) -> None:
    """Refuse what differs between ranks. On every rank alike.

    Raises:
        StateError: naming the argument.
    """
    first = told[0]
    for rank, other in enumerate(told):
        for argument, same in (
            ("path", other.path == first.path),
            ("opt_state", other.names == first.names),
            ("extra", other.extra == first.extra),
        ):
            if not same:
                got = f"{first.path} on the first rank and {other.path}" if argument == "path" else "another one"
                fix = "give what differs by rank as a list with an entry a rank" if argument == "extra" else "mend it"
                raise StateError(bad(argument, f"{got} on rank {rank} of {len(told)}", "the same on every rank", fix))


def of_optimizer(told: list[Described], mine: Described, spec: ShardSpec, *, first: bool) -> list[Entry]:
    """The tensors of an optimizer's state.

    Raises:
        StateError: a tensor that is no rank's rows and differs between ranks, by name. On every rank alike.
    """
    cells, found = cells_of(told, mine, spec), []
    for number, leaf in enumerate(mine.leaves):
        if isinstance(leaf.value, ShardState):
            found += of_state(leaf.value, leaf.name, cells)
            continue
        if leaf.parameter is not None and all(one.rows[number] for one in told):
            path = leaf.name
            found.append(of_rows(path, leaf.value, leaf.parameter, spec, cells))
            continue
        if len({one.digests[number] for one in told} - {""}) > 1:
            raise StateError(
                bad(
                    leaf.name.replace(OPTIMIZER, "opt_state", 1),
                    "another value on some rank",
                    "rows of the parameter that it is under, or the same on every rank",
                    "keep such a tensor under the parameter's path, in its rows' shape",
                )
            )
        if isinstance(leaf.value, torch.Tensor):
            found.append(of_whole(leaf.name, leaf.value, first=first))
    return found


def cells_of(told: list[Described], mine: Described, spec: ShardSpec) -> Cells:
    """Which of how many sets of ranks this rank is in, for each mesh of the plan."""
    found = {}
    for number, mesh in enumerate(spec.meshes):
        sets = sorted({tuple(sorted(one.meshes[number])) for one in told if one.meshes[0] == mine.meshes[0]})
        found[id(mesh)] = (sets.index(tuple(sorted(mine.meshes[number]))), len(sets))
    return found


def is_value(value: Any) -> bool:
    """Whether a leaf is a number or a string, which the small file holds."""
    return not isinstance(value, (torch.Tensor, ShardState))
