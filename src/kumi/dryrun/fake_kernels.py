"""Fake GPU kernels for a model of fake CPU tensors: the kernels return and save tensors of the right shapes.

kumi calls different kernels on a CPU and on a GPU. These replacements save the same tensors for the backward as a
GPU's: attention saves queries, keys, values, output and log-sum-exp (flash attention), a norm its input and 1 / rms,
the loss the logits of a GPU's chunks. Every routed expert gets the same number of tokens, because a router's fake
scores choose no experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.attention.chunked_attention import chunked_attention
from kumi.nn.attention.partial_attention import Block
from kumi.nn.attention.scores import PLAIN_SCORES, Scores
from kumi.nn.decoder import Decoder
from kumi.nn.dtypes import wide
from kumi.nn.moe import MoE
from kumi.nn.nf4 import NF4Matrix
from kumi.nn.norm import RMSNorm, rms_norm
from kumi.nn.router import Routing
from kumi.parallel.expert_parallel import ExpertExchange
from kumi.parallel.mesh import Mesh
from kumi.parallel.ring_attention import RING_ATTENTION as RING
from kumi.parallel.token_collectives import IMPLEMENTATIONS
from kumi.parallel.ulysses import ulysses_attention_fn
from kumi.spec.lora import NF4_BLOCK


def use_fake_kernels(decoder: nn.Module, mesh: Mesh, kind: str) -> None:
    """Replace kernels of `decoder` so that it saves the same tensors for the backward as on a device of `kind`."""
    assert isinstance(decoder, Decoder)
    for module in decoder.modules():
        if isinstance(module, MoE) and isinstance(module.exchange, ExpertExchange):
            module.exchange = BalancedExchange(module.exchange.ep, module.exchange.expert_tp)
        if isinstance(module, NF4Matrix):
            module.unpack = _unpacked_blocks
        if kind == "cuda" and isinstance(module, RMSNorm) and module.function is rms_norm:
            module.function = _norm
    decoder.weighted_sum = partial(decoder.weighted_sum, device_kind=kind)
    decoder.log_probs = partial(decoder.log_probs, device_kind=kind)
    if kind == "cuda":
        _use_flash(decoder, mesh)


def _unpacked_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor like the result of `kumi.nn.nf4.unpack_blocks`, without bitsandbytes."""
    return codes.new_empty(len(codes), NF4_BLOCK, dtype=dtype)


def _use_flash(decoder: Decoder, mesh: Mesh) -> None:
    """Make `decoder` use fake flash attention, under Ulysses on each rank's heads; leave ring attention as it is."""
    group = mesh.group("cp")
    if group is None:
        decoder.make_attention = lambda tokens, document_ids, cu_seqlens=None: _flash
    elif mesh.layout.context == "ulysses":
        ulysses = ulysses_attention_fn(_flash, group)
        decoder.make_attention = lambda tokens, document_ids, cu_seqlens=None: ulysses


def _flash(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None, scores: Scores = PLAIN_SCORES
) -> Tensor:
    """Flash attention, (B, S, H, E) -> (B, S, H, E'). Shorter values are padded to the head size of the keys."""
    if sinks is not None or not scores.fused:
        # Blockwise attention saves the same tensors as flash attention.
        return chunked_attention(q, k, v, list(range(0, q[..., 0, 0].numel() + 1, q.shape[1])), window, sinks, scores)
    missing = q.shape[3] - v.shape[3]
    q, k, padded = (x.transpose(1, 2) for x in (q, k, F.pad(v, (0, missing)) if missing else v))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, padded, 0.0, True)[0]
    return out.transpose(1, 2)[..., : v.shape[3]]


def _norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    out: Tensor = _Norm.apply(x, weight.to(x.dtype))  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    """The fused kernel of F.rms_norm, which saves no copies of its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=wide(x.dtype))
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class BalancedExchange(ExpertExchange):
    """An expert exchange in which every rank sends the same number of rows to every rank.

    `rows`: the rows (one per token and chosen expert) that this rank sends in the current dispatch.
    """

    rows = 0

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Any]:
        self.rows = routing.ids.numel() * (1 if self.expert_tp is None else self.expert_tp.size())
        return super().dispatch(x, routing)

    def _splits(self, counts: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Return equal numbers of rows to send and to receive; the counts are exchanged as in training."""
        assert self.ep is not None
        sent, ranks = counts.view(self.ep.size(), -1), self.ep.size()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.ep)
        even = [self.rows // ranks + (index < self.rows % ranks) for index in range(ranks)]
        return even, even, received


def ring_without_attention(flops: Counter[str]) -> dict[Any, Callable[..., Any]]:
    """Return replacements of the ring attention operators that send and allocate like them, without attention.

    Fake tensors have no document boundaries, so the attended blocks are unknown. The FLOPs of attention over full
    sequences are added to `flops`.
    """
    backward_operator = torch.ops.kumi.ring_attention_backward.default

    def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], *score_options: Any) -> Any:
        flops["ring_attention"] += 2 * cu_seqlens[-1] * q[0, ..., 0].numel() * (q.shape[3] + v.shape[3])
        return IMPLEMENTATIONS[RING](q, k, v, cu_seqlens, *score_options, plan=_no_blocks)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens: list[int],
        *score_options: Any,
    ) -> Any:
        flops["ring_attention_backward"] += (
            2 * cu_seqlens[-1] * q[0, ..., 0].numel() * (3 * q.shape[3] + 2 * v.shape[3])
        )
        return IMPLEMENTATIONS[backward_operator](grad, q, k, v, out, lse, cu_seqlens, *score_options, plan=_no_blocks)

    return {RING: forward, backward_operator: backward}


def _no_blocks(*_: Any) -> tuple[Block, ...]:
    return ()
