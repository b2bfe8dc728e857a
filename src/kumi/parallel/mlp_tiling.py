"""Feed-forward layers computed tile by tile over their columns, for layers that are too large for a device at once.

A tile is some columns of gate and up and the same rows of down; the layer is the sum over tiles of

    down_tile(act(gate_tile(x)) * up_tile(x))        or, where there is no gate,        down_tile(act(up_tile(x)))

Forward and backward work on one tile at a time, and the backward computes each tile's columns again from the layer's
input, so that of the layer's 2 or 3 F columns a token only F / tiles are there at once, and none is kept. Where ZeRO-3
divides the matrices, FSDP2 leaves them alone: each tile is gathered for itself, in the forward and in the backward, and
its gradients are summed and divided at once, so that no rank ever holds a whole matrix (Rajbhandari et al., 2021,
arXiv:2104.07857, section 5.1.3, in kind). Tile t then has the t-th part of every rank's rows of gate and up: which
columns make a tile does not matter to the sum. Names, shapes and checkpoints are those of the layer as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.activation_functions import ACTIVATIONS, gate_by
from kumi.nn.decoder import Decoder
from kumi.nn.dtypes import wide
from kumi.nn.linear import Linear
from kumi.nn.mlp import MLP
from kumi.parallel.mesh import Mesh
from kumi.parallel.token_collectives import gathered, scattered
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
            for layer in _matrices(mlp):
                rows = layer.weight.shape[0] // group.size()
                layer.weight = nn.Parameter(layer.weight.new_empty(rows, layer.weight.shape[1]))
        mlp.function = partial(_forward, tiling)


def _dense(model: nn.Module) -> Iterator[MLP]:
    """The feed-forward layers of a decoder or a stage, shared experts left out."""
    layers = model.model.layers.values()  # type: ignore[union-attr, operator]
    return (layer.mlp for layer in layers if isinstance(layer.mlp, MLP))


def _matrices(mlp: MLP) -> list[Linear]:
    """Gate, if there is one, up and down."""
    return [layer for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj) if layer is not None]


def divided_by_tiles(decoder: nn.Module, mesh: Mesh) -> list[nn.Parameter]:
    """The parameters that are gathered tile by tile, in the order of the forward."""
    if mesh.layout.tiles == 1 or mesh.layout.zero < 3 or mesh.group("zero") is None:
        return []
    return [layer.weight for mlp in _dense(decoder) for layer in _matrices(mlp)]


def _forward(tiling: Tiling, mlp: MLP, x: Tensor) -> Tensor:
    *first, down = _matrices(mlp)
    weights, biases = [layer.weight for layer in first], [layer.bias for layer in first]
    act = mlp.spec.hidden_act
    out: Tensor = _Tiles.apply(x, tiling, act, down.weight, *weights, *biases)  # type: ignore[no-untyped-call]
    return out if down.bias is None else out + down.bias.to(out.dtype)


class _Tiles(torch.autograd.Function):
    """down(act(gate(x)) * up(x)), or without a gate down(act(up(x))), keeping x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiling: Tiling, act: str, down: Tensor, *first: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, down, *first)
        ctx.tiling, ctx.act = tiling, act
        rows = x.flatten(0, -2)
        out = rows.new_zeros(rows.shape, dtype=wide(x.dtype))
        for number in range(tiling.count):
            one = _tile_of(tiling, number, down, first, x.dtype)
            out += _join(one.inside(rows), act) @ one.down.T
        return out.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, *first = ctx.saved_tensors
        tiling: Tiling = ctx.tiling
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
        of_x = rows.new_zeros(rows.shape, dtype=wide(x.dtype))
        of_down = torch.empty_like(down)
        of_first: list[Any] = [None if one is None else torch.empty_like(one) for one in first]
        count = len(first) // 2
        for number in range(tiling.count):
            one = _tile_of(tiling, number, down, first, x.dtype)
            made = one.inside(rows)
            columns = tiling.columns(of_down, number)
            columns.copy_(tiling.divide(grad_rows.T @ _join(made, ctx.act)).view(columns.shape))
            for place, found in enumerate(_part(grad_rows @ one.down, made, ctx.act)):
                of_x += found @ one.weights[place]
                tiling.rows(of_first[place], number).copy_(tiling.divide(found.T @ rows))
                of_bias = of_first[count + place]
                if of_bias is not None:
                    columns = tiling.columns(of_bias, number)
                    columns.copy_(found.sum(0).view(columns.shape))
        return (of_x.to(x.dtype).view(x.shape), None, None, of_down, *of_first)


def _join(made: Sequence[Tensor], act: str) -> Tensor:
    """What the activation makes of gate and up, or of up alone."""
    return gate_by(act).value(*made) if len(made) > 1 else ACTIVATIONS[act].value(made[0])


def _part(grad: Tensor, made: Sequence[Tensor], act: str) -> tuple[Tensor, ...]:
    """The gradients of gate and up, or of up alone, from that of what `_join` makes of them."""
    if len(made) > 1:
        return gate_by(act).gradients(grad, *made)
    return (ACTIVATIONS[act].gradient(grad, made[0]),)


@dataclass(frozen=True)
class _Tile:
    """Of a tile, whole: `weights` (F / count, D) and `biases` (F / count,) of gate and up, or of up, and `down`
    (D, F / count)."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    down: Tensor

    def inside(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What gate and up make of `rows` (T, D), (T, F / count) each."""
        return tuple(F.linear(rows, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True))


def _tile_of(tiling: Tiling, number: int, down: Tensor, first: Sequence[Tensor | None], dtype: torch.dtype) -> _Tile:
    """Tile `number`, given the matrix `down` and those of gate and up with their biases."""
    count = len(first) // 2
    weights = tuple(tiling.gather(tiling.rows(one, number), dtype) for one in first[:count] if one is not None)
    biases = tuple(None if one is None else tiling.columns(one, number).flatten().to(dtype) for one in first[count:])
    return _Tile(weights, biases, tiling.gather(tiling.columns(down, number).flatten(-2), dtype))
