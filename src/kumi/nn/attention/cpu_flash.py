"""Causal attention over packed documents on the CPU by PyTorch's own flash kernel.

The kernel has no document mask, but it reads any range of tokens without a copy. Consecutive documents of the same
length form one call, as the rows of a batch. The kernel supports fewer key heads than query heads, and its log-sum-exp
is kept for the backward pass (Dao et al., 2022, arXiv:2205.14135). `kumi.nn.attention.cpu_attention` computes the rest:
windows, sinks, softcap, ALiBi, and values of another size than keys.

PyTorch's dispatcher sees the attention as one operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kumi.nn.attention.attention_operators import attention_backward_flops, attention_flops, fake_grads
from kumi.nn.custom_ops import define_op
from kumi.nn.dtypes import wide
from kumi.nn.numerics import uses_flash

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Run(NamedTuple):
    """Consecutive documents of `length` tokens each: tokens `start` to `stop` of the batch."""

    start: int
    stop: int
    length: int

    def documents(self, x: Tensor) -> Tensor:
        """Return these tokens of `x` (T, H, E) in the kernel's layout, (documents, H, length, E)."""
        return x[self.start : self.stop].view(-1, self.length, *x.shape[1:]).transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], scale: float | None = None) -> Tensor:
    """Return causal attention (B, S, H, E) of `q` (B, S, H, E) over `k` and `v` (B, S, K, E).

    `cu_seqlens`: the first token of each document, counted through the batch, followed by the number of tokens.
    `scale`: factor of the scores; None for 1 / sqrt(E).
    """
    out: Tensor = FLASH_ATTENTION(q, k, v, list(cu_seqlens), scale)[0]
    return out


def prefers_flash(q: Tensor, v: Tensor, cu_seqlens: Sequence[int], window: int | None) -> bool:
    """Return True if the kernel supports these heads and this `window`, and is chosen for this dtype and mean length.

    docs/decisions/cpu-numerics.md explains the choice.
    """
    if v.shape[-1] != q.shape[-1] or not uses_flash(q.dtype, (cu_seqlens[-1] - cu_seqlens[0]) / (len(cu_seqlens) - 1)):
        return False
    return window is None or window >= max(run.length for run in _runs(cu_seqlens))


def _runs(cu_seqlens: Sequence[int]) -> Iterator[_Run]:
    first, length = cu_seqlens[0], cu_seqlens[1] - cu_seqlens[0]
    for start, stop in pairwise(cu_seqlens[1:]):
        if stop - start != length:
            yield _Run(first, start, length)
            first, length = start, stop - start
    yield _Run(first, cu_seqlens[-1], length)


def _tokens(x: Tensor) -> Tensor:
    """Return `x` (B, S, H, E) as (T, H, E), with contiguous heads: the kernel reads other memory layouts wrongly."""
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the result (B, S, H, E) and the log-sum-exp (T * H,), by call, document, head and position."""
    tokens = list(map(_tokens, (q, k, v)))
    parts = [_forward_kernel(*map(run.documents, tokens), 0.0, True, scale=scale) for run in _runs(cu_seqlens)]
    outs = [out.transpose(1, 2).flatten(0, 1) for out, _ in parts]
    sums = [lse.flatten() for _, lse in parts]
    out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in (outs, sums))
    return out.view(q.shape), lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: list[int], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    heads, tokens = q.shape[2], list(map(_tokens, (grad, q, k, v, out)))
    parts = []
    for run in _runs(cu_seqlens):
        sums = lse[run.start * heads : run.stop * heads].view(-1, heads, run.length)
        gradients = _backward_kernel(*map(run.documents, tokens), sums, 0.0, True, scale=scale)
        parts.append([x.transpose(1, 2).flatten(0, 1) for x in gradients])
    all_grads = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
    grad_q, grad_k, grad_v = (x.reshape(like.shape) for x, like in zip(all_grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3].numel(), dtype=wide(q.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_BACKWARD(grad, *ctx.saved_tensors, ctx.cu_seqlens, ctx.scale), None, None


_INPUTS = "Tensor q, Tensor k, Tensor v"
# The operator in PyTorch's dispatcher.
FLASH_ATTENTION = define_op(
    "flash_attention", f"({_INPUTS}, int[] bounds, float? scale) -> (Tensor, Tensor)", _forward, _fake
)
_BACKWARD = define_op(
    "flash_attention_backward",
    f"(Tensor grad, {_INPUTS}, Tensor out, Tensor lse, int[] bounds, float? scale) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake_grads,
)
torch.library.register_autograd("kumi::flash_attention", _differentiate, setup_context=_save)
register_flop_formula(torch.ops.kumi.flash_attention)(attention_flops)
register_flop_formula(torch.ops.kumi.flash_attention_backward)(attention_backward_flops)
