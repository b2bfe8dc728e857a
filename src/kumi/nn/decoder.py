"""The decoder: one model class for every family of `kumi.spec.families`, built from its ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Protocol, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.errors import ModelError
from kumi.nn import logprob
from kumi.nn.attention.attention_context import (
    AttentionContext,
    AttentionFn,
    MakeAttention,
    cos_sin_tables,
    document_lengths,
    positions,
    segments,
)
from kumi.nn.attention.grouped_query import attend
from kumi.nn.linear import HeadLinear
from kumi.nn.logit_chunks import FULL_VOCABULARY, Shaping, Statistic, TokenScores
from kumi.nn.mixers import MIXERS
from kumi.nn.mlp import MLP
from kumi.nn.moe import MoE
from kumi.nn.norm import LayerNorm, RMSNorm, build_norm
from kumi.nn.score_head import reward_scores
from kumi.nn.wrappers import Wrapper, wrap
from kumi.objectives import IGNORED
from kumi.spec import families, model
from kumi.spec.model import LayerSpec, ModelSpec


class CachedPass(Protocol):
    """The tokens of one forward pass in a generation, and the cache of earlier tokens."""

    def lengths(self, tokens: Tensor, document_ids: Tensor | None) -> int | Tensor:
        """Return the length (B, S) of the sequence of each of `tokens` (B, S), earlier tokens included."""

    def contexts(self, context: AttentionContext) -> Sequence[AttentionContext]:
        """Return the context of each layer, given the context without a cache."""


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), or another arrangement that `LayerSpec` describes."""

    def __init__(
        self, model_spec: ModelSpec, spec: LayerSpec, *, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec, self.residual_scale = spec, model_spec.residual_scale
        self.wrappers: list[Wrapper] = []

        def norm(exists: bool) -> RMSNorm | LayerNorm | None:
            return build_norm(model_spec, device=device, dtype=dtype) if exists else None

        has_mixer, has_mlp = spec.attention is not None, spec.mlp is not None
        self.input_layernorm = norm(spec.pre_norms and has_mixer)
        if spec.attention is not None:
            mixer = MIXERS[type(spec.attention)](model_spec, spec.attention, device=device, dtype=dtype)
            self.add_module(spec.attention.module_name, mixer)
        self.self_attn_post_norm = norm(spec.post_norms and has_mixer)
        self.post_attention_layernorm = norm(spec.pre_norms and has_mlp and not spec.shared_norm)
        self.mlp = build_mlp(model_spec.hidden_size, spec.mlp, device=device, dtype=dtype)
        self.mlp_post_norm = norm(spec.post_norms and has_mlp)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return the result of `compute`, called inside the wrappers in `wrappers`."""
        out: Tensor = wrap(self.wrappers, self.compute)(x, context)
        return out

    def compute(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return hidden states in the shape of `x`, (B, S, D) or (T, D)."""
        if self.spec.parallel:
            normed = _apply_norm(self.input_layernorm, x)
            mlp_input = normed if self.spec.shared_norm else _apply_norm(self.post_attention_layernorm, x)
            return self.add(x, self.attend(normed, context) + self.feed(mlp_input, context))
        if self.spec.attention is not None:
            x = self.add(x, self.attend(_apply_norm(self.input_layernorm, x), context))
        if self.mlp is not None:
            x = self.add(x, self.feed(_apply_norm(self.post_attention_layernorm, x), context))
        return x

    @property
    def mixer(self) -> nn.Module:
        """The token mixer, attention or Mamba. The attribute of the mixer has the name in the model's parameters."""
        assert self.spec.attention is not None
        mixer: nn.Module = getattr(self, self.spec.attention.module_name)
        return mixer

    def attend(self, normed: Tensor, context: AttentionContext) -> Tensor:
        """Return the residual update of the mixer."""
        return _apply_norm(self.self_attn_post_norm, self.mixer(normed, context))

    def feed(self, normed: Tensor, context: AttentionContext) -> Tensor:
        """Return the residual update of the MLP or the experts."""
        assert self.mlp is not None
        out = self.mlp(normed, context.shape) if isinstance(self.mlp, MoE) else self.mlp(normed)
        return _apply_norm(self.mlp_post_norm, out)

    def add(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the residual stream `x` plus `added`, in one operator that saves neither for the backward pass."""
        return torch.add(x, added, alpha=self.residual_scale)


def _apply_norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    out: Tensor = x if norm is None else norm(x)
    return out


def build_mlp(
    hidden_size: int, spec: model.MLP | model.MoE | None, *, device: torch.device | None, dtype: torch.dtype
) -> MLP | MoE | None:
    """Return the module of `spec`, or None for a layer without one.

    An MLP takes hidden states; an MoE also takes the shape (B, S) of the batch.
    """
    if isinstance(spec, model.MoE):
        return MoE(hidden_size, spec, device=device, dtype=dtype)
    return None if spec is None else MLP(hidden_size, spec, device=device, dtype=dtype)


class Embedding(nn.Module):
    """A table of tokens or positions. `lookup` (ids, table) can be replaced."""

    def __init__(self, rows: int, size: int, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, device=device, dtype=dtype))
        self.lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(ids, self.weight)


class Model(nn.Module):
    """Embedding, layers and final norm, or the part of them on one pipeline stage.

    `table`: the stage has the token table.
    `first`: the stage has the other parts of the embedding (learned positions, norm).
    `norm`: the stage has the final norm.
    """

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
        has_positions = first and spec.learned_positions > 0
        self.embed_positions = Embedding(spec.learned_positions, spec.hidden_size, **options) if has_positions else None
        self.embed_norm = build_norm(spec, **options) if first and spec.embedding_norm else None
        modules = (DecoderLayer(spec, spec.layers[index], **options) for index in layers)
        # Keyed by the index in the full model, so that a stage's parameters have the same names as in the full model.
        self.layers = nn.ModuleDict({str(index): layer for index, layer in zip(layers, modules, strict=True)})
        if norm:
            self.norm = build_norm(spec, **options)


class Decoder(nn.Module):
    """A decoder-only language model, or a pipeline stage of one. Its parameters are named as in the ledger.

    `dtype`, `device`: those of the parameters, which are not initialised; the device may be "meta".
    `layers`: indices of this stage's layers in the full model; None for all.
    `embedding`: the stage has the embedding.
    `head`: the stage has the final norm and the head. With a tied head and no embedding, it has a copy of the table.

    `compute_dtype` is the dtype of activations and matrix products, `reduce_dtype` that of gradient reduction. Raises
    ModelError for a model that this package does not compute.

    Parallelism replaces these attributes:

    `make_attention(tokens, document_ids, cu_seqlens)`: returns the attention function of a batch.
    `make_lengths(tokens, document_ids)`: returns the document length of each token.
    `embedding_noise(x, position_ids, document_ids)`: returns the token embeddings `x` with noise added; None for none.
    `vocabulary`: the part of the vocabulary on this rank.
    `temperature`: divisor of the logits whose log-probs are returned or trained; see `kumi.nn.temperature`.
    `head_product`: multiplies hidden states with the head in a cached pass; generation replaces it on a CPU.
    `logits`, `log_probs`, `weighted_sum`, `scores`: functions of the final hidden states (T, D) and the head's weight,
    the middle two also of labels. The result of `logits` is not yet scaled and capped by `shaping`.
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
        families.check_trainable(spec)
        device = torch.device(device) if device is not None else None
        self.spec, self.has_embedding, self.has_head = spec, embedding, head
        self.compute_dtype = self.reduce_dtype = dtype
        tied = spec.tie_word_embeddings
        indices = range(spec.num_hidden_layers) if layers is None else layers
        table = embedding or (head and tied)
        self.model = Model(spec, indices, table=table, first=embedding, norm=head, device=device, dtype=dtype)
        if head and spec.head == "score":
            self.score = HeadLinear(spec.hidden_size, 1, bias=False, device=device, dtype=dtype)
        elif head and not tied:
            self.lm_head = HeadLinear(spec.hidden_size, spec.vocab_size, bias=False, device=device, dtype=dtype)
        self.make_attention: MakeAttention = unsharded_attention
        self.make_lengths: Callable[[Tensor, Tensor | None], int | Tensor] = document_lengths
        self.embedding_noise: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        self.vocabulary = FULL_VOCABULARY
        self.shaping = Shaping(spec.logit_scale, spec.logit_softcap)
        self.temperature = 1.0
        self.logits = logits
        self.head_product: Callable[..., Tensor] = F.linear
        self.log_probs = partial(logprob.log_probs, shaping=self.shaping)
        self.weighted_sum = partial(logprob.weighted_sum, shaping=self.shaping)
        self.scores: Callable[[Tensor, Tensor], Tensor] = reward_scores

    @overload
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        labels: Tensor | None = None,
        token_weights: None = None,
        loss: Callable[[Tensor], Tensor] | None = None,
        head_positions: Tensor | None = None,
        cached: CachedPass | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        labels: Tensor,
        token_weights: Tensor,
        loss: None = None,
        head_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        labels: Tensor,
        token_weights: None = None,
        loss: None = None,
        head_positions: Tensor | None = None,
        statistics: tuple[Statistic, ...],
    ) -> Tensor | TokenScores: ...

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
        loss: Callable[[Tensor], Tensor] | None = None,
        head_positions: Tensor | None = None,
        statistics: tuple[Statistic, ...] = (),
        cached: CachedPass | None = None,
    ) -> Tensor | TokenScores | tuple[Tensor, Tensor]:
        """Return logits, log-probs, scores, a loss, or hidden states.

        - Without `labels`: logits (B, S, V).
        - With `labels` (B, S): their log-probs, float32 (B, S). Labels are shifted already: labels[b, s] follows
          input_ids[b, s]. A label of -100 is ignored, and its log-prob is 0.
        - With `labels` and `token_weights` (B, S): the scalar sum of token_weights * log-probs, with its gradient
          computed in the forward pass, and the log-probs, detached.
        - With `labels` and `loss`: the scalar that `loss` returns for the log-probs.
        - With a score head: the float32 scores (B, S) of all positions, or the scalar that `loss` returns for them.
          With `labels`, the scores at labels of -100 are 0; the values of other labels do not matter.
        - On a stage without head: hidden states, whatever the other arguments.

        `statistics` ("entropy", "top") asks for further numbers of each label, from the same logits, without a
        gradient. The result is then `TokenScores` (B, S); give neither `token_weights` nor `loss`.

        `input_ids` (B, S): token ids; on a stage without embedding, the hidden states of the previous stage.
        `document_ids` (B, S): separates documents that are packed in a row.
        `cu_seqlens`: the boundaries of these documents, if the host has them: the first token of each, counted through
        all complete rows (even if this rank has only some of their positions), followed by the number of tokens.
        Without `cu_seqlens`, the host waits for `document_ids`.
        `position_ids` (B, S): by default 0, 1, ... in each document; required on a stage without embedding.
        `head_positions` (N,): flat positions in `labels`, without those of ignored labels. The head is computed only
        there, and the log-probs of other labels are 0. None: at all positions.
        `cached`: reads and extends a cache of earlier tokens. The result is then this rank's part of the logits, (N, V)
        at `head_positions` or (T, V).
        """
        hidden = self.hidden(
            input_ids, position_ids=position_ids, document_ids=document_ids, cu_seqlens=cu_seqlens, cached=cached
        )
        if not self.has_head:
            return hidden
        shape = input_ids.shape if position_ids is None else position_ids.shape

        outputs = partial(
            self._head_outputs,
            hidden.flatten(0, -2),
            shape,
            labels=labels,
            token_weights=token_weights,
            loss=loss,
            head_positions=head_positions,
            statistics=statistics,
            cached=cached,
        )
        # The weight is read in a call of its module, around which FSDP2 gathers it.
        head = self.head_module
        result: Tensor | TokenScores | tuple[Tensor, Tensor] = (
            outputs(self.head_weight) if head is None else head(outputs)
        )
        return result

    def _head_outputs(
        self,
        flat: Tensor,
        shape: torch.Size,
        weight: Tensor,
        *,
        labels: Tensor | None,
        token_weights: Tensor | None,
        loss: Callable[[Tensor], Tensor] | None,
        head_positions: Tensor | None,
        statistics: tuple[Statistic, ...],
        cached: CachedPass | None,
    ) -> Any:
        """Return the outputs of `forward` for hidden states `flat` (T, D) of rows of `shape`, with `head_weight`."""
        if cached is not None:
            tokens = self.vocabulary.gather(flat)
            tokens = tokens if head_positions is None else tokens[head_positions]
            return self.shaping.shape(self.head_product(tokens, weight.to(tokens.dtype)))
        if self.spec.head == "score":
            assert token_weights is None, "a score head has no log-probs to weight; give `loss`"
            values = self.scores(flat, weight).view(shape)
            values = values if labels is None else values.masked_fill(labels == IGNORED, 0.0)
            return values if loss is None else loss(values)
        if labels is None:
            return self.shaping.shape(self.logits(flat, weight)).view(*shape, -1)
        tempered = {} if self.temperature == 1 else {"shaping": self.shaping.at(self.temperature)}
        if token_weights is not None:
            options: Any = {"trained": head_positions, **tempered}
            total, log_probs = self.weighted_sum(flat, weight, labels.flatten(), token_weights.flatten(), **options)
            return total, log_probs.view(labels.shape)
        options = {"trained": head_positions, "statistics": statistics, **tempered}
        scores = self.log_probs(flat, weight, labels.flatten(), **options).view(labels.shape)
        if statistics:
            return scores
        return scores.log_probs if loss is None else loss(scores.log_probs)

    def hidden(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        cached: CachedPass | None = None,
    ) -> Tensor:
        """Return the last hidden states (B, S, D) in the compute dtype, normalised if the stage has the head."""
        if position_ids is None:
            self.check_length(input_ids, document_ids)
            position_ids = positions(input_ids, document_ids)
        layers = (self.spec.layers[int(index)] for index in self.model.layers)
        attention_specs = [layer.attends for layer in layers if layer.attends is not None]
        rows, length = position_ids.shape
        attention = self.make_attention(position_ids, document_ids, cu_seqlens)
        make_lengths = self.make_lengths if cached is None else cached.lengths
        tables = cos_sin_tables(attention_specs, position_ids, partial(make_lengths, position_ids, document_ids))
        context = AttentionContext((rows, length), tables, attention, document_ids)
        contexts = repeat(context) if cached is None else cached.contexts(context)
        x = self.embedded(input_ids, position_ids, document_ids) if self.has_embedding else input_ids
        for layer, layer_context in zip(self.model.layers.values(), contexts, strict=False):
            x = layer(x, layer_context)
        return self.model.norm(x) if self.has_head else x

    def check_length(self, input_ids: Tensor, document_ids: Tensor | None) -> None:
        """Raise ModelError if a row (B, S) that is one document is longer than the table of learned positions."""
        limit, length = self.spec.learned_positions, input_ids.shape[1]
        if self.has_embedding and limit and document_ids is None and length > limit:
            raise ModelError(
                f"the row has {length} tokens, but this {self.spec.family} model has only {limit} learned "
                f"positions; give at most {limit} tokens"
            )

    def embedded(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Return the input of the first layer, in the compute dtype, for tokens and positions (B, S)."""
        x: Tensor = self.model.embed_tokens(input_ids).to(self.compute_dtype)
        if self.spec.embedding_scale != 1.0:
            # The scale is rounded to the dtype of the embeddings, as in the training of these models.
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype).item()
        if self.embedding_noise is not None:
            x = self.embedding_noise(x, position_ids, document_ids)
        if self.model.embed_positions is not None:
            x = x + self.model.embed_positions(position_ids).to(x.dtype)
        return _apply_norm(self.model.embed_norm, x)

    @property
    def head_module(self) -> HeadLinear | None:
        """The module with the weight of the head; None if it is the token table."""
        if self.spec.head == "score":
            return self.score
        return None if self.spec.tie_word_embeddings else self.lm_head

    @property
    def head_weight(self) -> Tensor:
        """The output projection (V, D), which is the token table if both are tied, or the weight (1, D) of a score
        head."""
        if self.spec.head == "score":
            return self.score.weight
        return self.model.embed_tokens.weight if self.spec.tie_word_embeddings else self.lm_head.weight


def unsharded_attention(
    tokens: Tensor, document_ids: Tensor | None, cu_seqlens: Sequence[int] | None = None
) -> AttentionFn:
    """Return the attention function of a batch (B, S) whose rows are not sharded over ranks."""
    return partial(attend, segments(tokens, document_ids, cu_seqlens))


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits (T, V) of the final hidden states (T, D), before scale and softcap."""
    return F.linear(hidden, weight.to(hidden.dtype))
