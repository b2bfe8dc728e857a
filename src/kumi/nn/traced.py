"""What autograd functions need so that PyTorch's compiler traces them right."""

from __future__ import annotations

import torch
from torch import Tensor


def traced(out: Tensor) -> Tensor:
    """Return `out`, the result of an autograd function's forward; as a view of it while a layer is being compiled.

    Without the view, the tracer of PyTorch 2.11 takes a result that an operation has changed in place for one without
    a gradient: the gradients of the function's inputs are 0, and nothing says so.
    """
    return out.view_as(out) if torch.compiler.is_compiling() else out
