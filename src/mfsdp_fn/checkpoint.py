"""Checkpoints: saved at one world size and layout, loaded at any other.

In the format of `torch.distributed.checkpoint`, so that its tools read them: whole tensors by name, such as
``params.blocks.0.w`` and ``optimizer.exp_avg.blocks.0.w``, of which every rank writes and reads what it holds.
"""

from __future__ import annotations

import dataclasses
import io
import os
from typing import Any

import optree
import torch

from .checkpoint_agreement import Described, Ranks, cells_of, check_same, describe, is_value, of_optimizer
from .checkpoint_entries import OPTIMIZER, WEIGHTS, Entry, name_in, of_state
from .checkpoint_files import Reader, Writer, as_path, check_target
from .checks import shown
from .errors import StateError, bad
from .mesh import AbstractMesh
from .model_weights import sync_model_weights
from .optim import Optimizer
from .spec import ShardSpec
from .state import ShardState, Stage, check_state, with_main

__all__ = ["load", "save"]


def save(path: str | os.PathLike[str], state: ShardState, opt_state: Any, *, extra: Any = None) -> None:
    """Write weights, an optimizer's state and `extra` into the directory `path`; `load` reads it at any world size.

    Collective over the mesh (stages of a pipeline save into a directory each). Every rank writes a file with its own
    part of main weights and moments; of replicas each writes a share. No tensor is gathered, and one tensor's part at
    a time is copied. Ranks exchange objects a few times: what they write, and whether it went well. A failure on one
    rank raises on all of them.

    Files are written beside `path` and renamed when all are whole and on the disk. A save that fails leaves an older
    checkpoint at `path` as it was. Should the process die in the moment between the two renames, the older one is in
    ``.NAME.mfsdp_fn-old`` beside it, and `load` says so.

    Args:
        path: a directory on a file system that all ranks share: an earlier checkpoint, which is replaced, an empty
            directory or nothing yet.
        state: finished weights, outside `value_and_grad`.
        opt_state: the optimizer's state for them: a pytree of ShardStates, numbers, and tensors. A tensor under a
            parameter's path with the shape of this rank's rows is saved as rows, as `from_gradient_transformation`
            has them; any other must be the same on every rank. None for weights alone.
        extra: anything small that ``torch.load(weights_only=True)`` reads, the same on every rank: numbers, strings
            and tensors in dicts, lists and tuples. What differs by rank (random states) goes into a list with an
            entry a rank.

    Weights of a unit with a mesh of its own (experts) are saved apart for each such set of ranks, and loaded where
    there are as many. A tied tensor is saved once. DTensor parameters are saved whole.

    Raises:
        StateError: an argument that can't be saved, or differs between ranks, by name, before anything is written;
            or that another rank failed, with its error.
        OSError: on the rank that could not write.

    >>> import tempfile, torch, mfsdp_fn as mf
    >>> params = {"w": torch.ones(2, requires_grad=True)}
    >>> opt = mf.optim.adamw(lr=0.1)
    >>> with mf.testing.single_rank() as mesh, tempfile.TemporaryDirectory() as folder:
    ...     state = mf.shard(params, mf.plan(params, mesh, mf.zero3()))
    ...     mf.checkpoint.save(f"{folder}/last", state, opt.init(state), extra={"step": 3})
    ...     spec = mf.plan(params, mesh, mf.ddp())  # another plan of the same parameters
    ...     state, opt_state, extra = mf.checkpoint.load(f"{folder}/last", spec, opt)
    ...     mf.unshard(state), extra
    ({'w': tensor([1., 1.])}, {'step': 3})
    """
    if not isinstance(state, ShardState):
        check_state(state, "state")
    spec = state.spec
    ranks = Ranks(spec)
    told, mine = ranks.agree(lambda: _described(path, state, opt_state, extra))
    check_same(told)
    index = {"extra": extra, "values": {leaf.name: leaf.value for leaf in mine.leaves if is_value(leaf.value)}}
    entries = of_state(state, WEIGHTS, cells_of(told, mine, spec))
    entries += of_optimizer(told, mine, spec, first=ranks.number == 0)
    writer = Writer(as_path(path), entries)
    try:
        ranks.agree(writer.clear if ranks.number == 0 else _nothing)
        plans, _ = ranks.agree(writer.plan)
        results, _ = ranks.agree(lambda: writer.write(plans, ranks.number))
        ranks.agree((lambda: writer.finish(plans, results, index)) if ranks.number == 0 else _nothing)
    except BaseException:
        if ranks.number == 0:
            writer.abandon()
        raise


