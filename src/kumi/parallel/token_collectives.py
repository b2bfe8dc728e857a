"""Collectives of n ranks with gradients, over the T tokens in dim 0.

                      shape                    backward
    all_gather        (T/n, ..) -> (T, ..)     reduce-scatter
    reduce_scatter    (T, ..) -> (T/n, ..)     all-gather
    all_reduce        (..) -> (..)             identity: the gradient is the same on all ranks
    copy_to_group     (..) -> (..), identity   all-reduce
    gather_results    (T/n, ..) -> (T, ..)     the rank's own rows: the gradient is the same on all ranks

(Korthikanti et al., 2022, arXiv:2205.05198, figure 5.)

PyTorch's dispatcher sees each collective as one operator without side effects, so selective recomputation can save its
result and send nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.compat import group_by_name, single_tensor_collectives
from kumi.nn import custom_ops


def all_gather_no_grad(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the shards `x` (T/n, ..) of all ranks as (T, ..), without a gradient."""
    out: Tensor = ALL_GATHER(x, group.size(), group.group_name)
    return out


def reduce_scatter_no_grad(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard (T/n, ..) of the sum of `x` (T, ..) over ranks, without a gradient."""
    out: Tensor = REDUCE_SCATTER(x, group.size(), group.group_name)
    return out


def all_reduce_no_grad(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over ranks as a new tensor, without a gradient."""
    out: Tensor = ALL_REDUCE(x, group.group_name)
    return out


def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    out = _empty_rows(x, x.shape[0] * size)
    single_tensor_collectives()[0](out, x.contiguous(), group=group_by_name(group))
    return out


def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    out = _empty_rows(x, x.shape[0] // size)
    single_tensor_collectives()[1](out, x.contiguous(), group=group_by_name(group))
    return out


def _all_reduce(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group_by_name(group))
    return out


def _empty_rows(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


# Communicating operator -> its Python function, whose collectives a dispatch mode can observe.
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}


def define_collective(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register `function` as the operator kumi::`name`, as `define_op` does, and add it to `IMPLEMENTATIONS`."""
    operator = custom_ops.define_op(name, schema, function, fake)
    IMPLEMENTATIONS[operator] = function
    return operator


ALL_GATHER = define_collective(
    "gather_tokens",
    "(Tensor x, int size, str group) -> Tensor",
    _all_gather,
    lambda x, size, group: _empty_rows(x, x.shape[0] * size),
)
REDUCE_SCATTER = define_collective(
    "scatter_tokens",
    "(Tensor x, int size, str group) -> Tensor",
    _reduce_scatter,
    lambda x, size, group: _empty_rows(x, x.shape[0] // size),
)
ALL_REDUCE = define_collective(
    "sum_tokens",
    "(Tensor x, str group) -> Tensor",
    _all_reduce,
    lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the shards `x` (T/n, ..) of all ranks as (T, ..). The ranks' gradients of it are summed."""
    out: Tensor = _AllGather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard (T/n, ..) of the sum of `x` (T, ..) over ranks."""
    out: Tensor = _ReduceScatter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over ranks. All ranks must compute the same with it."""
    out: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`, which is the same on all ranks. The ranks' gradients of it are summed."""
    out: Tensor = _CopyToGroup.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather_results(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the shards `x` (T/n, ..) of all ranks as (T, ..). All ranks must compute the same with it."""
    out: Tensor = _GatherResults.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_no_grad(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_no_grad(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_no_grad(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_no_grad(grad, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce_no_grad(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_no_grad(grad, ctx.group), None


class _GatherResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_no_grad(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None
