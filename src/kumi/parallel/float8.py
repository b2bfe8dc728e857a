"""Matmuls of layers in float8, with torchao's kernels and scales.

The two inputs of a matmul and the gradient of its output are rounded to float8, with one scale for each row, or on GPUs
of compute capability 8.9 with one scale for each matrix. Weights, saved tensors and sums keep their dtypes. The head,
routers and routed experts multiply in the compute dtype.

Layers must be compiled. Uncompiled layers find the scales and round in separate passes over memory, which move some 31
bytes per element and take longer than float8 saves in the matmuls.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kumi.accelerator import can
from kumi.errors import LayoutError
from kumi.nn.decoder import Decoder
from kumi.nn.linear import Linear
from kumi.spec.ledger import LAYERS, ops
from kumi.spec.model import ModelSpec

# The kernels support matrices whose numbers of rows and columns are multiples of this number.
_SIDE = 16


def use_float8(decoder: Decoder, device: torch.device) -> None:
    """Make the linear layers of `decoder` multiply in float8. Their names and parameters do not change.

    Raise LayoutError if the device has no float8 matmuls or torchao is not installed.
    """
    _check_device(device)
    swap_matmuls(decoder, rowwise=can(device, "float8 by rows"))


def require_float8(device: torch.device) -> None:
    """Raise LayoutError if `device` has no float8 matmuls, or torchao is not installed."""
    _check_device(device)
    _torchao()


def _check_device(device: torch.device) -> None:
    """Raise LayoutError if `device` has no float8 matmuls."""
    if not can(device, "float8"):
        raise LayoutError(
            f"precision.kind='fp8': {device} has no float8 matmuls, which need a CUDA device of compute capability "
            f"8.9 or higher; set precision.kind = 'bf16'"
        )


def swap_matmuls(decoder: Decoder, *, rowwise: bool) -> list[str]:
    """Make the linear layers whose weights have rows and columns in multiples of `_SIDE` multiply in float8, and return
    their names.

    `rowwise`: with a scale for each row, instead of one for each matrix.
    """
    torchao = _torchao()
    config = torchao.Float8LinearConfig.from_recipe_name("rowwise" if rowwise else "tensorwise")
    names, swapped = _linear_names(decoder.spec), []
    for name, layer in decoder.named_modules():
        if isinstance(layer, Linear) and name in names and all(side % _SIDE == 0 for side in layer.weight.shape):
            rows, columns = layer.weight.shape
            holder = nn.Sequential(nn.Linear(columns, rows, bias=False, device="meta"))
            torchao.convert_to_float8_training(holder, config=config)
            layer.multiply = partial(_multiply, holder)
            swapped.append(name)
    return swapped


def _torchao() -> ModuleType:
    """Return the module torchao.float8. Raise LayoutError if it is not installed."""
    try:
        return importlib.import_module("torchao.float8")
    except ImportError:
        raise LayoutError(
            "precision.kind='fp8' needs the package torchao, which is not installed; install it, or set "
            "precision.kind = 'bf16'"
        ) from None


def _linear_names(spec: ModelSpec) -> set[str]:
    """Return the names of the linear layers inside decoder layers, without routed experts."""
    return {op.name for op in ops(spec) if op.kind == "linear" and not op.experts and op.name.startswith(LAYERS)}


def _multiply(holder: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear(x, weight, bias), with the matmul of the float8 layer in `holder`, whose own weight is unused."""
    out: Tensor = functional_call(holder, {"0.weight": weight}, (x,))
    return out if bias is None else out + bias
