"""Activation checkpoints inside a transformed function: which one forward is in, and the kind that is refused.

Private torch API here, with a test that fails when it goes: `torch._C._autograd._top_saved_tensors_default_hooks`
(which units does one checkpoint compute again together).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from .errors import MfsdpError, StateError, bad

if TYPE_CHECKING:
    from .session import Session


def reentrant_error() -> MfsdpError:
    """What is said of a reentrant checkpoint."""
    return StateError(
        bad(
            "loss_fn",
            "torch.utils.checkpoint.checkpoint(…, use_reentrant=True)",
            "use_reentrant=False",
            "pass use_reentrant=False: the reentrant kind can't run under autograd.grad",
        )
    )


def refuse_reentrant_checkpoint() -> None:
    """Reentrant checkpointing runs forward without grad, which by itself is legitimate: so look who calls."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename.endswith("checkpoint.py") and "torch" in code.co_filename:
            raise reentrant_error()
        frame = frame.f_back


def refuse_reentrant_graph(outputs: list[torch.Tensor], session: Session) -> None:
    """Refuse a graph with a reentrant checkpoint in it, of which autograd would not say a word.

    A checkpointed function that only closes over gathered weights gives them no gradient at all. This walks the whole
    graph, so it is done once for a transformed function.
    """
    seen: set[Any] = set()
    queue: list[Any] = [output.grad_fn for output in outputs]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "CheckpointFunctionBackward":
            session.abandon()
            raise reentrant_error()
        queue.extend(following for following, _ in node.next_functions)


def checkpointed_region() -> object | None:
    """What identifies the non-reentrant checkpoint that forward is in; None outside one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return None
    return hooks[0]
