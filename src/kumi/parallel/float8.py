"""Matmuls of layers in float8, with torchao's kernels and scales.

The two inputs of a matmul and the gradient of its output are rounded to float8, each with one scale. Weights, saved
tensors and sums keep their dtypes. The head, the token table, routers and routed experts multiply in the compute dtype.
"""

from __future__ import annotations

import importlib
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kumi.errors import LayoutError
from kumi.nn.decoder import Decoder
from kumi.nn.linear import Linear
from kumi.spec.ledger import LAYERS, ops
from kumi.spec.model import ModelSpec

# The kernels support matrices with numbers of rows and columns that are multiples of this.
_SIDE = 16


def use_float8(decoder: Decoder, device: torch.device) -> None:
    """Make the linear layers of `decoder` multiply in float8. Their names and parameters do not change.

    Raise LayoutError if the device has no float8 matmuls or torchao is not installed.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise LayoutError(
            f"precision.kind='fp8': {device} has no float8 matmuls, which need a CUDA device of compute capability "
            f"8.9 or higher; set precision.kind = 'bf16'"
        )
    swap_matmuls(decoder)


def swap_matmuls(decoder: Decoder) -> list[str]:
    """Make the linear layers whose sides are multiples of `_SIDE` multiply in float8, and return their names."""
    try:
        convert = importlib.import_module("torchao.float8").convert_to_float8_training
    except ImportError:
        raise LayoutError(
            "precision.kind='fp8' needs the package torchao, which is not installed; install it, or set "
            "precision.kind = 'bf16'"
        ) from None
    names, swapped = _linear_names(decoder.spec), []
    for name, layer in decoder.named_modules():
        if isinstance(layer, Linear) and name in names and all(side % _SIDE == 0 for side in layer.weight.shape):
            rows, columns = layer.weight.shape
            holder = nn.Sequential(nn.Linear(columns, rows, bias=False, device="meta"))
            convert(holder)
            layer.multiply = partial(_multiply, holder)
            swapped.append(name)
    return swapped


def _linear_names(spec: ModelSpec) -> set[str]:
    return {op.name for op in ops(spec) if op.kind == "linear" and not op.experts and op.name.startswith(LAYERS)}


def _multiply(holder: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear(x, weight, bias), with the matmul of the float8 layer in `holder`."""
    out: Tensor = functional_call(holder, {"0.weight": weight}, (x,))
    return out if bias is None else out + bias
