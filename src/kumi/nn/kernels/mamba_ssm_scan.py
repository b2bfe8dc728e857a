"""Mamba-2's recurrence by the package mamba-ssm, whose Triton kernels are those of the paper's authors.

It computes what `kumi.nn.mamba_scan` computes, from the same inputs. Its kernels multiply in the dtype of x. Only the
inputs are kept for the backward pass, as on the plain path, so the backward pass runs the forward pass again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

if TYPE_CHECKING:
    from kumi.nn.mamba_scan import ScanInputs


def takes(inputs: ScanInputs) -> bool:
    """Return True if the package can compute `inputs`.

    They must not be in float64, and the number of positions in a chunk must be a power of two, at least 16.
    """
    chunk = inputs.chunk
    return inputs.x.dtype != torch.float64 and chunk >= 16 and chunk & (chunk - 1) == 0


def scan(inputs: ScanInputs) -> Tensor:
    """Return y (B, S, H, P), as `kumi.nn.mamba_scan.SCAN` does."""
    x, b, c, dt, dt_bias, a_log, d = inputs[:7]
    documents = None if inputs.numbers is None else inputs.numbers.int().contiguous()
    y: Tensor = mamba_chunk_scan_combined(
        x.contiguous(),
        dt.contiguous(),
        -a_log.float().exp(),
        b.contiguous(),
        c.contiguous(),
        inputs.chunk,
        D=d,
        dt_bias=dt_bias,
        seq_idx=documents,
        dt_softplus=True,
        dt_limit=(inputs.low, inputs.high),
    )
    return y


def scan_backward(grad: Tensor, inputs: ScanInputs) -> Sequence[Tensor]:
    """Return the gradients of x, b, c, dt, dt_bias, a_log and d, as `kumi.nn.mamba_scan.SCAN_BACKWARD` does."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs[:7]]
        x, b, c, dt, dt_bias, a_log, d = leaves
        y = scan(inputs._replace(x=x, b=b, c=c, dt=dt, dt_bias=dt_bias, a_log=a_log, d=d))
        return torch.autograd.grad(y, leaves, grad)
