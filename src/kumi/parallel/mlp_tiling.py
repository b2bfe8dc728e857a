"""MLPs computed tile by tile over their columns, for MLPs that are too large for a device.

The weights are gate and up (F, D) and down (D, F), for hidden size D. A tile is some of the F columns between them:
rows of the weights of gate and up, and the same columns of the weight of down. The layer's output is the sum over tiles
of

    down_tile(act(gate_tile(x)) * up_tile(x))        or, without a gate,        down_tile(act(up_tile(x)))

The forward and the backward compute one tile at a time, and the backward recomputes the tile from the layer's input.
Only F / tiles of the layer's 2 or 3 F columns per token are in memory at once, and none is saved for the backward.

Under ZeRO-3, FSDP2 ignores these matrices: each tile is all-gathered by itself in the forward and the backward, and its
gradients are reduce-scattered at once, so no rank ever has an unsharded matrix (Rajbhandari et al., 2021,
arXiv:2104.07857, section 5.1.3, is similar). Tile t then consists of the t-th part of every rank's rows of gate and up:
the assignment of columns to tiles does not change the sum. Names, shapes and checkpoints are those of the untiled MLP.
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
from kumi.parallel.token_collectives import all_gather_no_grad, reduce_scatter_no_grad
from kumi.spec.precision import Precision


@dataclass(frozen=True)
class Tiling:
    """How the matrices of an MLP are split into tiles.

    `count`: number of tiles.
    `group`: the ranks that shard the matrices; None if they are unsharded.
    `reduce_dtype`: dtype of gradient reduction.
    """

    count: int
    group: dist.ProcessGroup | None
    reduce_dtype: torch.dtype

    @property
    def ranks(self) -> int:
        """The number of ranks that shard the matrices."""
        return 1 if self.group is None else self.group.size()

    def columns(self, values: Tensor, tile: int) -> Tensor:
        """Return a view (.., ranks, F / ranks / count) of a tile's columns in the last dim of `values` (.., F)."""
        view: Tensor = values.view(*values.shape[:-1], self.ranks, self.count, -1)[..., tile, :]
        return view

    def rows(self, values: Tensor, tile: int) -> Tensor:
        """Return a view of this rank's rows of a tile in `values` (F / ranks, ..)."""
        view: Tensor = values.view(self.count, -1, *values.shape[1:])[tile]
        return view

    def gather(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tile's matrix, in `dtype`, from this rank's rows `shard` of it."""
        shard = shard.to(dtype)
        return shard if self.group is None else all_gather_no_grad(shard, self.group)

    def reduce_scatter(self, grad: Tensor) -> Tensor:
        """Return this rank's rows of the sum of `grad` over the group."""
        return grad if self.group is None else reduce_scatter_no_grad(grad.to(self.reduce_dtype), self.group)


def tile_mlps(decoder: Decoder, mesh: Mesh, precision: Precision) -> None:
    """Make the dense MLPs of `decoder`, which is on the meta device, compute tile by tile."""
    if mesh.layout.tiles == 1:
        return
    group = mesh.group("zero") if mesh.layout.zero == 3 else None
    tiling = Tiling(mesh.layout.tiles, group, getattr(torch, precision.reduce))
    for mlp in _dense_mlps(decoder):
        if group is not None:
            for layer in _matrices(mlp):
                rows = layer.weight.shape[0] // group.size()
                layer.weight = nn.Parameter(layer.weight.new_empty(rows, layer.weight.shape[1]))
        mlp.function = partial(_forward, tiling)


def _dense_mlps(model: nn.Module) -> Iterator[MLP]:
    """Return the dense MLPs of a decoder or a stage, without shared experts."""
    layers = model.model.layers.values()  # type: ignore[union-attr, operator]
    return (layer.mlp for layer in layers if isinstance(layer.mlp, MLP))


def _matrices(mlp: MLP) -> list[Linear]:
    """Return gate (if any), up and down."""
    return [layer for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj) if layer is not None]


def tile_sharded_weights(decoder: nn.Module, mesh: Mesh) -> list[nn.Parameter]:
    """Return the weights that are all-gathered tile by tile, in forward order."""
    if mesh.layout.tiles == 1 or mesh.layout.zero < 3 or mesh.group("zero") is None:
        return []
    return [layer.weight for mlp in _dense_mlps(decoder) for layer in _matrices(mlp)]


