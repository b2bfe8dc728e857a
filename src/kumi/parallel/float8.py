"""Matrix products of layers in float8, with torchao's kernels and scales.

The inputs of a product and the gradient that comes back are rounded on their way in, each with one scale; weights,
what is kept for the backward pass, and sums stay as they are. The head, the token table, routers and routed experts
multiply in the compute dtype.
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

# The kernels take matrices whose sides are multiples of this.
SIDE = 16


def multiply_in_float8(decoder: Decoder, device: torch.device) -> None:
    """Makes the layers' matrices of `decoder` multiply in float8. Names and parameters stay.

    Raises LayoutError where the device or the installation cannot.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise LayoutError(
            f"precision.kind='fp8': {device} has no products in float8, which CUDA devices have from compute "
            f"capability 8.9 on; set precision.kind = 'bf16'"
        )
    swap_products(decoder)


def swap_products(decoder: Decoder) -> list[str]:
    """The names of the matrices that multiply in float8 from now on: those of layers with sides that fit."""
    try:
        convert = importlib.import_module("torchao.float8").convert_to_float8_training
    except ImportError:
        raise LayoutError(
            "precision.kind='fp8' needs the package torchao, which is not installed; install it, or set "
            "precision.kind = 'bf16'"
        ) from None
    names, found = _in_layers(decoder.spec), []
    for name, layer in decoder.named_modules():
        if isinstance(layer, Linear) and name in names and all(side % SIDE == 0 for side in layer.weight.shape):
            rows, columns = layer.weight.shape
            holder = nn.Sequential(nn.Linear(columns, rows, bias=False, device="meta"))
            convert(holder)
            layer.multiply = partial(_multiply, holder)
            found.append(name)
    return found


def _in_layers(spec: ModelSpec) -> set[str]:
    return {op.name for op in ops(spec) if op.kind == "linear" and not op.experts and op.name.startswith(LAYERS)}


def _multiply(holder: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, as the layer in `holder` does it with `weight`."""
    out: Tensor = functional_call(holder, {"0.weight": weight}, (x,))
    return out if bias is None else out + bias
