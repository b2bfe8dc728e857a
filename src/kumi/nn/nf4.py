"""Frozen matrices in 4-bit NormalFloat (NF4), with a float32 scale for every 64 elements (Dettmers et al., 2023,
arXiv:2305.14314).

The forward and the backward pass each unpack the matrix and free the unpacked copy. The package bitsandbytes packs and
unpacks, on CUDA devices and CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.decoder import Decoder
from kumi.nn.linear import Linear, linears
from kumi.spec.lora import NF4_BLOCK


class NF4Matrix:
    """A matrix (out, in) in NF4. `matrix` unpacks it to its original dtype."""

    def __init__(self, matrix: Tensor) -> None:
        # Imported here: bitsandbytes takes seconds to import, and few users have it.
        from bitsandbytes import functional

        self._unpack = functional.dequantize_4bit
        self.codes, self.scales = functional.quantize_4bit(
            matrix.detach().contiguous(), blocksize=NF4_BLOCK, quant_type="nf4"
        )

    def matrix(self) -> Tensor:
        """Return the unpacked matrix."""
        matrix: Tensor = self._unpack(self.codes, self.scales)
        return matrix

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        out: Tensor = _Product.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return out

    @property
    def nbytes(self) -> int:
        """The bytes of the codes and their scales."""
        return int(self.codes.nbytes + self.scales.absmax.nbytes)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: NF4Matrix) -> Tensor:
        ctx.packed = packed
        return F.linear(x, packed.matrix().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return grad @ ctx.packed.matrix().to(grad.dtype), None, None


def pack_nf4(layer: Linear, matrix: Tensor) -> None:
    """Replace the weight of `layer` by the frozen `matrix` in NF4."""
    layer._parameters.pop("weight", None)
    layer.packed = NF4Matrix(matrix)


def layer_linears(decoder: Decoder) -> list[Linear]:
    """Return the linear layers to pack: those of the decoder's layers, without routers and routed experts."""
    return linears(decoder.model.layers)


def quantize_linears(decoder: Decoder) -> None:
    """Pack the loaded matrices of the layers of `decoder`."""
    for layer in layer_linears(decoder):
        pack_nf4(layer, layer.weight)


def take_out_weights(decoder: nn.Module) -> dict[str, Linear]:
    """Remove the weights that will be packed from `decoder`, and return their layers by name.

    `pack_nf4` gives each layer its matrix.
    """
    layers = {}
    packed = set(layer_linears(decoder)) if isinstance(decoder, Decoder) else set()
    for name, layer in decoder.named_modules():
        if layer in packed:
            assert isinstance(layer, Linear)
            layer._parameters.pop("weight")
            layers[name] = layer
    return layers
