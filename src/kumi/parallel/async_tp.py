"""Asynchronous tensor parallelism: matmuls overlap with their collectives, on GPUs that read each other's memory.

A column-parallel matmul multiplies the tokens of one rank at a time: it begins with this rank's own tokens and
meanwhile fetches those of the other ranks. A row-parallel matmul computes the partial sums for the tokens of one rank
at a time: that rank fetches and adds them while those of the next rank are computed (Wang et al., 2022,
doi:10.1145/3567955.3567959; PyTorch's symmetric memory). In the backward pass, each of the two is computed like the
other. Results differ from those of `kumi.parallel.tensor_parallel` only by the order in which sums are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from kumi.accelerator import can
from kumi.compat import all_gather_matmul, enable_symmetric_memory, matmul_reduce_scatter, single_tensor_collectives
from kumi.errors import LayoutError
from kumi.nn.decoder import Decoder
from kumi.nn.linear import Linear, add_gradients
from kumi.parallel.mesh import Mesh
from kumi.parallel.tensor_parallel import ShardedProjections
from kumi.parallel.token_collectives import define_collective


def use_async_tp(decoder: Decoder, mesh: Mesh) -> None:
    """Make the sharded projections of `decoder` overlap matmuls with collectives.

    Raise LayoutError unless the ranks are CUDA devices with sequence parallelism over tp > 1.
    """
    group = mesh.group("tp")
    if not can(mesh.device, "symmetric memory") or group is None or not mesh.layout.sequence_parallel:
        raise LayoutError(
            f"comm.async_tp=true on {mesh.device} with tp={mesh.layout.tp} and "
            f"sequence_parallel={str(mesh.layout.sequence_parallel).lower()}: matmuls overlap only with the all-gather "
            f"of tokens between CUDA devices; set comm.async_tp = false, or layout.tp > 1 and "
            f"layout.sequence_parallel = true on GPUs"
        )
    enable_symmetric_memory(group)
    overlap_projections(decoder, group)


def overlap_projections(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace the sharded projections in `model` by overlapped ones."""
    for module in model.modules():
        if isinstance(getattr(module, "projections", None), ShardedProjections):
            module.projections = OverlappedProjections(group, True, bool(module.projections.selective))  # type: ignore[assignment,union-attr]


