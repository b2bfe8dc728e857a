"""The dtype of sums and exponentials."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for norms, softmax and log-probs: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
