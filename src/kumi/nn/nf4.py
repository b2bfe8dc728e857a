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
from kumi.spec.lora import NF4_BITS, NF4_BLOCK, NF4_SCALE_BYTES, nf4_blocks


class NF4Matrix(nn.Module):
    """A frozen matrix (out, in) of `shape` in NF4, in blocks of 64 elements in row-major order.

    `codes`: (blocks, 32) uint8, two elements a byte; the last block is filled up with zeros.
    `scales`: (blocks, 4) uint8, the bytes of a float32 for each block. As bytes, because FSDP2 casts floats when it
        gathers them.
    `dtype`: that of the unpacked matrix.
    `unpack`: unpacks codes and scales; can be replaced.

    Sharding codes and scales along dim 0 leaves each block complete, so it does not change the values.
    """

    def __init__(self, shape: tuple[int, int], *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, unpacked_dtype(dtype)
        blocks = nf4_blocks(shape[0] * shape[1])
        self.codes, self.scales = (
            nn.Parameter(torch.empty(blocks, size, dtype=torch.uint8, device=device), requires_grad=False)
            for size in (NF4_BLOCK * NF4_BITS // 8, NF4_SCALE_BYTES)
        )
        self.unpack = unpack_blocks

    def matrix(self) -> Tensor:
        """Return the unpacked matrix."""
        rows, columns = self.shape
        return self.unpack(self.codes, self.scales, self.dtype).view(-1)[: rows * columns].view(rows, columns)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        out: Tensor = _Product.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        return f"{self.shape}"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: NF4Matrix) -> Tensor:
        ctx.packed = packed
        return F.linear(x, packed.matrix().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return grad @ ctx.packed.matrix().to(grad.dtype), None, None


def unpacked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrices of `dtype` are unpacked: float32 for float64, which bitsandbytes lacks."""
    return torch.float32 if dtype == torch.float64 else dtype


def pack_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales (see `NF4Matrix`) of `values`, a vector whose first element begins a block."""
    # Imported here: bitsandbytes takes seconds to import, and few users have it.
    from bitsandbytes import functional

    values = F.pad(values, (0, -len(values) % NF4_BLOCK))
    codes, state = functional.quantize_4bit(values, blocksize=NF4_BLOCK, quant_type="nf4")
    return codes.view(-1, NF4_BLOCK * NF4_BITS // 8), state.absmax.view(-1, 1).view(torch.uint8)


def unpack_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unpacked blocks (blocks, 64) in `dtype`."""
    from bitsandbytes import functional

    state = functional.QuantState(  # type: ignore[no-untyped-call]
        absmax=scales.view(torch.float32).view(-1),
        shape=torch.Size((len(codes), NF4_BLOCK)),
        dtype=dtype,
        blocksize=NF4_BLOCK,
        quant_type="nf4",
    )
    blocks: Tensor = functional.dequantize_4bit(codes, state)
    return blocks


def round_to_nf4(matrix: Tensor) -> Tensor:
    """Return `matrix`, whose first element begins a block, packed and unpacked again."""
    matrix = matrix.to(unpacked_dtype(matrix.dtype))
    codes, scales = pack_blocks(matrix.flatten())
    return unpack_blocks(codes, scales, matrix.dtype).view(-1)[: matrix.numel()].view(matrix.shape)


def packed_matrices(module: nn.Module) -> dict[str, NF4Matrix]:
    """Return the packed matrices in `module`, by the names of their linear layers."""
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, Linear))
    return {name: layer.packed for name, layer in layers if isinstance(layer.packed, NF4Matrix)}


def use_packed_weights(decoder: Decoder) -> None:
    """Replace the weights of the linear layers in the layers of `decoder` by packed matrices, uninitialised.

    Routers and routed experts are not packed.
    """
    for layer in linears(decoder.model.layers):
        _take_weight(layer)


def quantize_linears(decoder: Decoder, dtype: torch.dtype) -> None:
    """Pack the loaded matrices of the layers of `decoder`, as a run that computes in `dtype` packs them.

    Such a run rounds its frozen matrices to `dtype` before it packs them, which changes some codes.
    """
    for layer in linears(decoder.model.layers):
        weight, packed = _take_weight(layer)
        packed.dtype = unpacked_dtype(dtype)
        codes, scales = pack_blocks(weight.to(dtype).to(packed.dtype).flatten())
        packed.codes.data, packed.scales.data = codes, scales


def _take_weight(layer: Linear) -> tuple[Tensor, NF4Matrix]:
    """Replace the weight of `layer` by an uninitialised packed matrix; return both."""
    weight = layer.weight.detach()
    rows, columns = weight.shape
    del layer.weight
    layer.packed = packed = NF4Matrix((rows, columns), device=weight.device, dtype=weight.dtype)
    return weight, packed
