"""What a decoder-only language model is: one frozen value a model, Hugging Face's word wherever it has one."""

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
    """Rotary position embedding: the base, and how its frequencies are stretched for longer contexts.

    `scaling` is None (plain), "linear" (Chen et al., 2023, arXiv:2306.15595), "llama3" (Llama 3.1: low frequencies
    divided by `factor`, high ones kept, a smooth ramp between), "yarn" (Peng et al., 2023, arXiv:2309.00071) or
    "longrope" (Ding et al., 2024, arXiv:2402.13753: each pair's frequency divided by its own number, of `long_factor`
    in documents longer than the original context, else of `short_factor`). Fields after `factor` are None where the
    scaling does not use them. `partial_rotary_factor` is the share of every head that is turned. `interleave`: pairs to
    turn are neighbours, not half the turned dimensions apart. `query_growth`: queries at position p are multiplied by
    1 + query_growth * ln(1 + floor(p / original context)), as in Llama 4 and Ministral 3.
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
        """Whether the frequencies depend on how long a document is."""
        return self.scaling == "longrope"

    @property
    def of_keys(self) -> Rope:
        """What keys are turned by."""
        return replace(self, query_growth=0.0) if self.query_growth else self


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) with a causal mask.

    A position sees the `sliding_window` latest positions, itself included, or all earlier ones when it is None.
    `qk_norm` is an RMSNorm over the head dimension of every query and key head, before the rotation; over all heads at
    once with `qk_norm_whole`. `rope` is None where positions enter otherwise: learned ones at the embedding, or with
    `alibi` a bias on the scores that grows with the distance (Press et al., 2021, arXiv:2108.12409). `sinks`:
    every head has a learned score of looking nowhere.

    Scores are multiplied by `score_scale`, 1 / sqrt(head_dim) where that is None, and with `softcap` become
    softcap * tanh(score / softcap) before the mask (Gemma 2, arXiv:2408.00118). `alibi_stepped`: the bias is rounded to
    bfloat16, and `score_scale` multiplies it, too (Falcon).
    """

    # What the module is called in a layer, and so what the names of its parameters have.
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
        """How many of a head's dimensions are turned."""
        return 0 if self.rope is None else int(self.head_dim * self.rope.partial_rotary_factor)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434) with a causal mask.

    Keys and values come from a latent vector of `kv_lora_rank` a token, queries from one of `q_lora_rank` (None:
    straight from the hidden state). A query or key head has `qk_nope_head_dim` dimensions without and
    `qk_rope_head_dim` with rotation; the turned part of the keys is one for all heads. `bias` is on the projections to
    the latents and the output projection. `rope_interleave`: pairs to turn are neighbours, not half a head apart.
    `mscale_all_dim`: with YaRN, which lengthens the context, scores are multiplied by (0.1 * it * ln(factor) + 1)^2.
    """

    # What the module is called in a layer, and so what the names of its parameters have.
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
        return self.qk_nope_head_dim + self.qk_rope_head_dim

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
        """What scores are multiplied by besides 1 / sqrt(qk_head_dim)."""
        if self.rope.scaling != "yarn" or self.rope.factor <= 1:
            return 1.0
        return (0.1 * self.mscale_all_dim * log(self.rope.factor) + 1.0) ** 2


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 mixer (Dao and Gu, 2024, arXiv:2405.21060): a convolution over time and a linear recurrence of heads.

    Each of `num_heads` heads has `head_dim` channels and a state of `state_size` numbers a channel; heads of a group
    (of `n_groups`) share what writes into their states and what reads from them. `conv_kernel` positions go into the
    convolution, after which comes silu. The recurrence is worked out `chunk_size` positions at a time, its steps kept
    within `time_step_limit`. `bias` is on the projections, `conv_bias` on the convolution.
    """

    # What the module is called in a layer, and so what the names of its parameters have.
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
        """Channels of all heads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLP:
    """Feed-forward layer: down(act(gate(x)) * up(x)) (Shazeer, 2020, arXiv:2002.05202) or, plain, down(act(up(x))).

    `hidden_act` is Hugging Face's name of the activation.
    """

    intermediate_size: int
    bias: bool = False
    hidden_act: str = "silu"
    gated: bool = True


@dataclass(frozen=True)
class MoE:
    """Mixture of experts: a token goes through `num_experts_per_tok` of `num_experts` gated layers, and a shared one.

    An expert's width is `moe_intermediate_size`, the shared one's (which all tokens take, too) is
    `shared_intermediate_size`, 0 where there is none; with `shared_gate` its result is multiplied by the sigmoid of a
    number that a row of weights makes of the token. The router's scores pass through `scoring_func` ("softmax" or
    "sigmoid"); with `n_group` > 1 only experts of the best `topk_group` groups are chosen from. `bias` is on router and
    experts.

    With `topk_method` "noaux_tc" a bias that is no parameter joins the scores where experts are chosen, and a group is
    as good as its two best experts; otherwise as its best. Experts that are not `gated` are down(act(up(x))). With
    `act_limit` gate and up are clamped, and gated as in gpt-oss: gate * sigmoid(`act_alpha` * gate) * (up + 1).
    `router_aux_loss_coef` is the weight of the loss that keeps
    experts equally busy (see `kumi.nn.router`), over the tokens of a batch, or with `seq_aux` over each sequence's.
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
        """Whether the router has a bias that only chooses."""
        return self.topk_method == "noaux_tc"


