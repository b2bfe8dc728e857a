"""Linear layers whose matrix is frozen and has an adapter beside it (see `kumi.spec.lora`).

    y = g * (W x + s B A drop(x)) + b,    g = 1, or for DoRA m / |W + s B A| by rows

The norm in DoRA's factor counts as a constant in the backward pass (Liu et al., 2024, section 4.3). Whatever ranks
share a layer, each works out g * (W x + s B A x) from its own rows or columns, so that sums over ranks come after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.dtypes import wide
from kumi.nn.linear import Linear
from kumi.spec.adapters import takes
from kumi.spec.ledger import layer_ops
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec

# Rows of a matrix whose sum with its adapter is held at a time, where their norms are wanted.
_ROWS = 1024


class Matrix(nn.Module):
    """A trained matrix."""

    def __init__(self, rows: int, columns: int, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))


@dataclass
class Moment:
    """Which forward pass of training it is, so that what is dropped is the same when a layer recomputes it, and another
    one in every pass. `number` is that of the update, `microbatch` that of the pass within it; `data` tells ranks with
    other tokens apart."""

    seed: int = 0
    number: int = 0
    microbatch: int = 0
    data: int = 0

    def key(self, name: str, part: int) -> int:
        """A seed for the layer `name`, on the rank whose part of the input is `part`."""
        text = f"{self.seed}/{name}/{self.number}/{self.microbatch}/{self.data}/{part}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class LoraLinear(Linear):
    """`Linear` with an adapter. It takes the parameters of the layer `old`; its own are in `dtype`.

    `name` is the layer's in the model. Ranks that have other tokens or columns of the input than others have another
    `part`. `sum_columns` adds up over the ranks that have the other columns of the matrix.
    """

    def __init__(self, old: Linear, lora: Lora, name: str, *, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.adds_bias = old.weight, old.bias, old.adds_bias
        self.multiply, self.splits, self.later, self.packed = old.multiply, old.splits, old.later, old.packed
        self.lora, self.name, self.part, self.moment = lora, name, 0, Moment()
        rows, columns = old.weight.shape
        device = old.weight.device
        self.lora_A = Matrix(lora.r, columns, device=device, dtype=dtype)
        self.lora_B = Matrix(rows, lora.r, device=device, dtype=dtype)
        self.lora_magnitude_vector = (
            nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if lora.use_dora else None
        )
        self.sum_columns: Callable[[Tensor], Tensor] = lambda squares: squares

    def forward(self, x: Tensor) -> Tensor:
        return self.complete(self.product(x, None), self.reduced(x))

    def reduced(self, x: Tensor) -> Tensor:
        """A drop(x), (.., r)."""
        if self.training and self.lora.dropout:
            key = self.moment.key(self.name, self.part)
            x = _Drop.apply(x, self.lora.dropout, key)  # type: ignore[no-untyped-call]
        return F.linear(x, self.lora_A.weight.to(x.dtype))

    def complete(self, product: Tensor, reduced: Tensor) -> Tensor:
        """What the layer gives, from W x (.., out) and A x (.., r)."""
        # Not in place: selective recomputation keeps what products return.
        out = torch.add(product, F.linear(reduced, self.lora_B.weight.to(product.dtype)), alpha=self.lora.scale)
        if self.lora_magnitude_vector is not None:
            out = out * (self.lora_magnitude_vector / self.row_norms()).to(out.dtype)
        if self.bias is not None and self.adds_bias:
            out = out + self.bias.to(out.dtype)
        return out

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """The norms (out,) of the rows of W + s B A, in float32 or wider."""
        a, b, frozen = self.lora_A.weight, self.lora_B.weight, self.matrix()
        dtype = torch.promote_types(wide(a.dtype), wide(frozen.dtype))
        squares = [
            torch.addmm(rows.to(dtype), of_b.to(dtype), a.to(dtype), alpha=self.lora.scale).square().sum(1)
            for rows, of_b in zip(torch.split(frozen, _ROWS), torch.split(b, _ROWS), strict=True)
        ]
        return self.sum_columns(torch.cat(squares)).sqrt()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, r={self.lora.r}, alpha={self.lora.alpha}"


class _Drop(torch.autograd.Function):
    """Dropout whose mask is a function of `key`: it is drawn again in the backward pass, and nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, key: int) -> Tensor:
        ctx.share, ctx.key = share, key
        return x * _mask(x, share, key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * _mask(grad, ctx.share, ctx.key), None, None


def _mask(like: Tensor, share: float, key: int) -> Tensor:
    """1 / (1 - share), or 0 for a `share` of the elements."""
    generator = torch.Generator(like.device).manual_seed(key)
    return torch.empty_like(like).bernoulli_(1 - share, generator=generator).mul_(1 / (1 - share))


def adapt(decoder: nn.Module, spec: ModelSpec, lora: Lora, *, dtype: torch.dtype) -> None:
    """Freezes the parameters of `decoder`, a decoder of `spec` or a stage of one, and gives its layers adapters with
    parameters in `dtype`, not filled."""
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    there = dict(decoder.named_modules())
    for index in range(spec.num_hidden_layers):
        for op in layer_ops(spec, index):
            if takes(lora, op) and op.name in there:
                old = there[op.name]
                assert isinstance(old, Linear), f"{op.name} is a {type(old).__name__}"
                path, _, leaf = op.name.rpartition(".")
                setattr(there[path], leaf, LoraLinear(old, lora, op.name, dtype=dtype))


def lora_linears(module: nn.Module) -> list[LoraLinear]:
    """The layers in `module` that have adapters."""
    return [part for part in module.modules() if isinstance(part, LoraLinear)]


def complete_all(made: Sequence[Tensor], layers: Sequence[Linear], reduced: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What `layers` give, given the products of all, and A x of those that have adapters, in order."""
    left = iter(reduced)
    return tuple(
        layer.complete(one, next(left)) if isinstance(layer, LoraLinear) else one
        for one, layer in zip(made, layers, strict=True)
    )
