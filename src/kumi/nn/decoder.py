"""The decoder: every family of `kumi.spec.families`, built from its ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.errors import ModelError
from kumi.nn import logprob
from kumi.nn.attention import attend
from kumi.nn.linear import Linear
from kumi.nn.mixers import MIXERS
from kumi.nn.mlp import MLP
from kumi.nn.moe import MoE
from kumi.nn.norm import LayerNorm, RMSNorm, norm_of
from kumi.nn.surrounded import Around, inside
from kumi.nn.where import Attend, Where, document_lengths, positions, segments, tables
from kumi.spec import families, model
from kumi.spec.model import LayerSpec, ModelSpec


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or in the other arrangements that `LayerSpec` has words for."""

    def __init__(self, of: ModelSpec, spec: LayerSpec, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.residual_scale = spec, of.residual_scale
        self.around: list[Around] = []

        def norm(there: bool) -> RMSNorm | LayerNorm | None:
            return norm_of(of, device=device, dtype=dtype) if there else None

        attends, feeds = spec.attention is not None, spec.mlp is not None
        self.input_layernorm = norm(spec.pre_norms and attends)
        if spec.attention is not None:
            mixer = MIXERS[type(spec.attention)](of, spec.attention, device=device, dtype=dtype)
            self.add_module(spec.attention.module_name, mixer)
        self.self_attn_post_norm = norm(spec.post_norms and attends)
        self.post_attention_layernorm = norm(spec.pre_norms and feeds and not spec.shared_norm)
        self.mlp = feed_forward(of.hidden_size, spec.mlp, device=device, dtype=dtype)
        self.mlp_post_norm = norm(spec.post_norms and feeds)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        """Return hidden states of the shape of `x`, (B, S, D) or (T, D), computed inside of what is in `around`."""
        out: Tensor = inside(self.around, self.compute)(x, where)
        return out

    def compute(self, x: Tensor, where: Where) -> Tensor:
        """Return hidden states of the shape of `x`, (B, S, D) or (T, D)."""
        if self.spec.parallel:
            normed = _through(self.input_layernorm, x)
            other = normed if self.spec.shared_norm else _through(self.post_attention_layernorm, x)
            return self.add(x, self.attend(normed, where) + self.feed(other, where))
        if self.spec.attention is not None:
            x = self.add(x, self.attend(_through(self.input_layernorm, x), where))
        if self.mlp is not None:
            x = self.add(x, self.feed(_through(self.post_attention_layernorm, x), where))
        return x

    @property
    def mixer(self) -> nn.Module:
        """The module that mixes tokens: attention or Mamba. The layer has it under the name that parameters have."""
        assert self.spec.attention is not None
        mixer: nn.Module = getattr(self, self.spec.attention.module_name)
        return mixer

    def attend(self, normed: Tensor, where: Where) -> Tensor:
        """Return what the mixer adds."""
        return _through(self.self_attn_post_norm, self.mixer(normed, where))

    def feed(self, normed: Tensor, where: Where) -> Tensor:
        """What the feed-forward part adds."""
        assert self.mlp is not None
        out = self.mlp(normed, where.shape) if isinstance(self.mlp, MoE) else self.mlp(normed)
        return _through(self.mlp_post_norm, out)

    def add(self, x: Tensor, added: Tensor) -> Tensor:
        """The residual stream `x` with `added`, in one pass that keeps neither."""
        return torch.add(x, added, alpha=self.residual_scale)


def _through(norm: nn.Module | None, x: Tensor) -> Tensor:
    out: Tensor = x if norm is None else norm(x)
    return out


def feed_forward(
    hidden_size: int, spec: model.MLP | model.MoE | None, *, device: torch.device | None, dtype: torch.dtype
) -> MLP | MoE | None:
    """The module that computes `spec`: a function of hidden states and, of experts, the shape (B, S) of the batch."""
    if isinstance(spec, model.MoE):
        return MoE(hidden_size, spec, device=device, dtype=dtype)
    return None if spec is None else MLP(hidden_size, spec, device=device, dtype=dtype)


class Embedding(nn.Module):
    """Rows of a table: of the tokens', or of the positions'. `lookup` takes the ids and the table."""

    def __init__(self, rows: int, size: int, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, device=device, dtype=dtype))
        self.lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(ids, self.weight)