def load(path: str | os.PathLike[str], spec: ShardSpec, opt: Optimizer | None) -> tuple[ShardState, Any, Any]:
    """``(state, opt_state, extra)`` of a checkpoint, laid out as `spec` says: of another world size, say.

    Collective. Every rank reads its own part of main weights and moments, a stored box (at most one tensor) at a
    time. Compute weights are made again by `sync_model_weights`, with what that communicates. ``opt.init`` is called
    with zeros, for the structure of its state; tensors of `extra` come back on the CPU.

    The names, shapes and dtypes of the checkpoint must be those of `spec` and `opt`: nothing is cast, nothing left
    out. Load only what you trust: torch's own part of the format, ``.metadata``, is a pickle.

    Args:
        path: a directory that `save` wrote.
        spec: a plan of the same parameters, with any placements, mesh, units and layout.
        opt: an optimizer of the kind that was saved; its options may be others. None for weights alone.

    Raises:
        StateError: no checkpoint at `path`; a tensor that one side lacks, or of another shape or dtype, by name;
            or that another rank failed, with its error.

    >>> import mfsdp_fn as mf
    >>> spec = mf.plan({"w": torch.ones(2, requires_grad=True)}, mf.AbstractMesh((1,), ("dp",)), mf.zero3())
    >>> mf.checkpoint.load("/nowhere", spec, None)
    Traceback (most recent call last):
        ...
    mfsdp_fn.errors.StateError: `path` got /nowhere, where there is nothing; expected a directory that
    checkpoint.save wrote; see the path.
    """
    if not isinstance(spec, ShardSpec):
        raise StateError(bad("spec", shown(spec), "a ShardSpec", "make one with plan(params, …)"))
    ranks = Ranks(spec)
    _, reader = ranks.agree(lambda: _opened(path, spec, opt), send=_nothing)
    told, (mine, state) = ranks.agree(lambda: _empty(path, spec, opt), send=lambda made: made[0])
    check_same(told)
    weights = of_state(state, WEIGHTS, cells_of(told, mine, spec))
    moments = of_optimizer(told, mine, spec, first=False)
    values = [leaf.name for leaf in mine.leaves if is_value(leaf.value)]

    def planned() -> Any:
        _check_stored(reader, weights + moments, values, with_optimizer=opt is not None)
        return reader.plan(weights + moments)

    _, plan = ranks.agree(planned, send=_nothing)
    ranks.agree(lambda: reader.read(*plan))
    new = [reader.index["values"][leaf.name] if is_value(leaf.value) else leaf.value for leaf in mine.leaves]
    opt_state = None if opt is None else optree.tree_unflatten(mine.treespec, new)
    return sync_model_weights(state), opt_state, reader.index["extra"]


