"""Tensor parallelism whose matrix products and messages go on at the same time, piece by piece, on GPUs that read each
other's memory.

Where a region begins, a rank multiplies what it has of the tokens while it fetches the others'; where one ends, it
multiplies the tokens of one rank after the other, and each takes its own while the next are multiplied (Wang et al.,
2022, doi:10.1145/3567955.3567959; PyTorch's symmetric memory). The backward pass does the same with the roles changed.
The sums are those of `kumi.parallel.tensor_parallel`, in another order.
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

from kumi.compat import all_gather_matmul, enable_symmetric_memory, matmul_reduce_scatter, single_tensor_collectives
from kumi.errors import LayoutError
from kumi.nn.decoder import Decoder
from kumi.nn.linear import Linear, add_gradients
from kumi.parallel.mesh import Mesh
from kumi.parallel.tensor_parallel import SharedRegion
from kumi.parallel.token_collectives import define


def overlap(decoder: Decoder, mesh: Mesh) -> None:
    """Makes the regions of `decoder`, which `tensor.cut` has cut, multiply and send at the same time.

    Raises LayoutError where the ranks have no memory to share or nothing to gather.
    """
    group = mesh.group("tp")
    if mesh.device.type != "cuda" or group is None or not mesh.layout.sequence_parallel:
        raise LayoutError(
            f"comm.async_tp=true on {mesh.device} with tp={mesh.layout.tp} and "
            f"sequence_parallel={str(mesh.layout.sequence_parallel).lower()}: products overlap with the gathering of "
            f"tokens between CUDA devices only; set comm.async_tp = false, or layout.tp > 1 and "
            f"layout.sequence_parallel = true on GPUs"
        )
    enable_symmetric_memory(group)
    use(decoder, group)


def use(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives the shared regions of `model` their overlapped kind."""
    for module in model.modules():
        if isinstance(getattr(module, "region", None), SharedRegion):
            module.region = OverlappedRegion(group, True, bool(module.region.selective))  # type: ignore[assignment,union-attr]


class OverlappedRegion(SharedRegion):
    """A region with sequence parallelism whose messages hide behind its products."""

    def enter(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        weights = [layer.weight.to(x.dtype) for layer in layers]
        made: tuple[Tensor, ...] = _Enter.apply(x, self.group, layers, *weights)  # type: ignore[no-untyped-call]
        biases = [layer.bias for layer in layers]
        return tuple(out if bias is None else out + bias.to(x.dtype) for out, bias in zip(made, biases, strict=True))

    def leave(self, x: Tensor, layer: Linear) -> Tensor:
        weight = layer.weight.to(x.dtype)
        out: Tensor = _Leave.apply(x.flatten(0, -2), self.group, layer, weight)  # type: ignore[no-untyped-call]
        return out if layer.bias is None else out + layer.bias.to(out.dtype)


class _Enter(torch.autograd.Function):
    """Products of an input that is gathered piece by piece, and gathered again for the weights' gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, layers: Sequence[Linear], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.layers = group, layers
        return tuple(PRODUCTS(x, list(weights), group.size(), group.group_name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group: dist.ProcessGroup = ctx.group
        later = ctx.layers[0].later
        # On its way while the gradient of the input is computed.
        whole = x.new_empty(x.shape[0] * group.size(), x.shape[1])
        coming = None if later is not None else _begin(whole, x, group)
        joined = grads[0] if len(grads) == 1 else torch.cat(grads, dim=1)
        of_x = SCATTERED(
            joined, weights[0].T if len(weights) == 1 else torch.cat(weights).T, group.size(), group.group_name
        )
        if later is not None:
            later.append(partial(_finish, ctx.layers, x, grads, group))
            return (of_x, *[None] * (2 + len(weights)))
        assert coming is not None
        coming.wait()
        return (of_x, None, None, *[grad.T @ whole for grad in grads])


class _Leave(torch.autograd.Function):
    """A product whose sum over ranks each takes its part of, piece by piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, layer: Linear, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.layer = group, layer
        out: Tensor = SCATTERED(x, weight, group.size(), group.group_name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole, (of_x,) = all_gather_matmul(grad.contiguous(), [weight], ctx.group.group_name, keep=True)
        assert whole is not None
        if ctx.layer.later is not None:
            ctx.layer.later.append(partial(add_gradients, ctx.layer.weight, None, x, whole))
            return of_x, None, None, None
        return of_x, None, None, whole.T @ x


def _begin(whole: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = single_tensor_collectives()[0](whole, x.contiguous(), group=group, async_op=True)
    return work


@torch.no_grad()
def _finish(layers: Sequence[Linear], x: Tensor, grads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """The weights' gradients of layers that begin a region; biases have been added outside, and have theirs."""
    whole = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    _begin(whole, x, group).wait()
    for layer, grad in zip(layers, grads, strict=True):
        add_gradients(layer.weight, None, whole, grad)


def _products(x: Tensor, weights: list[Tensor], size: int, group: str) -> list[Tensor]:
    return all_gather_matmul(x.contiguous(), [weight.T for weight in weights], group, keep=False)[1]


def _scattered(x: Tensor, weight: Tensor, size: int, group: str) -> Tensor:
    return matmul_reduce_scatter(x.contiguous(), weight.T, group)


def _fake_products(x: Tensor, weights: list[Tensor], size: int, group: str) -> list[Tensor]:
    return [x.new_empty(len(x) * size, len(weight)) for weight in weights]


def _fake_scattered(x: Tensor, weight: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(len(x) // size, len(weight))


# Operators whose results selective recomputation keeps, so that nothing is sent again.
_HOW = "int size, str group"
PRODUCTS = define("overlapped_products", f"(Tensor x, Tensor[] weights, {_HOW}) -> Tensor[]", _products, _fake_products)
SCATTERED = define("overlapped_sum", f"(Tensor x, Tensor weight, {_HOW}) -> Tensor", _scattered, _fake_scattered)


@register_flop_formula(torch.ops.kumi.overlapped_products)
def _flops(x: tuple[int, ...], weights: list[tuple[int, ...]], size: int, *_: Any, **__: Any) -> int:
    return sum(2 * prod(x) * size * weight[0] for weight in weights)


@register_flop_formula(torch.ops.kumi.overlapped_sum)
def _flops_of_sum(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]
