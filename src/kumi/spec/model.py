"""The specification of a decoder-only language model: frozen data, with Hugging Face's names where these exist."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, log
from typing import ClassVar

from kumi.errors import ModelError
from kumi.spec.lora import Lora
from kumi.spec.weight_rules import PLAIN, Weights


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (RoPE).

    - `rope_theta`: the base.
    - `scaling`: None; "linear" (Chen et al., 2023, arXiv:2306.15595); "llama3" (Llama 3.1: low frequencies are divided
      by `factor`, high ones are unchanged, with a smooth ramp between); "yarn" (Peng et al., 2023, arXiv:2309.00071);
      or "longrope" (Ding et al., 2024, arXiv:2402.13753: each frequency is divided by its own entry of `long_factor` in
      documents longer than the original context, else of `short_factor`).
    - fields from `original_max_position_embeddings` to `attention_factor`: None if `scaling` does not use them.
    - `truncate`: with YaRN, the first and last dimension of the ramp are rounded to integers.
    - `partial_rotary_factor`: share of the dimensions of a head that are rotated.
    - `interleave`: rotated pairs are adjacent dimensions, not half of the rotated dimensions apart.
    - `query_growth`: queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p / original context)), as
      in Llama 4 and Ministral 3.
    """

    rope_theta: float
    scaling: str | None = None
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    interleave: bool = False
    query_growth: float = 0.0

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies depend on the length of a document."""
        return self.scaling == "longrope"

    @property
    def key_rope(self) -> Rope:
        """The RoPE of the keys: that of the queries without `query_growth`."""
        return replace(self, query_growth=0.0) if self.query_growth else self


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) with a causal mask.

    - `rope`: None if positions enter by `ModelSpec.learned_positions` or by `alibi`.
    - `sliding_window`: number of latest positions that a query attends to, itself included; None for all earlier ones.
    - `qk_norm`: RMSNorm over the head dimension of each query and key head, before RoPE.
    - `qk_norm_whole`: with `qk_norm`, one norm over all heads together.
    - `alibi`: a bias on the scores that grows with the distance (Press et al., 2021, arXiv:2108.12409).
    - `alibi_stepped`: the bias is rounded to bfloat16 and is also multiplied by `score_scale` (Falcon).
    - `sinks`: each head has a learned score for attending to no position.
    - `score_scale`: factor of the scores; None for 1 / sqrt(head_dim).
    - `softcap`: scores become softcap * tanh(score / softcap) before the mask (Gemma 2, arXiv:2408.00118).
    """

    # Name of the module in a layer, and prefix of the names of its parameters.
    module_name: ClassVar[str] = "self_attn"

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    qk_norm_whole: bool = False
    alibi: bool = False
    alibi_stepped: bool = False
    sinks: bool = False
    score_scale: float | None = None
    softcap: float | None = None

    @property
    def rotary_dim(self) -> int:
        """The number of rotated dimensions of a head."""
        return 0 if self.rope is None else int(self.head_dim * self.rope.partial_rotary_factor)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA; DeepSeek-AI, 2024, arXiv:2405.04434) with a causal mask.

    - `q_lora_rank`: size of the latent vector of the queries; None if they are projected from the hidden state.
    - `kv_lora_rank`: size of the latent vector of keys and values.
    - `qk_nope_head_dim`, `qk_rope_head_dim`: dimensions of a query or key head without and with RoPE. All heads share
      the rotated part of the keys.
    - `bias`: on the projections to the latents and on the output projection.
    - `rope_interleave`: rotated pairs are adjacent dimensions, not half of the rotated dimensions apart.
    - `mscale_all_dim`: with YaRN, scores are multiplied by (0.1 * mscale_all_dim * ln(factor) + 1)^2.
    """

    # Name of the module in a layer, and prefix of the names of its parameters.
    module_name: ClassVar[str] = "self_attn"

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: Rope
    bias: bool = False
    rope_interleave: bool = True
    mscale_all_dim: float = 0.0

    @property
    def qk_head_dim(self) -> int:
        """The dimensions of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    # The next three properties have the names of `Attention`, for code that reads both classes.

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def sliding_window(self) -> None:
        return None

    @property
    def score_scale(self) -> float:
        """The factor of the scores, in addition to 1 / sqrt(qk_head_dim)."""
        if self.rope.scaling != "yarn" or self.rope.factor <= 1:
            return 1.0
        return (0.1 * self.mscale_all_dim * log(self.rope.factor) + 1.0) ** 2


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 mixer (Dao and Gu, 2024, arXiv:2405.21060): a convolution over time and a linear recurrence of heads.

    - `num_heads`, `head_dim`: heads, and channels of a head.
    - `state_size`: numbers in the state of a channel.
    - `n_groups`: groups of heads with the same input and output projections of the state (B and C).
    - `conv_kernel`: positions of the convolution, which is followed by silu.
    - `chunk_size`: positions that the recurrence computes together.
    - `time_step_limit`: lower and upper bound of the time steps.
    - `bias`, `conv_bias`: of the projections and of the convolution.
    """

    # Name of the module in a layer, and prefix of the names of its parameters.
    module_name: ClassVar[str] = "mamba"

    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    conv_kernel: int
    chunk_size: int
    conv_bias: bool = True
    bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, inf)

    @property
    def width(self) -> int:
        """The channels of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLP:
    """Feed-forward layer: gated, down(act(gate(x)) * up(x)) (Shazeer, 2020, arXiv:2002.05202), or down(act(up(x))).

    `hidden_act` is Hugging Face's name of the activation function.
    """

    intermediate_size: int
    bias: bool = False
    hidden_act: str = "silu"
    gated: bool = True