def _described(path: Any, state: ShardState, opt_state: Any, extra: Any) -> Described:
    check_target(as_path(path))
    check_state(state, "state")
    if state.stage is not Stage.FINAL:
        raise StateError(bad("state", "accumulating gradients", "weights", "pass the state of weights"))
    if state.gatherer is not None:
        raise StateError(bad("state", "the state inside of a loss function", "one outside", "save after the step"))
    _check_mesh("state", state.spec)
    stream = io.BytesIO()
    try:
        torch.save(extra, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:
        raise StateError(
            bad(
                "extra",
                f"what torch.load(weights_only=True) doesn't read ({str(error).splitlines()[0]})",
                "numbers, strings and tensors, in dicts, lists and tuples",
                "leave out or convert other objects",
            )
        ) from error
    return describe(str(as_path(path)), state.spec, opt_state, extra)


def _opened(path: Any, spec: ShardSpec, opt: Any) -> Reader:
    target = as_path(path)
    _check_mesh("spec", spec)
    if opt is not None and not all(callable(getattr(opt, name, None)) for name in ("init", "step")):
        raise StateError(bad("opt", shown(opt), "an optimizer, or None", "pass optim.adamw(lr=3e-4)"))
    return Reader(target)


def _check_mesh(argument: str, spec: ShardSpec) -> None:
    if isinstance(spec.mesh, AbstractMesh) and spec.mesh.size() > 1:
        raise StateError(
            bad(argument, "a plan on an AbstractMesh of several ranks", "one on a DeviceMesh", "plan with a real mesh")
        )


def _empty(path: Any, spec: ShardSpec, opt: Optimizer | None) -> tuple[Described, ShardState]:
    """A state of zeros and an optimizer's state for it, to be read into."""
    main = tuple(torch.zeros(g.main_range.size, dtype=g.dtypes.main, device=spec.device) for g in spec.groups)
    state = ShardState(main=main, compute=(None,) * len(main), spec=spec)
    opt_state = None if opt is None else opt.init(state)
    described = describe(str(as_path(path)), spec, opt_state, None)
    seen = {buffer.untyped_storage().data_ptr() for buffer in main if buffer.numel()}
    own = [dataclasses.replace(leaf, value=_own(leaf.value, seen)) for leaf in described.leaves]
    return dataclasses.replace(described, leaves=own), state


def _own(value: Any, seen: set[int]) -> Any:
    """A leaf with memory of its own: an optimizer may have made two moments of one tensor, or kept the weights."""
    if isinstance(value, ShardState):
        return with_main(value, tuple(_own(buffer, seen) for buffer in value.main))
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    value = value.detach()
    if value.untyped_storage().data_ptr() in seen or not value.is_contiguous():
        value = value.clone(memory_format=torch.contiguous_format)
    seen.add(value.untyped_storage().data_ptr())
    return value


def _check_stored(reader: Reader, entries: list[Entry], values: list[str], *, with_optimizer: bool) -> None:
    """Refuse a checkpoint of other tensors than those wanted.

    Raises:
        StateError: naming the first one.
    """
    for entry in entries:
        stored = reader.stored.get(entry.name)
        if stored is None:
            raise StateError(
                bad(
                    "path",
                    f"a checkpoint without {entry.name!r}",
                    f"one of these parameters and this optimizer, with {entry.name!r}",
                    "plan what was saved, and pass an optimizer of its kind",
                )
            )
        got, wanted = (tuple(stored.size), stored.properties.dtype), (tuple(entry.shape), entry.dtype)
        if got != wanted:
            fix = "plan with the main dtype that was saved" if got[0] == wanted[0] else "plan what was saved"
            raise StateError(
                bad("path", f"{got} for {entry.name!r}", f"{wanted}, as planned", f"{fix}: nothing is cast")
            )
    known = {name_in(entry.path, cell, entry.cell[1]) for entry in entries for cell in range(entry.cell[1])}
    saved = {*reader.stored, *reader.index["values"]}
    unknown = sorted(
        name for name in saved ^ (known | {*values}) if with_optimizer or not name.startswith(f"{OPTIMIZER}.")
    )
    if unknown:
        side = "with" if unknown[0] in saved else "without"
        raise StateError(
            bad(
                "path",
                f"a checkpoint {side} {unknown[0]!r} ({len(unknown) - 1} more like it)",
                "the same names on both sides",
                "plan what was saved, and pass an optimizer of its kind; opt=None loads weights alone",
            )
        )


def _nothing(*_: Any) -> None:
    """What there is to do, or to send, on some ranks."""
