"""Products of few rows on a CPU with float32 weights that are packed once for a whole generation.

A decode step multiplies a few rows with every weight. PyTorch's libraries rearrange a weight for their kernels in every
product, which takes longer than multiplying a few rows with it. oneDNN can keep the rearranged weight. Weights with the
same input, such as those of queries, keys and values, become one weight. The packed weights are copies: the originals
stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kumi.nn.decoder import Decoder
from kumi.nn.linear import Linear, linears
from kumi.nn.tp_block import UNSHARDED, Projections

# From this many rows on, rearranging a weight takes little of a product's time, and PyTorch's product is used.
_MANY_ROWS = 128


@contextmanager
def packed_products(decoder: Decoder, rows: int) -> Iterator[None]:
    """Pack the float32 weights of `decoder` that are on a CPU, for products of about `rows` rows, until the context
    ends.

    Weights must not change meanwhile. Layers whose product is already replaced, such as quantised ones, stay as they
    are.
    """
    layers = [layer for layer in linears(decoder) if _packable(layer)]
    blocks: list[Any] = [part for part in decoder.modules() if getattr(part, "projections", None) is UNSHARDED]
    for layer in layers:
        layer.multiply = _PackedProduct([layer.weight], rows)
    for block in blocks:
        block.projections = _PackedProjections(rows)
    if decoder.has_head and _on_cpu(decoder.head_weight):
        decoder.head_product = _PackedProduct([decoder.head_weight], rows)
    try:
        yield
    finally:
        for layer in layers:
            layer.multiply = F.linear
        for block in blocks:
            block.projections = UNSHARDED
        decoder.head_product = F.linear


def _packable(layer: Linear) -> bool:
    return type(layer) is Linear and layer.packed is None and layer.multiply is F.linear and _on_cpu(layer.weight)


def _on_cpu(weight: Tensor) -> bool:
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class _PackedProduct:
    """x W^T + b with a packed copy of W, whose rows are those of `weights`, one weight after another."""

    def __init__(self, weights: Sequence[Tensor], rows: int) -> None:
        self.weights, self.rows = weights, rows

    @cached_property
    def packed(self) -> Tensor:
        """The packed weight, made when it is first needed."""
        weight = self.weights[0] if len(self.weights) == 1 else torch.cat(tuple(self.weights))
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self.rows)
        return packed

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32 or x.shape[:-1].numel() >= _MANY_ROWS:
            return F.linear(x, weight, bias)
        return self.multiply(x, bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b for few rows."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return out


class _PackedProjections(Projections):
    """The projections of a block on one device. Projections of the same input are one product."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        # id of the first of the layers -> their common product, its bias, and the sizes of the layers' outputs.
        self.products: dict[int, tuple[_PackedProduct, Tensor | None, list[int]]] = {}

    def column_linear(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Return the output of each of `layers` for hidden states `x`."""
        few = x.dtype == torch.float32 and x.shape[:-1].numel() < _MANY_ROWS
        if not few or len(layers) == 1 or not all(isinstance(layer.multiply, _PackedProduct) for layer in layers):
            return super().column_linear(x, layers)
        key = id(layers[0])
        if key not in self.products:
            product = _PackedProduct(tuple(layer.weight for layer in layers), self.rows)
            biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
            if biases and len(biases) != len(layers):
                return super().column_linear(x, layers)
            sizes = [len(layer.weight) for layer in layers]
            self.products[key] = product, torch.cat(biases).detach() if biases else None, sizes
        product, bias, sizes = self.products[key]
        return torch.split_with_sizes(product.multiply(x, bias), sizes, -1)