@dataclass(frozen=True)
class MoE:
    """Mixture of experts: each token is routed to `num_experts_per_tok` of `num_experts` feed-forward layers.

    - `moe_intermediate_size`: width of an expert.
    - `shared_intermediate_size`: width of the shared expert, which processes all tokens; 0 without one.
    - `scoring_func`: "softmax" or "sigmoid" of the router's logits.
    - `norm_topk_prob`: the weights of a token's experts, which are their scores, are divided by their sum.
    - `routed_scaling_factor`: factor of these weights.
    - `n_group`, `topk_group`: experts are chosen from the `topk_group` best of `n_group` groups.
    - `bias`: on router and experts.
    - `topk_method`: with "noaux_tc", a bias that is not a parameter is added to the scores for choosing experts, and
      a group's score is the sum of its two best scores; otherwise a group's score is its best score.
    - `router_aux_loss_coef`: weight of the load-balancing loss (see `kumi.nn.router`), over the tokens of a batch.
    - `seq_aux`: the load-balancing loss is computed over each sequence instead.
    - `gated`: experts are gated; else down(act(up(x))).
    - `act_limit`, `act_alpha`: gate and up are clamped to the limit, and the activation is that of gpt-oss:
      gate * sigmoid(act_alpha * gate) * (up + 1).
    - `shared_gate`: the shared expert's output is multiplied by the sigmoid of a learned projection of the token to one
      number.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    bias: bool = False
    hidden_act: str = "silu"
    topk_method: str = "greedy"
    router_aux_loss_coef: float = 0.0
    seq_aux: bool = False
    gated: bool = True
    act_limit: float | None = None
    act_alpha: float = 1.702
    shared_gate: bool = False

    @property
    def has_correction_bias(self) -> bool:
        """True if the router has a bias that affects only the choice of experts, not their weights."""
        return self.topk_method == "noaux_tc"


@dataclass(frozen=True)
class LayerSpec:
    """One pre-norm decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    - `attention`: attention or a Mamba mixer; None if the layer has neither.
    - `mlp`: feed-forward layer or experts; None if the layer has neither.
    - `parallel`: x + attention(norm(x)) + mlp(other_norm(x)), as in GPT-NeoX.
    - `shared_norm`: with `parallel`, attention and mlp have the same norm.
    - `post_norms`: the outputs of attention and mlp are normalized as well, as in Gemma 2.
    - `pre_norms`: the inputs of attention and mlp are normalized; off in OLMo 2.
    """

    attention: Attention | LatentAttention | Mamba | None
    mlp: MLP | MoE | None
    parallel: bool = False
    shared_norm: bool = False
    post_norms: bool = False
    pre_norms: bool = True

    @property
    def attends(self) -> Attention | LatentAttention | None:
        """The attention of the layer; None for a Mamba mixer, or a layer with neither."""
        return self.attention if isinstance(self.attention, Attention | LatentAttention) else None

    @property
    def window(self) -> int | None:
        """The sliding window of the layer's attention; None for full attention or a layer without attention."""
        return None if self.attends is None else self.attends.sliding_window


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: embedding, layers, final norm, head. Layers are compared by value.

    - `family`: the model_type of the config.json (`kumi.spec.families`).
    - `norm`: "rmsnorm" or "layernorm".
    - `norm_bias`: layer norms have a bias.
    - `zero_centered_norm`: norms multiply by 1 + weight.
    - `learned_positions`: number of learned position embeddings; 0 without them.
    - `embedding_norm`: the embeddings are normalized.
    - `embedding_scale`, `residual_scale`, `logit_scale`: factors of the embeddings, of the outputs of attention and mlp
      before they are added to the residual stream, and of the logits.
    - `logit_softcap`: logits become softcap * tanh(logit / softcap).
    - `head`: "lm" for logits over the vocabulary, or "score" for one number per token, the head of a reward model. A
      score head has a weight of its own, so `tie_word_embeddings` is then false; logits' scale and cap do not apply.
    - `weights`: the format of the tensors in files.
    - `carried_config`: the entries of config.json, as JSON, about passthrough tensors (`Weights.passthrough`): parts of
      the model that are not trained but copied into exports.
    - `lora`: adapters; all other parameters but those of `Lora.modules` are then frozen.
    - `notes`: sentences about parts of config.json that were left out.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    norm: str = "rmsnorm"
    learned_positions: int = 0
    embedding_norm: bool = False
    norm_bias: bool = True
    zero_centered_norm: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head: str = "lm"
    weights: Weights = PLAIN
    carried_config: str = ""
    lora: Lora | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def first_attention(self) -> Attention | LatentAttention:
        """The attention of the first layer with attention. Raise ModelError if no layer has attention."""
        attention = next((layer.attends for layer in self.layers if layer.attends is not None), None)
        if attention is None:
            raise ModelError(
                f"this {self.family} model has attention in none of its layers; use a model with attention"
            )
        return attention

    @property
    def first_mlp(self) -> MLP | MoE:
        """The MLP or the experts of the first layer with one of these. Raise ModelError if no layer has them."""
        mlp = next((layer.mlp for layer in self.layers if layer.mlp is not None), None)
        if mlp is None:
            raise ModelError(f"this {self.family} model has an mlp in none of its layers; use a model with an mlp")
        return mlp

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Models are keys of caches and may have a hundred layers, so the hash is computed once.
        return hash((self.family, self.vocab_size, self.hidden_size, self.layers))

    def unique_layers(self) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
        """Return the distinct layers in order of first appearance, and each layer's index among these."""
        return self._kinds

    @cached_property
    def _kinds(self) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
        kinds: dict[LayerSpec, int] = {}
        indices = tuple(kinds.setdefault(layer, len(kinds)) for layer in self.layers)
        return tuple(kinds), indices
