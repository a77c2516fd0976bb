"""Newton-Schulz orthogonalisation of a matrix or of a batch of matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

Coefficients = tuple[float, float, float]


def newton_schulz(matrix: torch.Tensor, coefficients: Coefficients, steps: int, eps: float) -> torch.Tensor:
    """The quintic iteration in bfloat16, operation for operation what `torch.optim.Muon` does.

    A batch ``(k, m, n)`` is done in batched products, which may round otherwise than single ones.

    Args:
        matrix: ``(m, n)`` or ``(k, m, n)``, any floating dtype; not written to.
        coefficients: of ``a X + b (X X') X + c (X X')^2 X``.
        steps: iterations.
        eps: floor of the Frobenius norm that the matrix is divided by.

    Returns:
        The result, bfloat16, of the same shape.

    Source: Keller Jordan's Muon; `torch.optim.Muon`.
    """
    a, b, c = coefficients
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(torch.bfloat16, copy=True)  # divided in place below
    x = x.mT if tall else x
    if matrix.ndim == 2:
        x.div_(x.norm().clamp(min=eps))
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    else:
        x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def gram_newton_schulz(matrix: torch.Tensor, coefficients: Coefficients, steps: int, eps: float) -> torch.Tensor:
    """The same polynomial, iterated on the small Gram matrix in float32.

    With ``G = X X'`` each step is ``P = a + b G + c G^2``, ``G <- P G P``, ``Q <- P Q``, and the result is ``Q X``:
    besides forming ``G`` and the last product, all work is on ``min(m, n)``-sized squares. It pays for matrices that
    are much longer than wide.

    Numerics: equal to `newton_schulz` in exact arithmetic, not in floating point. The input is rounded to bfloat16
    alike, products are in float32 (or TF32, where that is allowed), so the result is nearer to the exact polynomial;
    differences are those of bfloat16 Newton-Schulz, about 1e-2 of the largest singular value. Small singular values
    are squared in ``G``: those below about 3e-4 of the Frobenius norm are lost in it, and are then scaled by ``a``
    a step like smaller ones.

    Args and result as `newton_schulz`.
    """
    a, b, c = coefficients
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(torch.bfloat16).float()
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    gram = x @ x.mT
    one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    total = one
    for step in range(steps):
        factor = a * one + b * gram + c * (gram @ gram)
        total = factor if step == 0 else factor @ total
        gram = factor @ gram @ factor
    x = (total @ x).to(torch.bfloat16)
    return x.mT if tall else x


@functools.cache
def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.compile` of one of the above, one graph a shape; rounding may differ from eager."""
    return torch.compile(function, fullgraph=True, dynamic=False)