class Model(nn.Module):
    """Embedding, layers and final norm, or those that a stage has of them; `table`: the token table, `first`: what else
    belongs to the embedding."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[int],
        *,
        table: bool,
        first: bool,
        norm: bool,
        device: torch.device | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        if table:
            self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, **options)
        placed = first and spec.learned_positions > 0
        self.embed_positions = Embedding(spec.learned_positions, spec.hidden_size, **options) if placed else None
        self.embed_norm = norm_of(spec, **options) if first and spec.embedding_norm else None
        made = (DecoderLayer(spec, spec.layers[index], **options) for index in layers)
        # By their numbers in the whole model, so that a stage's parameters have the names they have there.
        self.layers = nn.ModuleDict({str(index): layer for index, layer in zip(layers, made, strict=True)})
        if norm:
            self.norm = norm_of(spec, **options)


class Decoder(nn.Module):
    """A decoder-only language model, or a stage of it; its parameters have the names that the ledger gives them.

    Parameters start uninitialised in `dtype` on `device` (which may be "meta"); `compute_dtype` is what activations and
    matrix products are in, `reduce_dtype` what gradients travel in. A stage has the layers numbered `layers`, and the
    embedding and the head (with the final norm) where these are True; a tied head has a token table of its own where
    the embedding is elsewhere. ModelError for a model that this package does not compute.

    What works on many ranks at once replaces parts: `attention_over(tokens, document_ids)` makes the attention of a
    batch, `lengths_over(tokens, document_ids)` says how long the document of each token is, and `logits` (still to be
    shaped), `log_probs` and `weighted_sum` read final hidden states (T, D) with the head's weight.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        layers: Sequence[int] | None = None,
        embedding: bool = True,
        head: bool = True,
    ) -> None:
        super().__init__()
        families.check_trained(spec)
        device = torch.device(device) if device is not None else None
        self.spec, self.has_embedding, self.has_head = spec, embedding, head
        self.compute_dtype = self.reduce_dtype = dtype
        tied = spec.tie_word_embeddings
        numbers = range(spec.num_hidden_layers) if layers is None else layers
        table = embedding or (head and tied)
        self.model = Model(spec, numbers, table=table, first=embedding, norm=head, device=device, dtype=dtype)
        if head and not tied:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False, device=device, dtype=dtype)
        self.attention_over: Callable[[Tensor, Tensor | None], Attend] = whole_rows
        self.lengths_over: Callable[[Tensor, Tensor | None], int | Tensor] = document_lengths
        self.shaping = logprob.Shaping(spec.logit_scale, spec.logit_softcap)
        self.logits = logits
        self.log_probs = partial(logprob.log_probs, shaping=self.shaping)
        self.weighted_sum = partial(logprob.weighted_sum, shaping=self.shaping)

    @overload
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        token_weights: None = None,
        loss: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor,
        token_weights: Tensor,
        loss: None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
        loss: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the arguments ask for, given token ids (B, S), or the hidden states that the stage before returned.

        Without `labels`: logits (B, S, V). With them (already shifted: labels[b, s] is what should follow
        input_ids[b, s]; -100 where nothing is to be learnt): their log-probs, float32 (B, S), 0 where it is -100.
        With `token_weights` (B, S) besides: the scalar sum of token_weights * log-probs, whose gradient is formed at
        once, and the log-probs, detached. With `loss` besides the labels: the scalar that it returns for their
        log-probs. A stage without head returns hidden states whatever else is given.

        `document_ids` (B, S) keeps documents packed in a row apart; `position_ids` (B, S) default to 0, 1, ... in each,
        and must be given to a stage without embedding.
        """
        hidden = self.hidden(input_ids, position_ids=position_ids, document_ids=document_ids)
        if not self.has_head:
            return hidden
        flat, weight = hidden.flatten(0, -2), self.head_weight
        if labels is None:
            shape = input_ids.shape if position_ids is None else position_ids.shape
            return self.shaping.shape(self.logits(flat, weight)).view(*shape, -1)
        if token_weights is None:
            log_probs = self.log_probs(flat, weight, labels.flatten()).view(labels.shape)
            return log_probs if loss is None else loss(log_probs)
        total, log_probs = self.weighted_sum(flat, weight, labels.flatten(), token_weights.flatten())
        return total, log_probs.view(labels.shape)

    def hidden(
        self, input_ids: Tensor, *, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """The last hidden states (B, S, D) in the compute dtype, normalised where the stage has the head."""
        if position_ids is None:
            self.check_length(input_ids, document_ids)
            position_ids = positions(input_ids, document_ids)
        layers = [self.spec.layers[int(index)].attends for index in self.model.layers]
        specs = [spec for spec in layers if spec is not None]
        rows, length = position_ids.shape
        attention = self.attention_over(position_ids, document_ids)
        turns = tables(specs, position_ids, partial(self.lengths_over, position_ids, document_ids))
        where = Where((rows, length), turns, attention, document_ids)
        x = self.embedded(input_ids, position_ids) if self.has_embedding else input_ids
        for layer in self.model.layers.values():
            x = layer(x, where)
        return self.model.norm(x) if self.has_head else x

    def check_length(self, input_ids: Tensor, document_ids: Tensor | None) -> None:
        """Nothing, when each of the rows (B, S), where it is one document, has learned positions enough; ModelError."""
        known, length = self.spec.learned_positions, input_ids.shape[1]
        if self.has_embedding and known and document_ids is None and length > known:
            raise ModelError(
                f"a row of {length} tokens is longer than the {known} positions that this "
                f"{self.spec.family} model has embeddings for; give at most {known}"
            )

    def embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """What goes into the first layer, in the compute dtype, of tokens and positions (B, S)."""
        x: Tensor = self.model.embed_tokens(input_ids).to(self.compute_dtype)
        if self.spec.embedding_scale != 1.0:
            # Rounded to the dtype of the embeddings, as models were trained that have one.
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype).item()
        if self.model.embed_positions is not None:
            x = x + self.model.embed_positions(position_ids).to(x.dtype)
        return _through(self.model.embed_norm, x)

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
