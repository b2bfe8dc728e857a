"""Causal attention over packed documents with softcap, ALiBi or sinks, on any device.

PyTorch's GPU kernels support none of these. Blocks of queries are multiplied with the keys that they see, as in
`kumi.nn.attention.partial_attention`. The log-sum-exp is kept for the backward pass, but no tensor of size S x S.

PyTorch's dispatcher sees the attention as one operator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kumi.nn.attention import partial_attention
from kumi.nn.attention.attention_operators import (
    attention_backward_flops,
    attention_flops,
    empty_sums,
    fake_grads,
    fake_output_and_lse,
    finish_output,
    group_backward_inputs,
)
from kumi.nn.attention.partial_attention import Block, key_value_part, ungroup_heads
from kumi.nn.attention.scores import PLAIN_SCORES, SCORES_SCHEMA, Scores
from kumi.nn.custom_ops import define_op


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[int],
    window: int | None,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Return causal attention (B, S, H, E') of `q` (B, S, H, E) over `k` (B, S, K, E) and `v` (B, S, K, E').

    `cu_seqlens`, `window` and `sinks` are those of `kumi.nn.attention.cpu_attention.packed_attention`.
    """
    out: Tensor = CHUNKED_ATTENTION(q, k, v, cu_seqlens, window or 0, sinks, *scores)[0]
    return out


# The masks of a plan take megabytes, so only four plans are kept: those of the last two microbatches in a model with
# two windows.
@lru_cache(maxsize=4)
def _plan(cu_seqlens: tuple[int, ...], rows: int, window: int, device: torch.device) -> tuple[Block, ...]:
    earliest = partial_attention.first_visible(cu_seqlens, rows, window)
    positions = torch.arange(earliest.shape[1])
    return partial_attention.query_blocks(positions, positions, earliest, len(positions), device)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[int],
    window: int,
    sinks: Tensor | None = None,
    *score_options: Any,
) -> tuple[Tensor, Tensor]:
    queries, out, lse = empty_sums(q, k, v)
    part = key_value_part(k, v, torch.arange(k.shape[1]), cu_seqlens, Scores(*score_options), backward=False)
    partial_attention.attend_blocks(queries, part, _plan(tuple(cu_seqlens), len(q), window, q.device), out, lse)
    return finish_output(out, lse, sinks, q.dtype)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: list[int],
    window: int,
    *score_options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = Scores(*score_options)
    queries, grads, sums, delta = group_backward_inputs(grad, q, out, lse, k.shape[2])
    grad_q, grad_k, grad_v = (
        x.new_zeros(x.shape, dtype=lse.dtype) for x in (queries, *(y.transpose(1, 2) for y in (k, v)))
    )
    part = key_value_part(k, v, torch.arange(k.shape[1]), cu_seqlens, scores, backward=True)
    plan = _plan(tuple(cu_seqlens), len(q), window, q.device)
    partial_attention.attend_blocks_backward(queries, part, plan, grads, sums, delta, grad_q, grad_k, grad_v)
    factor = scores.factor(q.shape[-1])
    grad_k, grad_v = ((x.transpose(1, 2)).to(k.dtype).contiguous() for x in (grad_k * factor, grad_v))
    return ungroup_heads(grad_q * factor).to(q.dtype).contiguous(), grad_k, grad_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.cu_seqlens, ctx.window, sinks = inputs[:6]
    ctx.scores = inputs[6:]
    ctx.save_for_backward(*tensors, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, sinks = ctx.saved_tensors
    grad_sinks = None if sinks is None else partial_attention.grad_of_sinks(grad, out, lse, sinks)
    grads = _BACKWARD(grad, *tensors, out, lse, ctx.cu_seqlens, ctx.window, *ctx.scores)
    return *grads, None, None, grad_sinks, *(None for _ in ctx.scores)


_TENSORS, _MASK_ARGS = "Tensor q, Tensor k, Tensor v", "int[] bounds, int window"
# The operator in PyTorch's dispatcher.
CHUNKED_ATTENTION = define_op(
    "block_attention",
    f"({_TENSORS}, {_MASK_ARGS}, Tensor? sinks=None, {SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    fake_output_and_lse,
)
_BACKWARD = define_op(
    "block_attention_backward",
    f"(Tensor grad, {_TENSORS}, Tensor out, Tensor lse, {_MASK_ARGS}, {SCORES_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake_grads,
)
torch.library.register_autograd("kumi::block_attention", _differentiate, setup_context=_save)
register_flop_formula(torch.ops.kumi.block_attention)(attention_flops)
register_flop_formula(torch.ops.kumi.block_attention_backward)(attention_backward_flops)
