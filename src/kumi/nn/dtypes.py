"""In which dtype sums and exponentials are taken."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all else: what norms, softmax and log-probs compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
