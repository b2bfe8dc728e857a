"""Causal attention over packed documents in blocks of queries on any device: what its kernels do not compute.

Kernels of GPUs cap no scores, and PyTorch's tilt none by the distance. Blocks of queries meet the keys that they see as
matrix products, as in `kumi.nn.block_attention`; the log-sum-exp is kept, and nothing of size S x S.

To PyTorch's dispatcher this is one operator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kumi.nn import block_attention
from kumi.nn.block_attention import Block, arranged, join, split
from kumi.nn.cpu_attention import attention_backward_flops, attention_flops
from kumi.nn.dtypes import wide
from kumi.nn.operators import define
from kumi.nn.scores import PLAIN, SCHEMA, Scores


def blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[int],
    window: int | None,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN,
) -> Tensor:
    """Attention (B, S, H, E') of `q` (B, S, H, E) over `k` (B, S, K, E) and `v` (B, S, K, E').

    `bounds`, `window` and `sinks` are those of `kumi.nn.cpu_attention.packed_attention`.
    """
    out: Tensor = OPERATOR(q, k, v, bounds, window or 0, sinks, *scores)[0]
    return out


@lru_cache(maxsize=64)
def _plan(bounds: tuple[int, ...], rows: int, window: int, device: torch.device) -> tuple[Block, ...]:
    earliest = block_attention.earliest(bounds, rows, window)
    places = torch.arange(earliest.shape[1])
    return block_attention.blocks(places, places, earliest, len(places), device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[int], window: int, sinks: Tensor | None = None, *how: Any
) -> tuple[Tensor, Tensor]:
    queries = split(q, k.shape[2])
    out = queries.new_zeros(*queries.shape[:-1], v.shape[-1], dtype=wide(q.dtype))
    lse = out.new_full(out.shape[:-1], -torch.inf)
    part = arranged(k, v, torch.arange(k.shape[1]), bounds, Scores(*how), backward=False)
    block_attention.forward(queries, part, _plan(tuple(bounds), len(q), window, q.device), out, lse)
    if sinks is not None:
        block_attention.add_sinks(out, lse, sinks)
    return join(out).to(q.dtype).contiguous(), join(lse[..., None])[..., 0].contiguous()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: list[int], window: int, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, dtype, scores = k.shape[2], wide(q.dtype), Scores(*how)
    queries, grads, sums = split(q, kv_heads), split(grad, kv_heads), split(lse[..., None], kv_heads)[..., 0]
    delta = split((grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True), kv_heads)[..., 0]
    grad_q, grad_k, grad_v = (
        x.new_zeros(x.shape, dtype=dtype) for x in (queries, *(y.transpose(1, 2) for y in (k, v)))
    )
    part = arranged(k, v, torch.arange(k.shape[1]), bounds, scores, backward=True)
    along = _plan(tuple(bounds), len(q), window, q.device)
    block_attention.backward(queries, part, along, grads, sums, delta, grad_q, grad_k, grad_v)
    factor = scores.factor(q.shape[-1])
    of_k, of_v = ((x.transpose(1, 2)).to(k.dtype).contiguous() for x in (grad_k * factor, grad_v))
    return join(grad_q * factor).to(q.dtype).contiguous(), of_k, of_v


def fake_with_sums(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Of the shapes of a result (B, S, H, E') and its log-sum-exp (B, S, H)."""
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def fake_gradients(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Of the shapes of queries, keys and values, the first three of `inputs`."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bounds, ctx.window, sinks = inputs[:6]
    ctx.scores = inputs[6:]
    ctx.save_for_backward(*tensors, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, sinks = ctx.saved_tensors
    of_sinks = None if sinks is None else block_attention.grad_of_sinks(grad, out, lse, sinks)
    found = _BACKWARD(grad, *tensors, out, lse, ctx.bounds, ctx.window, *ctx.scores)
    return *found, None, None, of_sinks, *(None for _ in ctx.scores)


_TENSORS, _WHERE = "Tensor q, Tensor k, Tensor v", "int[] bounds, int window"
# The operator as PyTorch's dispatcher knows it.
OPERATOR = define(
    "block_attention",
    f"({_TENSORS}, {_WHERE}, Tensor? sinks=None, {SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    fake_with_sums,
)
_BACKWARD = define(
    "block_attention_backward",
    f"(Tensor grad, {_TENSORS}, Tensor out, Tensor lse, {_WHERE}, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake_gradients,
)
torch.library.register_autograd("kumi::block_attention", _differentiate, setup_context=_save)
register_flop_formula(torch.ops.kumi.block_attention)(attention_flops)
register_flop_formula(torch.ops.kumi.block_attention_backward)(attention_backward_flops)
