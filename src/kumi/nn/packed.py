"""Frozen matrices in four bits: NormalFloat, 64 elements to a float32 scale (Dettmers et al., 2023, arXiv:2305.14314).

A matrix is unpacked where it is multiplied with, in the forward and again in the backward pass, and nothing of it is
kept in between. Packing and unpacking are those of the package bitsandbytes, on CUDA devices and on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.decoder import Decoder
from kumi.nn.linear import Linear, linears
from kumi.spec.lora import NF4_BLOCK


class NormalFloat:
    """A matrix (out, in) in four bits, which unpacked has the dtype that it had."""

    def __init__(self, matrix: Tensor) -> None:
        # The package takes seconds to import, and few have it.
        from bitsandbytes import functional

        self._unpack = functional.dequantize_4bit
        self.codes, self.scales = functional.quantize_4bit(
            matrix.detach().contiguous(), blocksize=NF4_BLOCK, quant_type="nf4"
        )

    def matrix(self) -> Tensor:
        found: Tensor = self._unpack(self.codes, self.scales)
        return found

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = _Product.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and their scales."""
        return int(self.codes.nbytes + self.scales.absmax.nbytes)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: NormalFloat) -> Tensor:
        ctx.packed = packed
        return F.linear(x, packed.matrix().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return grad @ ctx.packed.matrix().to(grad.dtype), None, None


def pack(layer: Linear, matrix: Tensor) -> None:
    """Gives `layer` the frozen `matrix` in four bits, in place of a parameter."""
    layer._parameters.pop("weight", None)
    layer.packed = NormalFloat(matrix)


def layer_linears(decoder: Decoder) -> list[Linear]:
    """The matrices of a decoder that are packed: those of its layers, routed experts and routers aside."""
    return linears(decoder.model.layers)


def quantize_linears(decoder: Decoder) -> None:
    """Packs the matrices of the layers of `decoder`, which are there."""
    for layer in layer_linears(decoder):
        pack(layer, layer.weight)


def take_out(decoder: nn.Module) -> dict[str, Linear]:
    """The layers of `decoder`, by their names, whose matrices will be packed; they have none until then."""
    found = {}
    packed = set(layer_linears(decoder)) if isinstance(decoder, Decoder) else set()
    for name, layer in decoder.named_modules():
        if layer in packed:
            assert isinstance(layer, Linear)
            layer._parameters.pop("weight")
            found[name] = layer
    return found
