"""The faster of the CPU's two float32 matrix products, where it is as accurate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# oneDNN sums in another order than the default library, so its error differs by a small factor; one that rounds the
# inputs to bfloat16 (as "medium" allows, and CPUs with bfloat16 matrix units do) is off by a factor of thousands.
_ALLOWED = 4.0


@dataclass(frozen=True)
class Float32Matmul:
    """What `enable_fast_float32` chose: torch's matmul precision, and the errors it saw (of the largest element)."""

    precision: str
    error: float
    default_error: float

    def __str__(self) -> str:
        return f"float32 matmul precision {self.precision!r} (error {self.error:.1e}, default {self.default_error:.1e})"


def enable_fast_float32() -> Float32Matmul:
    """Let float32 matrix products on the CPU go through oneDNN if a check finds full float32 accuracy; what was chosen.

    torch.set_float32_matmul_precision("medium") chooses oneDNN, which on many CPUs is twice as fast; where the check
    fails it is left at "highest". Both forms of a product that training uses are compared with float64.
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
    """The largest error of x W^T and of g^T x, relative to the largest element, against float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(256, 320, generator=generator) for _ in range(2))
    pairs = [(x, weight.T), (weight.T, x)]
    exact = [a.double() @ b.double() for a, b in pairs]
    return max(float(((a @ b).double() - c).abs().max() / c.abs().max()) for (a, b), c in zip(pairs, exact))
