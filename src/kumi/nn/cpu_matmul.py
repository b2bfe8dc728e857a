"""Use the CPU's faster library for float32 matrix products if it is as accurate as the default."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# oneDNN sums in another order, so its error differs from the default library's by a small factor. If oneDNN rounds
# inputs to bfloat16 ("medium" allows that, and CPUs with bfloat16 matrix units do so), the error is thousands of times
# larger.
_ALLOWED = 4.0


@dataclass(frozen=True)
class Float32Matmul:
    """The choice of `enable_fast_float32`.

    `precision`: torch's float32 matmul precision, "medium" for oneDNN or "highest".
    `error`, `default_error`: errors by oneDNN and by PyTorch's default library, relative to the largest element.
    """

    precision: str
    error: float
    default_error: float

    def __str__(self) -> str:
        return f"float32 matmul precision {self.precision!r} (error {self.error:.1e}, default {self.default_error:.1e})"


def enable_fast_float32() -> Float32Matmul:
    """Let the CPU multiply float32 matrices by oneDNN if a check finds full float32 accuracy. Return the choice.

    torch.set_float32_matmul_precision("medium") selects oneDNN, which on many CPUs is twice as fast. If the check
    fails, the precision is left at "highest". The check compares x W^T and g^T x, the two products of training, with
    float64.
    """
    torch.set_float32_matmul_precision("highest")
    default = _error()
    torch.set_float32_matmul_precision("medium")
    error = _error()
    if error <= _ALLOWED * default:
        return Float32Matmul("medium", error, default)
    torch.set_float32_matmul_precision("highest")
    return Float32Matmul("highest", error, default)


@torch.no_grad()
def _error() -> float:
    """Return the largest error of x W^T and g^T x against float64, relative to the largest element."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(256, 320, generator=generator) for _ in range(2))
    pairs = [(x, weight.T), (weight.T, x)]
    exact = [a.double() @ b.double() for a, b in pairs]
    return max(float(((a @ b).double() - c).abs().max() / c.abs().max()) for (a, b), c in zip(pairs, exact))
