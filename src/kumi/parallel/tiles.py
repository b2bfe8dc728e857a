"""Feed-forward layers computed tile by tile over their columns, for layers that are too large for a device at once.

A tile is some columns of gate and up and the same rows of down; the layer is the sum over tiles of

    down_tile(silu(gate_tile(x)) * up_tile(x))

Forward and backward work on one tile at a time, and the backward computes each tile's columns again from the layer's
input, so that of the layer's 3 F columns a token only F / tiles are there at once, and none is kept. Where ZeRO-3
divides the matrices, FSDP2 leaves them alone: each tile is gathered for itself, in the forward and in the backward, and
its gradients are summed and divided at once, so that no rank ever holds a whole matrix (Rajbhandari et al., 2021,
arXiv:2104.07857, section 5.1.3, in kind). Tile t then has the t-th part of every rank's rows of gate and up: which
columns make a tile does not matter to the sum. Names, shapes and checkpoints are those of the layer as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.nn.decoder import Decoder
from kumi.nn.dtypes import wide
from kumi.nn.mlp import MLP
from kumi.parallel.collectives import gathered, scattered
from kumi.parallel.mesh import Mesh
from kumi.spec.precision import Precision


@dataclass(frozen=True)
class Tiling:
    """`count` tiles, of matrices that the ranks of `group` divide (None: they are whole here); `reduce` is the dtype in
    which gradients are summed."""

    count: int
    group: dist.ProcessGroup | None
    reduce: torch.dtype

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def columns(self, values: Tensor, tile: int) -> Tensor:
        """A view (.., ranks, F / ranks / count) of the columns of a tile in the last dim of `values` (.., F)."""
        found: Tensor = values.view(*values.shape[:-1], self.ranks, self.count, -1)[..., tile, :]
        return found

    def rows(self, values: Tensor, tile: int) -> Tensor:
        """A view of the rows of a tile that this rank holds of `values` (F / ranks, ..)."""
        found: Tensor = values.view(self.count, -1, *values.shape[1:])[tile]
        return found

    def gather(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole of a tile's matrix, in `dtype`, given this rank's rows of it."""
        part = part.to(dtype)
        return part if self.group is None else gathered(part, self.group)

    def divide(self, grad: Tensor) -> Tensor:
        """This rank's rows of the sum of `grad` over the ranks."""
        return grad if self.group is None else scattered(grad.to(self.reduce), self.group)


def tile(decoder: Decoder, mesh: Mesh, precision: Precision) -> None:
    """Makes the dense feed-forward layers of `decoder`, which is on the meta device, compute tile by tile."""
    if mesh.layout.tiles == 1:
        return
    group = mesh.group("zero") if mesh.layout.zero == 3 else None
    tiling = Tiling(mesh.layout.tiles, group, getattr(torch, precision.reduce))
    for mlp in _dense(decoder):
        if group is not None:
            for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
                rows = layer.weight.shape[0] // group.size()
                layer.weight = nn.Parameter(layer.weight.new_empty(rows, layer.weight.shape[1]))
        mlp.forward = partial(_forward, mlp, tiling)  # type: ignore[method-assign]


def _dense(model: nn.Module) -> Iterator[MLP]:
    """The feed-forward layers of a decoder or a stage, shared experts left out."""
    layers = model.model.layers.values()  # type: ignore[union-attr, operator]
    return (layer.mlp for layer in layers if isinstance(layer.mlp, MLP))


def divided_by_tiles(decoder: nn.Module, mesh: Mesh) -> list[nn.Parameter]:
    """The parameters that are gathered tile by tile, in the order of the forward."""
    if mesh.layout.tiles == 1 or mesh.layout.zero < 3 or mesh.group("zero") is None:
        return []
    return [layer.weight for mlp in _dense(decoder) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]


def _forward(mlp: MLP, tiling: Tiling, x: Tensor) -> Tensor:
    weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    out: Tensor = _Tiles.apply(x, *weights, mlp.gate_proj.bias, mlp.up_proj.bias, tiling)  # type: ignore[no-untyped-call]
    return out if mlp.down_proj.bias is None else out + mlp.down_proj.bias.to(out.dtype)


class _Tiles(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)), keeping x only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
        tiling: Tiling,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, gate, up, down, gate_bias, up_bias)
        ctx.tiling = tiling
        rows = x.flatten(0, -2)
        out = rows.new_zeros(rows.shape, dtype=wide(x.dtype))
        for number in range(tiling.count):
            one = _tile_of(tiling, number, (gate, up, down), (gate_bias, up_bias), x.dtype)
            gates, ups = _inside(rows, one)
            out += torch.nn.functional.silu(gates).mul_(ups) @ one.down.T
        return out.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights, gate_bias, up_bias = ctx.saved_tensors
        tiling: Tiling = ctx.tiling
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
        of_x = rows.new_zeros(rows.shape, dtype=wide(x.dtype))
        of_weights = [torch.empty_like(weight) for weight in weights]
        of_biases = [None if bias is None else torch.empty_like(bias) for bias in (gate_bias, up_bias)]
        for number in range(tiling.count):
            one = _tile_of(tiling, number, weights, (gate_bias, up_bias), x.dtype)
            gates, ups = _inside(rows, one)
            act = torch.nn.functional.silu(gates)
            of_hidden = grad_rows @ one.down
            of_down = grad_rows.T @ (act * ups)
            of_up = of_hidden * act
            of_gate = torch.ops.aten.silu_backward(of_hidden.mul_(ups), gates)
            of_x += of_gate @ one.gate
            of_x += of_up @ one.up
            for place, found in zip(of_weights[:2], (of_gate, of_up), strict=True):
                tiling.rows(place, number).copy_(tiling.divide(found.T @ rows))
            columns = tiling.columns(of_weights[2], number)
            columns.copy_(tiling.divide(of_down).view(columns.shape))
            for bias, found in zip(of_biases, (of_gate, of_up), strict=True):
                if bias is not None:
                    columns = tiling.columns(bias, number)
                    columns.copy_(found.sum(0).view(columns.shape))
        return (of_x.to(x.dtype).view(x.shape), *of_weights, *of_biases, None)


@dataclass(frozen=True)
class _Tile:
    """Matrices (F / count, D), (F / count, D) and (D, F / count) of a tile, whole, and its biases (F / count,)."""

    gate: Tensor
    up: Tensor
    down: Tensor
    biases: tuple[Tensor | None, Tensor | None]


def _tile_of(
    tiling: Tiling, number: int, weights: Any, biases: tuple[Tensor | None, Tensor | None], dtype: torch.dtype
) -> _Tile:  # fmt: skip
    gate, up, down = weights
    first, second = (
        None if bias is None else tiling.columns(bias, number).flatten().to(dtype) for bias in biases
    )  # fmt: skip
    return _Tile(
        tiling.gather(tiling.rows(gate, number), dtype),
        tiling.gather(tiling.rows(up, number), dtype),
        tiling.gather(tiling.columns(down, number).flatten(-2), dtype),
        (first, second),
    )


def _inside(rows: Tensor, one: _Tile) -> tuple[Tensor, Tensor]:
    """What gate and up make of `rows` (T, D) in a tile, (T, F / count) each."""
    linear = torch.nn.functional.linear
    return linear(rows, one.gate, one.biases[0]), linear(rows, one.up, one.biases[1])
