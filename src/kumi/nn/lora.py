"""LoRA and DoRA adapters on frozen linear layers (see `kumi.spec.lora`).

    y = g * (W x + s B A drop(x)) + b,    g = 1, or for DoRA m / (the norm of each row of W + s B A)

The norm in DoRA's factor is a constant in the backward pass (Liu et al., 2024, section 4.3). Under tensor parallelism,
each rank computes g * (W x + s B A x) from its rows or columns, and sums over ranks come afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.dtypes import wide
from kumi.nn.expert_lora import LoraExperts
from kumi.nn.linear import Linear
from kumi.nn.moe import Experts
from kumi.spec.adapters import has_adapter
from kumi.spec.ledger import layer_ops, trained_names
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec

# Rows per chunk when computing the norms of W + s B A, to bound memory.
_ROWS = 1024


class AdapterMatrix(nn.Module):
    """A trained matrix of an adapter."""

    def __init__(self, rows: int, columns: int, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))


@dataclass
class DropoutPass:
    """The current forward pass of training, from which dropout masks are derived.

    A recomputed layer gets the same mask again; different passes get different masks.
    `step`: number of the update.
    `microbatch`: index of the pass within the update.
    `data_rank`: index of the rank's sequences or parts of sequences (data and context parallelism). The ranks of a
        tensor-parallel group have the same index.
    """

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    data_rank: int = 0

    def key(self, name: str, part: int) -> int:
        """Return the dropout seed of the layer `name` on a rank with the given `part` of its input."""
        text = f"{self.seed}/{name}/{self.step}/{self.microbatch}/{self.data_rank}/{part}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class LoraLinear(Linear):
    """`Linear` with an adapter. It takes over the parameters of the layer `old`; the adapter's are in `dtype`.

    `name`: name of the layer in the model.
    `part`: the tensor-parallel rank, if the ranks of its group have different tokens (sequence parallelism) or columns
        (a row-parallel matrix) of the layer's input; else 0.
    `sum_columns`: sums a value of each row over the ranks that hold other columns of the matrix.
    `uses_adapter`: False computes the frozen layer alone.
    """

    def __init__(self, old: Linear, lora: Lora, name: str, *, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.adds_bias = old.weight, old.bias, old.adds_bias
        self.multiply, self.defers_wgrad, self.deferred_wgrads, self.packed = (
            old.multiply,
            old.defers_wgrad,
            old.deferred_wgrads,
            old.packed,
        )
        self.weight_copy = None  # a frozen weight is in the compute dtype already
        self.lora, self.name, self.part, self.dropout_pass = lora, name, 0, DropoutPass()
        rows, columns = old.weight.shape
        device = old.weight.device
        self.lora_A = AdapterMatrix(lora.r, columns, device=device, dtype=dtype)
        self.lora_B = AdapterMatrix(rows, lora.r, device=device, dtype=dtype)
        self.lora_magnitude_vector = (
            nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if lora.use_dora else None
        )
        self.sum_columns: Callable[[Tensor], Tensor] = lambda squares: squares
        self.uses_adapter = True

    def forward(self, x: Tensor) -> Tensor:
        return self.complete(self.product(x, None), self.project_down(x))

    def project_down(self, x: Tensor) -> Tensor:
        """Return A drop(x), (.., r)."""
        if self.training and self.lora.dropout:
            key = self.dropout_pass.key(self.name, self.part)
            x = _Drop.apply(x, self.lora.dropout, key)  # type: ignore[no-untyped-call]
        return F.linear(x, self.lora_A.weight.to(x.dtype))

    def complete(self, product: Tensor, down: Tensor) -> Tensor:
        """Return the layer's output, given W x (.., out) and the result (.., r) of `project_down`."""
        # This must not work in place, because selective recomputation keeps the results of matrix products.
        out = product
        if self.uses_adapter:
            out = torch.add(product, F.linear(down, self.lora_B.weight.to(product.dtype)), alpha=self.lora.scale)
        if self.uses_adapter and self.lora_magnitude_vector is not None:
            out = out * (self.lora_magnitude_vector / self.row_norms()).to(out.dtype)
        if self.bias is not None and self.adds_bias:
            out = out + self.bias.to(out.dtype)
        return out

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Return the norms (out,) of the rows of W + s B A, in float32 or wider."""
        a, b, frozen = self.lora_A.weight, self.lora_B.weight, self.matrix()
        dtype = torch.promote_types(wide(a.dtype), wide(frozen.dtype))
        squares = [
            torch.addmm(rows.to(dtype), b_rows.to(dtype), a.to(dtype), alpha=self.lora.scale).square().sum(1)
            for rows, b_rows in zip(torch.split(frozen, _ROWS), torch.split(b, _ROWS), strict=True)
        ]
        return self.sum_columns(torch.cat(squares)).sqrt()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, r={self.lora.r}, alpha={self.lora.alpha}"


class _Drop(torch.autograd.Function):
    """Dropout with a mask derived from `key`. The backward pass draws it again, so nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: int) -> Tensor:
        ctx.rate, ctx.key = rate, key
        return x * _mask(x, rate, key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * _mask(grad, ctx.rate, ctx.key), None, None


def _mask(like: Tensor, rate: float, key: int) -> Tensor:
    """Return a dropout mask of the shape of `like`: each element is 0 with probability `rate`, else 1 / (1 - rate)."""
    generator = torch.Generator(like.device).manual_seed(key)
    return torch.empty_like(like).bernoulli_(1 - rate, generator=generator).mul_(1 / (1 - rate))


def insert_adapters(decoder: nn.Module, spec: ModelSpec, lora: Lora, *, dtype: torch.dtype) -> None:
    """Freeze `decoder`, a decoder of `spec` or a stage of one, and add uninitialised adapters in `dtype`.

    Modules that `spec` trains in full are not frozen.
    """
    trained = trained_names(spec)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name in trained)
    modules = dict(decoder.named_modules())
    experts: dict[str, list[str]] = {}
    for index in range(spec.num_hidden_layers):
        for op in layer_ops(spec, index):
            path, _, leaf = op.name.rpartition(".")
            if has_adapter(lora, op) and path in modules:
                if op.experts:
                    experts.setdefault(path, []).append(leaf)
                else:
                    _replace(modules, op.name, LoraLinear(_linear(modules, op.name), lora, op.name, dtype=dtype))
    for name, leaves in experts.items():
        old = modules[name]
        assert isinstance(old, Experts), f"{name} is a {type(old).__name__}"
        _replace(modules, name, LoraExperts(old, dict.fromkeys(leaves, lora), dtype=dtype))


def _linear(modules: dict[str, nn.Module], name: str) -> Linear:
    linear = modules[name]
    assert isinstance(linear, Linear), f"{name} is a {type(linear).__name__}"
    return linear


def _replace(modules: dict[str, nn.Module], name: str, module: nn.Module) -> None:
    """Replace the module `name` among `modules`, the modules of a decoder by name."""
    path, _, leaf = name.rpartition(".")
    setattr(modules[path], leaf, module)


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """A context in which `module` computes what its frozen parameters alone compute."""
    layers = [part for part in module.modules() if isinstance(part, LoraLinear | LoraExperts)]
    for layer in layers:
        layer.uses_adapter = False
    try:
        yield
    finally:
        for layer in layers:
            layer.uses_adapter = True


def add_adapter_outputs(
    products: Sequence[Tensor], layers: Sequence[Linear], downs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the outputs of `layers`.

    `products`: W x of each layer.
    `downs`: the results of `project_down` of those layers that have adapters, in order.
    """
    downs_iterator = iter(downs)
    return tuple(
        layer.complete(product, next(downs_iterator)) if isinstance(layer, LoraLinear) else product
        for product, layer in zip(products, layers, strict=True)
    )
