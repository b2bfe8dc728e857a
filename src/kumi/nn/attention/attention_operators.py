"""Parts that attention operators share: FLOP formulas, fake results, and the grouping of heads around the kernels.

Tensors are (B, S, H, E) outside of the operators. Inside, the G query heads of a key head are grouped, (B, K, G, S, E).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kumi.nn.attention.partial_attention import add_sinks, group_heads, ungroup_heads
from kumi.nn.dtypes import wide


def attention_flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return the FLOPs of the forward pass as PyTorch counts attention: two products over all S x S pairs."""
    batch, length, heads, size = q
    return 2 * batch * heads * length * length * (size + v[3])


def attention_backward_flops(
    grad: tuple[int, ...], q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """Return the FLOPs of the backward pass as PyTorch counts attention: five products over all S x S pairs.

    One product recomputes the scores; the other four are two for each product of the forward pass.
    """
    batch, length, heads, size = q
    return 2 * batch * heads * length * length * (3 * size + 2 * v[3])


def fake_output_and_lse(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors with the shapes of a result (B, S, H, E') and its log-sum-exp (B, S, H)."""
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def fake_grads(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return empty tensors like queries, keys and values, the first three of `inputs`."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def empty_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return grouped queries, and the result (B, K, G, S, E') and log-sum-exp (B, K, G, S) of no keys."""
    queries = group_heads(q, k.shape[2])
    out = queries.new_zeros(*queries.shape[:-1], v.shape[-1], dtype=wide(q.dtype))
    return queries, out, out.new_full(out.shape[:-1], -torch.inf)


def finish_output(out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Add sinks to a grouped result and log-sum-exp; return them as (B, S, H, E') in `dtype`, and (B, S, H)."""
    if sinks is not None:
        add_sinks(out, lse, sinks)
    return ungroup_heads(out).to(dtype).contiguous(), ungroup_heads(lse[..., None])[..., 0].contiguous()


def group_backward_inputs(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return grouped queries, gradients of the result, log-sum-exps, and sums of gradient times result."""
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    queries, grads, sums, deltas = (group_heads(x, kv_heads) for x in (q, grad, lse[..., None], delta))
    return queries, grads, sums[..., 0], deltas[..., 0]
