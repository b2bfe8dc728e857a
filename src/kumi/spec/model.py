"""What a decoder-only language model is: one frozen value a model, Hugging Face's word wherever it has one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: the base, and how its frequencies are stretched for longer contexts.

    `scaling` is None (plain), "linear" (Chen et al., 2023, arXiv:2306.15595), "llama3" (Llama 3.1: low frequencies
    divided by `factor`, high ones kept, a smooth ramp between) or "yarn" (Peng et al., 2023, arXiv:2309.00071). Fields
    after `factor` are None where the scaling does not use them.
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


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) with a causal mask.

    A position sees the `sliding_window` latest positions, itself included, or all earlier ones when it is None.
    `qk_norm` is an RMSNorm over the head dimension of every query and key head, before the rotation.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None


@dataclass(frozen=True)
class MLP:
    """Gated feed-forward layer, down(act(gate(x)) * up(x)), with act = SiLU (Shazeer, 2020, arXiv:2002.05202)."""

    intermediate_size: int
    bias: bool = False
    hidden_act: str = "silu"


@dataclass(frozen=True)
class LayerSpec:
    """One pre-norm decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    attention: Attention
    mlp: MLP


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: embedding, layers, final RMSNorm, head. Equal layers are equal objects."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    def layer_runs(self) -> list[tuple[LayerSpec, int]]:
        """Consecutive equal layers as (layer, how many): a planner need look at each distinct layer once."""
        return [(layer, len(list(run))) for layer, run in groupby(self.layers)]

    def layer_kinds(self) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
        """The distinct layers in order of first appearance, and for every layer the index of its kind among them."""
        kinds: dict[LayerSpec, int] = {}
        indices = tuple(kinds.setdefault(layer, len(kinds)) for layer in self.layers)
        return tuple(kinds), indices
