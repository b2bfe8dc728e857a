"""The decoder: every family of `kumi.spec.families`, built from its ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn import logprob
from kumi.nn.attention import Attention, attend
from kumi.nn.latent import LatentAttention
from kumi.nn.linear import Linear
from kumi.nn.mlp import MLP
from kumi.nn.moe import MoE
from kumi.nn.norm import RMSNorm
from kumi.nn.where import Attend, Where, positions, segments, tables
from kumi.spec import families, model
from kumi.spec.model import LayerSpec, ModelSpec


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, hidden_size: int, spec: LayerSpec, eps: float, *, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps, device=device, dtype=dtype)
        self.self_attn = attention(hidden_size, spec.attention, eps, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, device=device, dtype=dtype)
        self.mlp = feed_forward(hidden_size, spec.mlp, device=device, dtype=dtype)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), where)
        normed = self.post_attention_layernorm(x)
        out: Tensor = x + (self.mlp(normed, where.shape) if isinstance(self.mlp, MoE) else self.mlp(normed))
        return out


def attention(
    hidden_size: int, spec: model.Attention | model.LatentAttention, eps: float, *,
    device: torch.device | None, dtype: torch.dtype,
) -> Attention | LatentAttention:  # fmt: skip
    """The module that computes `spec`: a function of (hidden states, `Where`)."""
    if isinstance(spec, model.LatentAttention):
        return LatentAttention(hidden_size, spec, device=device, dtype=dtype)
    return Attention(hidden_size, spec, eps, device=device, dtype=dtype)


def feed_forward(
    hidden_size: int, spec: model.MLP | model.MoE, *, device: torch.device | None, dtype: torch.dtype
) -> MLP | MoE:
    """The module that computes `spec`: a function of hidden states and, of experts, the shape (B, S) of the batch."""
    if isinstance(spec, model.MoE):
        return MoE(hidden_size, spec, device=device, dtype=dtype)
    return MLP(hidden_size, spec, device=device, dtype=dtype)


class Embedding(nn.Module):
    """Rows of the token table."""

    def __init__(self, vocab_size: int, size: int, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, device=device, dtype=dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class Model(nn.Module):
    """Embedding, layers and final norm, or those that a stage has of them; named as Hugging Face names them."""

    def __init__(
        self, spec: ModelSpec, layers: Sequence[int], *, table: bool, norm: bool,
        device: torch.device | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        if table:
            self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
        made = (
            DecoderLayer(spec.hidden_size, spec.layers[i], spec.norm_eps, device=device, dtype=dtype) for i in layers
        )
        # By their numbers in the whole model, so that a stage's parameters have the names they have there.
        self.layers = nn.ModuleDict({str(index): layer for index, layer in zip(layers, made, strict=True)})
        if norm:
            self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)


class Decoder(nn.Module):
    """A decoder-only language model, or a stage of it, whose parameter names are those of Hugging Face.

    Parameters start uninitialised in `dtype` on `device` (which may be "meta"); `compute_dtype` is what activations and
    matrix products are in, `reduce_dtype` what gradients travel in. A stage has the layers numbered `layers`, and the
    embedding and the head (with the final norm) where these are True; a tied head has a token table of its own where
    the embedding is elsewhere. ModelError for a model that this package does not compute.

    What works on many ranks at once replaces parts: `attention_over(tokens, document_ids)` makes the attention of a
    batch, and `logits`, `log_probs` and `weighted_sum` read final hidden states (T, D) with the head's weight.
    """

    def __init__(
        self, spec: ModelSpec, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32,
        layers: Sequence[int] | None = None, embedding: bool = True, head: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        families.check_trained(spec)
        device = torch.device(device) if device is not None else None
        self.spec, self.has_embedding, self.has_head = spec, embedding, head
        self.compute_dtype = self.reduce_dtype = dtype
        tied = spec.tie_word_embeddings
        numbers = range(spec.num_hidden_layers) if layers is None else layers
        self.model = Model(spec, numbers, table=embedding or (head and tied), norm=head, device=device, dtype=dtype)
        if head and not tied:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False, device=device, dtype=dtype)
        self.attention_over: Callable[[Tensor, Tensor | None], Attend] = whole_rows
        self.logits, self.log_probs, self.weighted_sum = logits, logprob.log_probs, logprob.weighted_sum

    @overload
    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor | None = None, document_ids: Tensor | None = None,
        labels: Tensor | None = None, token_weights: None = None,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor | None = None, document_ids: Tensor | None = None,
        labels: Tensor, token_weights: Tensor,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the arguments ask for, given token ids (B, S), or the hidden states that the stage before returned.

        Without `labels`: logits (B, S, V). With them (already shifted: labels[b, s] is what should follow
        input_ids[b, s]; -100 where nothing is to be learnt): their log-probs, float32 (B, S), 0 where it is -100.
        With `token_weights` (B, S) besides: the scalar sum of token_weights * log-probs, whose gradient is formed at
        once, and the log-probs, detached. A stage without head returns hidden states whatever else is given.

        `document_ids` (B, S) keeps documents packed in a row apart; `position_ids` (B, S) default to 0, 1, ... in each,
        and must be given to a stage without embedding.
        """
        hidden = self.hidden(input_ids, position_ids=position_ids, document_ids=document_ids)
        if not self.has_head:
            return hidden
        flat, weight = hidden.flatten(0, -2), self.head_weight
        if labels is None:
            shape = input_ids.shape if position_ids is None else position_ids.shape
            return self.logits(flat, weight).view(*shape, -1)
        if token_weights is None:
            return self.log_probs(flat, weight, labels.flatten()).view(labels.shape)
        total, log_probs = self.weighted_sum(flat, weight, labels.flatten(), token_weights.flatten())
        return total, log_probs.view(labels.shape)

    def hidden(
        self, input_ids: Tensor, *, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """The last hidden states (B, S, D) in the compute dtype, normalised where the stage has the head."""
        if position_ids is None:
            position_ids = positions(input_ids, document_ids)
        specs = [self.spec.layers[int(index)].attention for index in self.model.layers]
        rows, length = position_ids.shape
        attention = self.attention_over(position_ids, document_ids)
        where = Where((rows, length), tables(specs, position_ids), attention)
        x = self.model.embed_tokens(input_ids).to(self.compute_dtype) if self.has_embedding else input_ids
        for layer in self.model.layers.values():
            x = layer(x, where)
        return self.model.norm(x) if self.has_head else x

    @property
    def head_weight(self) -> Tensor:
        """The output projection (V, D): the token table where they are tied."""
        return self.model.embed_tokens.weight if self.spec.tie_word_embeddings else self.lm_head.weight


def whole_rows(tokens: Tensor, document_ids: Tensor | None) -> Attend:
    """The attention of a batch (B, S) whose rows are whole on this device."""
    return partial(attend, segments(tokens, document_ids))


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits (T, V) of the final hidden states (T, D)."""
    return F.linear(hidden, weight.to(hidden.dtype))