@dataclass(frozen=True)
class LayerSpec:
    """One pre-norm decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    `attention` may be a Mamba mixer instead. A half that is None is left out, and its norm with it.

    `parallel`: x + attention(norm(x)) + mlp(other_norm(x)), as in GPT-NeoX; with `shared_norm` both norms are one.
    `post_norms`: what attention and mlp return is normalised, too, as in Gemma 2; without `pre_norms` nothing else is,
    as in OLMo 2.
    """

    attention: Attention | LatentAttention | Mamba | None
    mlp: MLP | MoE | None
    parallel: bool = False
    shared_norm: bool = False
    post_norms: bool = False
    pre_norms: bool = True

    @property
    def attends(self) -> Attention | LatentAttention | None:
        """The attention, if the layer has one."""
        return self.attention if isinstance(self.attention, Attention | LatentAttention) else None

    @property
    def window(self) -> int | None:
        """The latest positions that the layer's attention sees; None where it sees all, or there is none."""
        return None if self.attends is None else self.attends.sliding_window


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: embedding, layers, final norm, head. Equal layers are equal objects.

    `norm` is "rmsnorm", or "layernorm", with a bias unless `norm_bias` is off; with `zero_centered_norm` norms multiply
    by 1 + weight. `learned_positions` is how many positions have a learned embedding of their own, 0 where none has;
    `embedding_norm`: the embeddings are normalised. Embeddings are multiplied by `embedding_scale`, what attention and
    mlp add to the residual stream by `residual_scale`, logits by `logit_scale`; with `logit_softcap` they then become
    softcap * tanh(logit / softcap). `weights` says how files hold the tensors; `carried_config` is what config.json
    says of parts that are carried along (`Weights.carried`), as JSON. With `lora` only adapters are trained. `notes`
    are sentences about what was left out when the model was read.
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
    weights: Weights = PLAIN
    carried_config: str = ""
    lora: Lora | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def first_attention(self) -> Attention | LatentAttention:
        """The attention of the first layer that has one; ModelError where none has."""
        found = next((layer.attends for layer in self.layers if layer.attends is not None), None)
        if found is None:
            raise ModelError(f"this {self.family} model has attention in none of its layers; use one that has")
        return found

    @property
    def first_mlp(self) -> MLP | MoE:
        """The feed-forward part of the first layer that has one; ModelError where none has."""
        found = next((layer.mlp for layer in self.layers if layer.mlp is not None), None)
        if found is None:
            raise ModelError(f"this {self.family} model has an mlp in none of its layers; use one that has")
        return found

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Models are keys of caches, and have a hundred layers: their hash is worked out once.
        return hash((self.family, self.vocab_size, self.hidden_size, self.layers))

    def layer_kinds(self) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
        """The distinct layers in order of first appearance, and for every layer the index of its kind among them."""
        return self._kinds

    @cached_property
    def _kinds(self) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
        kinds: dict[LayerSpec, int] = {}
        indices = tuple(kinds.setdefault(layer, len(kinds)) for layer in self.layers)
        return tuple(kinds), indices
