"""The decoder: every family of `kumi.spec.families`, built from its ModelSpec."""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn import logprob, rope
from kumi.nn.attention import Attention, Segments, begins, segments
from kumi.nn.linear import Linear
from kumi.nn.mlp import MLP
from kumi.nn.norm import RMSNorm
from kumi.spec import families, model
from kumi.spec.model import LayerSpec, ModelSpec, Rope


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, hidden_size: int, spec: LayerSpec, eps: float, *, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert isinstance(spec.attention, model.Attention)
        assert isinstance(spec.mlp, model.MLP)
        self.input_layernorm = RMSNorm(hidden_size, eps, device=device, dtype=dtype)
        self.self_attn = Attention(hidden_size, spec.attention, eps, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, device=device, dtype=dtype)
        self.mlp = MLP(hidden_size, spec.mlp, device=device, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segments)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Embedding(nn.Module):
    """Rows of the token table."""

    def __init__(self, vocab_size: int, size: int, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, device=device, dtype=dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class Model(nn.Module):
    """Embedding, layers and final norm; named as Hugging Face names them."""

    def __init__(self, spec: ModelSpec, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(spec.hidden_size, layer, spec.norm_eps, device=device, dtype=dtype) for layer in spec.layers
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)


class Decoder(nn.Module):
    """A decoder-only language model whose parameter names are those of Hugging Face.

    Parameters start uninitialised in `dtype` on `device` (which may be "meta"); `compute_dtype` is what activations and
    matrix products are in. ModelError for a model that this package does not compute.
    """

    def __init__(
        self, spec: ModelSpec, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        families.check_trained(spec)
        device = torch.device(device) if device is not None else None
        self.spec = spec
        self.compute_dtype = dtype
        self.model = Model(spec, device=device, dtype=dtype)
        if not spec.tie_word_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False, device=device, dtype=dtype)

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
        """What the arguments ask for, given token ids (B, S).

        Without `labels`: logits (B, S, V). With them (already shifted: labels[b, s] is what should follow
        input_ids[b, s]; -100 where nothing is to be learnt): their log-probs, float32 (B, S), 0 where it is -100.
        With `token_weights` (B, S) besides: the scalar sum of token_weights * log-probs, whose gradient is formed at
        once, and the log-probs, detached.

        `document_ids` (B, S) keeps documents packed in a row apart; `position_ids` (B, S) default to 0, 1, ... in each.
        """
        hidden = self.hidden(input_ids, position_ids=position_ids, document_ids=document_ids)
        weight = self.head_weight
        if labels is None:
            return F.linear(hidden, weight.to(hidden.dtype))
        flat = hidden.flatten(0, 1)
        if token_weights is None:
            return logprob.log_probs(flat, weight, labels.flatten()).view(labels.shape)
        total, log_probs = logprob.weighted_sum(flat, weight, labels.flatten(), token_weights.flatten())
        return total, log_probs.view(labels.shape)

    def hidden(
        self, input_ids: Tensor, *, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """The final hidden states (B, S, D), normalised, in the compute dtype."""
        if position_ids is None:
            position_ids = positions(input_ids, document_ids)
        keys = {_rotary(layer) for layer in self.spec.layers}
        tables = {key: rope.tables(*key, position_ids) for key in keys}
        where = segments(input_ids, document_ids)
        x = self.model.embed_tokens(input_ids).to(self.compute_dtype)
        for spec, layer in zip(self.spec.layers, self.model.layers):
            x = layer(x, *tables[_rotary(spec)], where)
        normed: Tensor = self.model.norm(x)
        return normed

    @property
    def head_weight(self) -> Tensor:
        """The output projection (V, D): the token table where they are tied."""
        return self.model.embed_tokens.weight if self.spec.tie_word_embeddings else self.lm_head.weight


def _rotary(layer: LayerSpec) -> tuple[Rope, int]:
    """The rotation of the layer's heads, and their size."""
    assert isinstance(layer.attention, model.Attention)
    assert layer.attention.rope is not None
    return layer.attention.rope, layer.attention.head_dim


def positions(input_ids: Tensor, document_ids: Tensor | None) -> Tensor:
    """Positions (B, S) that count from 0 in every document."""
    index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if document_ids is None:
        return index
    return index - torch.where(begins(document_ids), index, 0).cummax(dim=1).values