class OverlappedProjections(ShardedProjections):
    """Sharded projections with sequence parallelism whose collectives run during their matmuls."""

    def column_linear(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Return the output of each of the column-parallel `layers` for all tokens, given this rank's tokens `x`."""
        weights = [layer.weight_in(x.dtype) for layer in layers]
        outputs: tuple[Tensor, ...] = _ColumnLinear.apply(x, self.group, layers, *weights)  # type: ignore[no-untyped-call]
        biases = [layer.bias for layer in layers]
        return tuple(out if bias is None else out + bias.to(x.dtype) for out, bias in zip(outputs, biases, strict=True))

    def row_linear(self, x: Tensor, layer: Linear) -> Tensor:
        """Return the output of the row-parallel `layer` for this rank's tokens, given this rank's columns `x`."""
        weight = layer.weight_in(x.dtype)
        out: Tensor = _RowLinear.apply(x.flatten(0, -2), self.group, layer, weight)  # type: ignore[no-untyped-call]
        return out if layer.bias is None else out + layer.bias.to(out.dtype)


class _ColumnLinear(torch.autograd.Function):
    """Matmuls of an input that is all-gathered piece by piece, and again in the backward for the weight gradients.

    If the pipeline schedule defers weight gradients, the layers have a list `deferred_wgrads`, to which the backward
    appends a function that adds them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, layers: Sequence[Linear], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.layers = group, layers
        return tuple(ALL_GATHER_MATMULS(x, list(weights), group.size(), group.group_name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group: dist.ProcessGroup = ctx.group
        # A pipeline schedule that defers weight gradients sets the list on all layers of a stage, or on none.
        deferred = ctx.layers[0].deferred_wgrads
        # The all-gather runs while the gradient of the input is computed.
        full_x = x.new_empty(x.shape[0] * group.size(), x.shape[1])
        gathering = None if deferred is not None else _begin_all_gather(full_x, x, group)
        joined = grads[0] if len(grads) == 1 else torch.cat(grads, dim=1)
        grad_x = MATMUL_REDUCE_SCATTER(
            joined, weights[0].T if len(weights) == 1 else torch.cat(weights).T, group.size(), group.group_name
        )
        if deferred is not None:
            deferred.append(partial(_add_weight_grads, ctx.layers, x, grads, group))
            return (grad_x, *[None] * (2 + len(weights)))
        assert gathering is not None
        gathering.wait()
        return (grad_x, None, None, *[grad.T @ full_x for grad in grads])


class _RowLinear(torch.autograd.Function):
    """A matmul whose sum over ranks is reduce-scattered piece by piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, layer: Linear, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.layer = group, layer
        out: Tensor = MATMUL_REDUCE_SCATTER(x, weight, group.size(), group.group_name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        full_grad, (grad_x,) = all_gather_matmul(grad.contiguous(), [weight], ctx.group.group_name, keep=True)
        assert full_grad is not None
        if ctx.layer.deferred_wgrads is not None:
            ctx.layer.deferred_wgrads.append(partial(add_gradients, ctx.layer.weight, None, x, full_grad))
            return grad_x, None, None, None
        return grad_x, None, None, full_grad.T @ x


def _begin_all_gather(full_x: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = single_tensor_collectives()[0](full_x, x.contiguous(), group=group, async_op=True)
    return work


@torch.no_grad()
def _add_weight_grads(layers: Sequence[Linear], x: Tensor, grads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Add the weight gradients of column-parallel `layers`, given this rank's tokens `x` and the outputs' `grads`.

    `_ColumnLinear` adds no biases, so their gradients are computed elsewhere.
    """
    full_x = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    _begin_all_gather(full_x, x, group).wait()
    for layer, grad in zip(layers, grads, strict=True):
        add_gradients(layer.weight, None, full_x, grad)


def _all_gather_matmuls(x: Tensor, weights: list[Tensor], size: int, group: str) -> list[Tensor]:
    return all_gather_matmul(x.contiguous(), [weight.T for weight in weights], group, keep=False)[1]


def _matmul_reduce_scatter(x: Tensor, weight: Tensor, size: int, group: str) -> Tensor:
    return matmul_reduce_scatter(x.contiguous(), weight.T, group)


def _fake_matmuls(x: Tensor, weights: list[Tensor], size: int, group: str) -> list[Tensor]:
    return [x.new_empty(len(x) * size, len(weight)) for weight in weights]


def _fake_reduce_scatter(x: Tensor, weight: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(len(x) // size, len(weight))


# Selective recomputation saves the results of these operators, so that nothing is sent twice.
_GROUP_ARGS = "int size, str group"
ALL_GATHER_MATMULS = define_collective(
    "overlapped_products",
    f"(Tensor x, Tensor[] weights, {_GROUP_ARGS}) -> Tensor[]",
    _all_gather_matmuls,
    _fake_matmuls,
)
MATMUL_REDUCE_SCATTER = define_collective(
    "overlapped_sum",
    f"(Tensor x, Tensor weight, {_GROUP_ARGS}) -> Tensor",
    _matmul_reduce_scatter,
    _fake_reduce_scatter,
)


@register_flop_formula(torch.ops.kumi.overlapped_products)
def _matmul_flops(x: tuple[int, ...], weights: list[tuple[int, ...]], size: int, *_: Any, **__: Any) -> int:
    return sum(2 * prod(x) * size * weight[0] for weight in weights)


@register_flop_formula(torch.ops.kumi.overlapped_sum)
def _reduce_scatter_flops(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]
