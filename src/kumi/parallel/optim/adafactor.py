"""Adafactor: AdamW without a first moment and with a factored second moment (Shazeer and Stern, 2018,
arXiv:1804.04235).

The arithmetic and the constants are those of torch.optim.Adafactor: a matrix has the mean squares of its rows and of
its columns in float32, the step is relative to the parameter's root mean square, and the update's root mean square is
at most 1. Each expert's matrix is treated as a separate parameter.

Means and norms are those of unsharded tensors: sharded ones take three rounds of sums over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.optimizer import TrainedParams, drop_grads, local_grad, make_param_groups, zero_states
from kumi.parallel.optim.shard_sums import axes_of_dim, axes_of_param, sum_shards
from kumi.parallel.stage_modules import local_shard
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import COLUMN_MEANS, COUNTER, MEAN_SQUARES, ROW_MEANS
from kumi.spec.sharding import is_routed

# Constants of torch.optim.Adafactor: the exponent of the decay of the means, the least root mean square of a parameter
# to scale an update by, and the largest root mean square of an update.
_DECAY, _SMALLEST, _LARGEST = -0.8, 1e-3, 1.0


@dataclass(frozen=True)
class Adafactor:
    """Parameters in groups, their states, and their descriptions `params`."""

    optim: Optim
    mesh: Mesh
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]
    params: dict[Tensor, Param]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. All ranks must call it together."""
        updates = [
            _Update(self.params[parameter], parameter, self.state[parameter], group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for compute in (_sum_squares, _sum_means, _sum_updates):
            sum_shards([item for update in updates for item in compute(update, self.mesh)], self.mesh)
        for update in updates:
            _apply(update)

    def zero_grad(self) -> None:
        """Free the gradients."""
        drop_grads(self.param_groups)


@dataclass
class _Update:
    """A parameter's pending update.

    `param`: the description of the parameter.
    `group`: its settings.
    `row_squares`, `column_squares`: sums of squares of the gradient's rows and columns; None for vectors.
    `means`: sum of the row means; None for vectors.
    `direction`: the update before it is scaled.
    `parameter_square`, `direction_square`: sums of squares of the parameter and of `direction`.

    Sums are over this rank's shard until `sum_shards` adds those of the other ranks.
    """

    param: Param
    parameter: nn.Parameter
    state: dict[str, Tensor]
    group: dict[str, Any]
    row_squares: Tensor | None = None
    column_squares: Tensor | None = None
    means: Tensor | None = None
    parameter_square: Tensor | None = None
    direction: Tensor | None = None
    direction_square: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        """This rank's shard of the gradient."""
        return local_grad(self.parameter)

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded tensor; for routed experts, of one expert."""
        return prod(self.param.shape[is_routed(self.param) :])


# Tensors to sum: (tensor, parameter, axes to sum over).
_Sums = Iterator[tuple[Tensor, Param, tuple[str, ...]]]


def _sum_of_squares(tensor: Tensor, param: Param) -> Tensor:
    """Return the sum of squares of a tensor; for routed experts, of each expert."""
    dims = tuple(range(int(is_routed(param)), tensor.ndim))
    return tensor.square().sum(dims, keepdim=True)


def _sum_squares(update: _Update, mesh: Mesh) -> _Sums:
    """Yield the sums of squares of the gradient's rows and columns, and of the parameter."""
    param, layout, gradient = update.param, mesh.layout, update.gradient
    if ROW_MEANS in update.state:
        squares = gradient.square()
        update.row_squares, update.column_squares = squares.sum(-1, keepdim=True), squares.sum(-2, keepdim=True)
        last = len(param.dims) - 1
        yield update.row_squares, param, axes_of_dim(param, layout, last)
        yield update.column_squares, param, axes_of_dim(param, layout, last - 1)
    update.parameter_square = _sum_of_squares(local_shard(update.parameter), param)
    yield update.parameter_square, param, axes_of_param(param, layout)


def _sum_means(update: _Update, mesh: Mesh) -> _Sums:
    """Update the means of squares, and yield the sum of the row means."""
    state, shape = update.state, update.param.shape
    state[COUNTER].add_(1)
    weight = state[COUNTER].double() ** _DECAY
    if update.row_squares is None or update.column_squares is None:
        _update_mean(state[MEAN_SQUARES], update.gradient.square(), weight)
        return
    _update_mean(state[ROW_MEANS], update.row_squares / shape[-1], weight)
    _update_mean(state[COLUMN_MEANS], update.column_squares / shape[-2], weight)
    update.means = state[ROW_MEANS].to(update.gradient.dtype).sum(-2, keepdim=True)
    yield update.means, update.param, axes_of_dim(update.param, mesh.layout, len(shape) - 2)


def _update_mean(mean: Tensor, value: Tensor, weight: Tensor) -> None:
    mean.lerp_(value.to(mean.dtype), weight.to(mean.dtype))


def _sum_updates(update: _Update, mesh: Mesh) -> _Sums:
    """Compute the update, and yield its sum of squares."""
    gradient, state = update.gradient, update.state
    eps = torch.finfo(gradient.dtype).eps
    if update.means is None:
        estimate = state[MEAN_SQUARES].to(gradient.dtype)
    else:
        rows, columns = (state[name].to(gradient.dtype) for name in (ROW_MEANS, COLUMN_MEANS))
        estimate = rows * columns / (update.means / update.param.shape[-2]).clamp(min=eps)
    update.direction = estimate.clamp(min=eps * eps).rsqrt_().mul_(gradient)
    update.direction_square = _sum_of_squares(update.direction, update.param)
    yield update.direction_square, update.param, axes_of_param(update.param, mesh.layout)


def _apply(update: _Update) -> None:
    """Decay the parameter and subtract the update, scaled by the parameter's root mean square before the update."""
    direction, parameter, lr = update.direction, local_shard(update.parameter), update.group["lr"]
    assert update.parameter_square is not None
    assert update.direction_square is not None
    assert direction is not None
    relative = (update.state[COUNTER].double() ** -0.5).clamp(max=lr)
    size = (update.parameter_square / update.numel).sqrt().clamp(min=_SMALLEST)
    excess = ((update.direction_square / update.numel).sqrt() / _LARGEST).clamp(min=1.0)
    parameter.mul_(1 - lr * update.group["weight_decay"])
    parameter.sub_(direction.mul_((size * relative / excess).to(direction.dtype)))


def build_adafactor(trained: TrainedParams) -> Adafactor:
    """Return Adafactor over `trained`, with its states zero."""
    groups = make_param_groups([(parameter, param.decayed) for param, parameter in trained.parameters], trained.optim)
    states: dict[Tensor, dict[str, Tensor]] = {
        parameter: zero_states(param, parameter, trained.optim, trained.mesh) for param, parameter in trained.parameters
    }
    params: dict[Tensor, Param] = {parameter: param for param, parameter in trained.parameters}
    return Adafactor(trained.optim, trained.mesh, groups, states, params)
