"""What a call's hooks save for backward instead of tensors.

Private torch API here, with a test that fails when it goes: `Tensor._version`.
"""

from __future__ import annotations

import torch

from .errors import StateError, bad
from .tape_record import Record, Slot
from .tensor_parallel import TensorParallel


class Saved:
    """A view saved for backward: which buffer, its geometry in it, and how many uses of units there had been."""

    __slots__ = ("dtype", "number", "offset", "parallel", "position", "record", "shape", "slot", "stride")

    def __init__(
        self,
        record: Record,
        slot: Slot,
        position: int,
        number: int,
        view: torch.Tensor,
        parallel: TensorParallel | None,
    ) -> None:
        self.record, self.slot, self.position, self.number = record, slot, position, number
        self.parallel = parallel  # of the DTensor whose local part the view is
        self.dtype, self.shape, self.stride = view.dtype, view.shape, view.stride()
        self.offset = view.storage_offset()


class Kept:
    """A tensor saved as it is, and its version: with hooks, autograd doesn't check for itself that none wrote to it."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def get(self) -> torch.Tensor:
        """The tensor, unchanged.

        Raises:
            StateError: it was written to.
        """
        if self.version is not None and self.tensor._version != self.version:
            raise StateError(
                bad(
                    "loss_fn",
                    f"an in-place write to a tensor of shape {tuple(self.tensor.shape)} that backward needs",
                    "tensors that stay as they were saved",
                    "write to a copy; torch.autograd.set_detect_anomaly(True) tells which operation saved it",
                )
            )
        return self.tensor
