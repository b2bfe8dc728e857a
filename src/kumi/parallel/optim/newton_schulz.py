"""Orthogonalisation of matrices by Newton-Schulz iterations: matmuls move all singular values close to 1."""

from __future__ import annotations

import torch
from torch import Tensor

# Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/), and torch.optim.Muon: five steps of
# a X + b (X X^T) X + c (X X^T)^2 X bring all but very small singular values to between about 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# The smallest norm by which a matrix is divided.
_EPS = 1e-7


def newton_schulz_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that parameters of `dtype` are orthogonalised in: bfloat16 as in PyTorch, or float64."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return `matrices` (rows, columns) or (count, rows, columns), each orthogonalised, in their dtype."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The Frobenius norm bounds the largest singular value.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    a, b, c = _COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = _scaled_sum(x, _scaled_sum(gram, gram, gram, b, c), x, a, 1.0)
    return x.mT if tall else x


def _scaled_sum(added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta * added + alpha * left @ right, in one kernel."""
    function = torch.addmm if added.ndim == 2 else torch.baddbmm
    return function(added, left, right, beta=beta, alpha=alpha)
