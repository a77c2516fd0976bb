"""Which dtype each buffer of a group has."""

from __future__ import annotations

import dataclasses

import torch

from .errors import PlanError, bad


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a group's buffers; None means the parameter's own dtype.

    Args:
        compute: gathered weights, as `unshard` returns them.
        main: weights as the optimizer sees them (trainable groups only; a frozen group keeps its own dtype).
        grad: the stored gradient.
        reduce: the wire of the gradient reduction.

    Dtypes apply to floating-point parameters; integer ones always keep theirs.

    >>> MixedPrecisionPolicy(compute=torch.bfloat16).resolve(torch.float32, requires_grad=True).compute
    torch.bfloat16
    """

    compute: torch.dtype | None = None
    main: torch.dtype | None = torch.float32
    grad: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def resolve(self, dtype: torch.dtype, *, requires_grad: bool) -> GroupDtypes:
        """The dtypes of a group whose parameters have `dtype`."""
        if not dtype.is_floating_point:
            return GroupDtypes(dtype, dtype, dtype, dtype)
        main = self.main or dtype
        return GroupDtypes(
            compute=self.compute or dtype,
            main=main if requires_grad else dtype,
            grad=self.grad or dtype,
            reduce=self.reduce or dtype,
        )


@dataclasses.dataclass(frozen=True)
class GroupDtypes:
    """`MixedPrecisionPolicy` resolved for one group."""

    compute: torch.dtype
    main: torch.dtype
    grad: torch.dtype
    reduce: torch.dtype


def check_precision(policy: MixedPrecisionPolicy) -> None:
    """Refuse dtypes that aren't floating point.

    Raises:
        PlanError: naming the field.
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        raise PlanError(
            bad(
                "precision",
                repr(policy),
                "a MixedPrecisionPolicy",
                "write MixedPrecisionPolicy(compute=torch.bfloat16)",
            )
        )
    for field in dataclasses.fields(policy):
        dtype = getattr(policy, field.name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise PlanError(
                bad(
                    f"precision.{field.name}",
                    dtype,
                    "a floating-point torch.dtype or None",
                    "integer parameters keep their dtype whatever the policy says",
                )
            )