def _forward(tiling: Tiling, mlp: MLP, x: Tensor) -> Tensor:
    """Return the output of `mlp` for hidden states `x` (.., D), computed tile by tile."""
    *first, down = _matrices(mlp)
    weights, biases = [layer.weight for layer in first], [layer.bias for layer in first]
    act = mlp.spec.hidden_act
    out: Tensor = _Tiles.apply(x, tiling, act, down.weight, *weights, *biases)  # type: ignore[no-untyped-call]
    return out if down.bias is None else out + down.bias.to(out.dtype)


class _Tiles(torch.autograd.Function):
    """down(act(gate(x)) * up(x)), or without a gate down(act(up(x))). Only x is saved for the backward.

    `first` are the weights of gate (if any) and up, followed by their biases.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiling: Tiling, act: str, down: Tensor, *first: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, down, *first)
        ctx.tiling, ctx.act = tiling, act
        tokens = x.flatten(0, -2)
        out = tokens.new_zeros(tokens.shape, dtype=wide(x.dtype))
        for index in range(tiling.count):
            tile = _gather_tile(tiling, index, down, first, x.dtype)
            out += _activate(tile.linear(tokens), act) @ tile.down.T
        return out.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, *first = ctx.saved_tensors
        tiling: Tiling = ctx.tiling
        tokens, grad_out = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = tokens.new_zeros(tokens.shape, dtype=wide(x.dtype))
        grad_down = torch.empty_like(down)
        grad_first: list[Any] = [None if tensor is None else torch.empty_like(tensor) for tensor in first]
        count = len(first) // 2
        for index in range(tiling.count):
            tile = _gather_tile(tiling, index, down, first, x.dtype)
            projected = tile.linear(tokens)
            columns = tiling.columns(grad_down, index)
            columns.copy_(tiling.reduce_scatter(grad_out.T @ _activate(projected, ctx.act)).view(columns.shape))
            for place, part_grad in enumerate(_activate_backward(grad_out @ tile.down, projected, ctx.act)):
                grad_x += part_grad @ tile.weights[place]
                tiling.rows(grad_first[place], index).copy_(tiling.reduce_scatter(part_grad.T @ tokens))
                grad_bias = grad_first[count + place]
                if grad_bias is not None:
                    columns = tiling.columns(grad_bias, index)
                    columns.copy_(part_grad.sum(0).view(columns.shape))
        return (grad_x.to(x.dtype).view(x.shape), None, None, grad_down, *grad_first)


def _activate(projected: Sequence[Tensor], act: str) -> Tensor:
    """Return act(gate) * up, or act(up) without a gate."""
    return gate_by(act).value(*projected) if len(projected) > 1 else ACTIVATIONS[act].value(projected[0])


def _activate_backward(grad: Tensor, projected: Sequence[Tensor], act: str) -> tuple[Tensor, ...]:
    """Return the gradients of gate and up, or of up alone, from the gradient of `_activate`."""
    if len(projected) > 1:
        return gate_by(act).gradients(grad, *projected)
    return (ACTIVATIONS[act].gradient(grad, projected[0]),)


@dataclass(frozen=True)
class _Tile:
    """The unsharded matrices of a tile.

    `weights` (F / count, D), `biases` (F / count,): of gate (if any) and up.
    `down` (D, F / count).
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    down: Tensor

    def linear(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return gate (if any) and up of `tokens` (T, D), (T, F / count) each."""
        return tuple(F.linear(tokens, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True))


def _gather_tile(tiling: Tiling, index: int, down: Tensor, first: Sequence[Tensor | None], dtype: torch.dtype) -> _Tile:
    """Return tile `index` of the matrix `down` and of `first`, as in `_Tiles`."""
    count = len(first) // 2
    weights = tuple(tiling.gather(tiling.rows(each, index), dtype) for each in first[:count] if each is not None)
    biases = tuple(None if bias is None else tiling.columns(bias, index).flatten().to(dtype) for bias in first[count:])
    return _Tile(weights, biases, tiling.gather(tiling.columns(down, index).flatten(-2), dtype))
