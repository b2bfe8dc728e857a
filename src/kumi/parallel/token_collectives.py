"""Collectives with gradients, over tokens: dim 0 of a tensor whose other dims are the same on all ranks.

    gather      (T/n, ..) -> (T, ..)    the parts of all ranks; backward: sums of gradients, each rank its part
    scatter     (T, ..) -> (T/n, ..)    this rank's part of the sum over ranks; backward: the gradients of all
    total       (..) -> (..)            the sum over ranks; backward: the gradient itself, equal on all ranks
    fan_out     (..) -> (..)            the tensor itself, equal on all ranks; backward: the sum of gradients

The first two are each other's reverse, and so are the last two (Korthikanti et al., 2022, arXiv:2205.05198, figure 5).

To PyTorch's dispatcher each is one operator without side effects, so that selective recomputation can keep its result
and need not send anything again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.compat import group_by_name, single_tensor_collectives
from kumi.nn import custom_ops


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts `x` (T/n, ..) of all ranks, (T, ..), without a gradient."""
    out: Tensor = GATHER(x, group.size(), group.group_name)
    return out


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part (T/n, ..) of the sum of `x` (T, ..) over the ranks, without a gradient."""
    out: Tensor = SCATTER(x, group.size(), group.group_name)
    return out


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over the ranks, without a gradient; a new tensor."""
    out: Tensor = SUM(x, group.group_name)
    return out


def _gather(x: Tensor, size: int, group: str) -> Tensor:
    out = _room(x, x.shape[0] * size)
    single_tensor_collectives()[0](out, x.contiguous(), group=group_by_name(group))
    return out


def _scatter(x: Tensor, size: int, group: str) -> Tensor:
    out = _room(x, x.shape[0] // size)
    single_tensor_collectives()[1](out, x.contiguous(), group=group_by_name(group))
    return out


def _sum(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group_by_name(group))
    return out


def _room(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


# What the operators that communicate are made of, for those who want to see what they send.
INSIDE: dict[Any, Callable[..., Any]] = {}


def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """`function` as the operator kumi::`name` on every device, whose results look like those of `fake`."""
    operator = custom_ops.define(name, schema, function, fake)
    INSIDE[operator] = function
    return operator


GATHER = define(
    "gather_tokens",
    "(Tensor x, int size, str group) -> Tensor",
    _gather,
    lambda x, size, group: _room(x, x.shape[0] * size),
)
SCATTER = define(
    "scatter_tokens",
    "(Tensor x, int size, str group) -> Tensor",
    _scatter,
    lambda x, size, group: _room(x, x.shape[0] // size),
)
SUM = define(
    "sum_tokens",
    "(Tensor x, str group) -> Tensor",
    _sum,
    lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks; each then reads all of it for itself."""
    out: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum."""
    out: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum, which all ranks go on with alike."""
    out: Tensor = _Total.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def fan_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which all ranks have and each reads for itself."""
    out: Tensor = _FanOut.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scattered(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None
