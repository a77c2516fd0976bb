"""What a differentiated function returns: its loss or outputs checked, and values taken off the graph."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import optree
import torch

from .checks import shown
from .errors import StateError, bad


def check_loss(result: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    """The loss and aux that a loss function returned.

    Raises:
        StateError: not a scalar of a floating-point dtype, or no aux where it is wanted.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise StateError(
            bad(
                "loss_fn",
                f"a function returning a {type(result).__name__}",
                "(loss, aux)",
                "return both, or leave out has_aux=True",
            )
        )
    loss, aux = result if has_aux else (result, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        got = f"a scalar of {loss.dtype}" if isinstance(loss, torch.Tensor) and loss.numel() == 1 else got
        raise StateError(
            bad(
                "loss_fn",
                f"a function returning {got}",
                "a scalar tensor of floats",
                "reduce the loss, or pass has_aux=True if it returns (loss, aux)",
            )
        )
    return loss, aux


def check_cotangents(outputs: list[Any], cotangents: dict[int, Any]) -> None:
    """Refuse cotangents that don't fit what they are of.

    Raises:
        StateError: naming `cotangent`.
    """
    for number, output in enumerate(outputs):
        cotangent = cotangents.get(number)
        if not isinstance(output, torch.Tensor) or cotangent is None:
            continue
        if (
            not isinstance(cotangent, torch.Tensor)
            or cotangent.shape != output.shape
            or (cotangent.is_complex() and not output.is_complex())
        ):
            got = f"shape {tuple(cotangent.shape)}" if isinstance(cotangent, torch.Tensor) else shown(cotangent)
            got += f", {cotangent.dtype}" if isinstance(cotangent, torch.Tensor) and cotangent.is_complex() else ""
            raise StateError(
                bad(
                    "cotangent",
                    got,
                    f"a tensor of shape {tuple(output.shape)}, or None for zero",
                    "give one in the structure of `out`",
                )
            )


def check_outputs(leaves: list[Any]) -> None:
    """Refuse outputs that a cotangent could not be given for.

    Raises:
        StateError: an object that no pytree library takes apart, with tensors of the graph in it.
    """
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and _holds_graph(leaf):
            raise StateError(
                bad(
                    "fn",
                    f"a function that returns {shown(leaf)}, with tensors that require grad in it",
                    "tensors in containers that optree knows",
                    "return them in a dict, list or tuple, or register the class with optree",
                )
            )


def detached(value: Any) -> Any:
    """`value` with its tensors detached, those in dataclasses and in subclasses of dict too, which are copied."""
    return optree.tree_map(_detached_leaf, value, none_is_leaf=True)


def _detached_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if not _holds_graph(leaf):
        return leaf
    copied = copy.copy(leaf)
    if isinstance(leaf, dict):
        for key, item in leaf.items():
            copied[key] = detached(item)
    for name, part in _fields(leaf).items():  # an object may be both
        object.__setattr__(copied, name, detached(part))  # frozen ones too
    return copied


def _fields(leaf: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return {}
    return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}


def _holds_graph(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.requires_grad
    values = [*_fields(leaf).values(), *(leaf.values() if isinstance(leaf, dict) else ())]
    return any(_holds_graph(part) for value in values for part in optree.tree_leaves(value))
