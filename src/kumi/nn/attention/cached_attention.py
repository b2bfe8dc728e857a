"""Attention over a cache of earlier keys and values, one sequence per slot, for generation.

A cache is filled by a `PromptStep`, which packs whole prompts into one row, and then extended by `TokenStep`s, each of
which has one new token of every active slot, or by an `ExtendStep`, which has several new tokens of one slot. The
module computes queries, keys and values as in training; only the attention function of its `AttentionContext` differs.
No gradients.

Letters: N active slots, C positions of a slot, K key heads, G query heads per key head, E dims of a head, L cached
positions in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kumi.nn.attention.attention_context import AttentionFn
from kumi.nn.attention.extended_attention import extended_attention, extended_latent_attention
from kumi.nn.attention.scores import PLAIN_SCORES, Scores
from kumi.nn.dtypes import wide
from kumi.nn.numerics import small_matmul_precision


@dataclass(frozen=True)
class PackedPrompt:
    """One prompt of a `PromptStep`: its tokens start to stop of the row, and the slots that begin with it."""

    start: int
    stop: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class PromptStep:
    """Whole prompts, packed into one row (1, T). Tokens outside of `prompts` are not cached."""

    prompts: tuple[PackedPrompt, ...]


@dataclass(frozen=True)
class TokenStep:
    """One new token of each of the slots 0 to N - 1.

    `lengths` (N,): number of tokens before the new one, which is its position.
    `longest`: the largest of `lengths`, known to the host.
    `equal`: all `lengths` are the same: replies to one prompt grow together.
    """

    lengths: Tensor
    longest: int
    equal: bool = False

    @cached_property
    def rows(self) -> Tensor:
        """The slots, (N,)."""
        return torch.arange(len(self.lengths), device=self.lengths.device)

    @cached_property
    def places(self) -> dict[tuple[int, int], Tensor]:
        """The results of `place`, which all layers with the same cache shape share."""
        return {}

    def place(self, heads: int, capacity: int) -> Tensor:
        """Return the row indices (N * heads,) of the new tokens in a cache (slots * heads * capacity, E)."""
        key = heads, capacity
        if key not in self.places:
            first = torch.arange(len(self.lengths) * heads, device=self.lengths.device).view(-1, heads) * capacity
            self.places[key] = (first + (self.lengths % capacity)[:, None]).flatten()
        return self.places[key]

    @cached_property
    def masks(self) -> dict[tuple[int, torch.dtype], Tensor]:
        """The results of `mask`, which all layers with the same capacity share."""
        return {}

    def visible(self, capacity: int) -> Tensor:
        """Return True (N, 1, 1, L) at the positions in use of slots with `capacity` positions."""
        used = min(self.longest + 1, capacity)
        return (torch.arange(used, device=self.lengths.device) <= self.lengths[:, None])[:, None, None]

    def mask(self, capacity: int, dtype: torch.dtype) -> Tensor:
        """Return 0 where `visible` is True, and -inf elsewhere: kernels are slower with a mask of bools."""
        key = capacity, dtype
        if key not in self.masks:
            visible = self.visible(capacity)
            self.masks[key] = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
                ~visible, -torch.inf
            )
        return self.masks[key]


@dataclass(frozen=True)
class ExtendStep:
    """New tokens of one slot in a row (1, T), at its positions start to stop; the cache has those before `start`."""

    slot: int
    start: int
    stop: int


Step = PromptStep | TokenStep | ExtendStep


class AttentionCache:
    """Keys and values of one layer of grouped-query attention, (slots, K, C, E).

    With a sliding window, C is at most the window, and a new token takes the place of the oldest one.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.tensors: tuple[Tensor, ...] = (keys, values)

    def attend(
        self,
        step: Step,
        within: AttentionFn,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        sinks: Tensor | None = None,
        scores: Scores = PLAIN_SCORES,
    ) -> Tensor:
        """Return the result of `AttentionFn` over cached keys and values and the new `k` and `v`, which join the cache.

        `within` is the attention function of the new tokens alone, used for whole prompts.
        """
        keys, values = self.tensors
        if isinstance(step, PromptStep):
            for prompt in step.prompts:
                put_prompt(keys, k[0].transpose(0, 1), prompt)
                put_prompt(values, v[0].transpose(0, 1), prompt)
            return within(q, k, v, window, sinks, scores)
        if isinstance(step, ExtendStep):
            all_keys, all_values = (
                extend(x[step.slot], new[0].transpose(0, 1), step) for x, new in ((keys, k), (values, v))
            )
            first = step.stop - all_keys.shape[1]
            return extended_attention(q[0], all_keys, all_values, first, window, sinks, scores)[None]
        return self._attend_tokens(step, q, k, v, sinks, scores)

    @small_matmul_precision()
    def _attend_tokens(
        self, step: TokenStep, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scores: Scores
    ) -> Tensor:
        """Return the result of `attend` for one new token of each slot."""
        keys, values = self.tensors
        capacity, count = keys.shape[2], len(q)
        if step.equal:  # one place in all slots: a copy, which takes less time than writes by index
            place = step.longest % capacity
            for cached, new in ((keys, k), (values, v)):
                cached[:count, :, place].copy_(new[:, 0])
        else:
            places = step.place(k.shape[2], capacity)
            for cached, new in ((keys, k), (values, v)):
                rows = new.reshape(-1, cached.shape[3]).to(cached.dtype)
                cached.view(-1, cached.shape[3]).index_copy_(0, places, rows)
        used = min(step.longest + 1, capacity)
        queries = q.view(count, k.shape[2], -1, q.shape[3])
        seen = keys[:count, :, :used], values[:count, :, :used]
        if sinks is None and scores.fused:
            mask = None if step.equal else step.mask(capacity, q.dtype)
            out = F.scaled_dot_product_attention(queries, *seen, attn_mask=mask, scale=scores.scale)
        else:
            out = _custom_attention(queries, *seen, step.visible(capacity), step, sinks, scores)
        return out.reshape(count, 1, q.shape[2], -1)

    def copy(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        copy_slot(self.tensors, source, target)


class LatentCache:
    """Latents and rotated keys (slots, C, rank + R) of one layer of multi-head latent attention.

    Tokens attend in the space of the latents (DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1.2): the projection from
    latents to keys is applied to the queries, and that to values to the weighted sum of latents. So the cache is the
    same for any number of heads.
    """

    def __init__(self, latents: Tensor) -> None:
        self.tensors: tuple[Tensor, ...] = (latents,)
        self.up: Tensor | None = None

    def store(self, step: Step, latents: Tensor, keys: Tensor) -> None:
        """Store the latents (B, S, rank) and rotated keys (B, S, R) of the tokens of `step`."""
        (cached,), new = self.tensors, torch.cat((latents, keys), dim=-1)
        if isinstance(step, TokenStep):
            cached[step.rows, step.lengths] = new[:, 0]
        elif isinstance(step, ExtendStep):
            cached[step.slot, step.start : step.stop] = new[0]
        else:
            for prompt in step.prompts:
                put_prompt(cached[:, None], new, prompt)

    def attend(
        self, step: TokenStep | ExtendStep, q: Tensor, up_projection: Callable[[], Tensor], nope_size: int
    ) -> Tensor:
        """Return attention over the cache, which has the new tokens already.

        The result is (N, 1, H, E') for a `TokenStep`, and (1, T, H, E') for an `ExtendStep`.

        `q` (N, 1, H, nope_size + R) or (1, T, ...): the queries; the last R dims are rotated.
        `up_projection` returns the matrix (H * (nope_size + E'), rank) from latents to the keys and values of each
        head. It is called once: weights do not change in a generation.
        """
        if self.up is None:
            matrix = up_projection().to(q.dtype)
            self.up = matrix.reshape(q.shape[2], -1, matrix.shape[1]).contiguous()
        (cached,), up = self.tensors, self.up
        if isinstance(step, ExtendStep):
            return extended_latent_attention(q[0], cached[step.slot, : step.stop], up, nope_size)[None]
        return self._attend_tokens(step, q, up, nope_size)

    @small_matmul_precision()
    def _attend_tokens(self, step: TokenStep, q: Tensor, up: Tensor, nope_size: int) -> Tensor:
        """Return the result of `attend` for one new token of each slot."""
        (cached,), rank = self.tensors, up.shape[2]
        visible = step.visible(cached.shape[1])[:, 0]
        seen = cached[: len(q), : visible.shape[-1]]
        queries = torch.einsum("nhe,hed->nhd", q[:, 0, :, :nope_size], up[:, :nope_size])
        queries = torch.cat((queries, q[:, 0, :, nope_size:]), dim=-1)
        products = torch.matmul(queries, seen.transpose(1, 2)).to(wide(q.dtype))
        weights = (products * q.shape[-1] ** -0.5).masked_fill_(~visible, -torch.inf).softmax(-1).to(q.dtype)
        out = torch.einsum("nhd,hed->nhe", torch.matmul(weights, seen[..., :rank]), up[:, nope_size:])
        return out[:, None]

    def copy(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        copy_slot(self.tensors, source, target)


def put_prompt(cached: Tensor, values: Tensor, prompt: PackedPrompt) -> None:
    """Write the last C tokens of `prompt` from `values` (K, T, E) to its slots of `cached` (slots, K, C, E).

    The token at position p goes to place p modulo C.
    """
    capacity, length = cached.shape[2], prompt.stop - prompt.start
    count = min(length, capacity)
    part = values[:, prompt.stop - count : prompt.stop]
    part = part if length <= capacity else part.roll(length % capacity, dims=1)
    for slot in prompt.slots:
        cached[slot, :, :count] = part


def extend(cached: Tensor, values: Tensor, step: ExtendStep) -> Tensor:
    """Write the new tokens `values` (K, T, E) of `step` to the slot `cached` (K, C, E).

    Return the tokens (K, L, E) that they may attend to, in order: the earlier tokens of the slot, then the new ones.
    """
    capacity, count = cached.shape[1], min(values.shape[1], cached.shape[1])
    places = torch.arange(step.stop - count, step.stop, device=cached.device) % capacity
    if step.stop <= capacity:
        cached.index_copy_(1, places, values)
        return cached[:, : step.stop]
    earlier = cached[:, : step.start] if step.start <= capacity else cached.roll(-(step.start % capacity), dims=1)
    seen = torch.cat((earlier, values), dim=1)
    cached.index_copy_(1, places, values[:, values.shape[1] - count :])
    return seen


def copy_slot(tensors: tuple[Tensor, ...], source: int, target: int) -> None:
    """Copy slot `source` of each of `tensors` (slots, ...) to slot `target`."""
    for tensor in tensors:
        tensor[target] = tensor[source]


def _custom_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    step: TokenStep,
    sinks: Tensor | None,
    scores: Scores,
) -> Tensor:
    """Return attention (N, K, G, E') of `queries` (N, K, G, E) with scores that no kernel of PyTorch computes."""
    dtype, kv_heads, size = wide(queries.dtype), keys.shape[1], queries.shape[3]
    logits = torch.matmul(queries.to(dtype), keys.to(dtype).transpose(-1, -2)) * scores.factor(size)
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    alibi = scores.alibi_bias(logits, kv_heads, size)
    if alibi is not None:
        logits = logits + alibi.key_bias(torch.arange(logits.shape[-1], device=logits.device), 0)
        if not alibi.bf16_bias:
            logits = logits - alibi.slopes * step.lengths[:, None, None, None]
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype).view(1, kv_heads, -1, 1).expand(len(queries), -1, -1, 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
