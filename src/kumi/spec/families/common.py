"""What the families have in common: from checked values to a ModelSpec, and back to a config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families import rope
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec


def build(
    family: str,
    values: Mapping[str, Any],
    *,
    windows: Sequence[int | None],
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """The ModelSpec of `values` (what `keys.read` returned); `windows` has each layer's sliding window, or None."""
    _check_sizes(values)
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"] or values["num_attention_heads"]
    head_dim = _head_dim(values, heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    embedding, mlp = rope.from_hf(family, values), MLP(values["intermediate_size"], mlp_bias)
    attention = partial(Attention, heads, kv_heads, head_dim, embedding, qkv_bias, out_bias, qk_norm)
    layer = {window: LayerSpec(attention(window), mlp) for window in set(windows)}
    eos = values["eos_token_id"]
    return ModelSpec(
        family=family,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        layers=tuple(layer[window] for window in windows),
        rms_norm_eps=float(values["rms_norm_eps"]),
        max_position_embeddings=values["max_position_embeddings"],
        tie_word_embeddings=values["tie_word_embeddings"],
        initializer_range=float(values["initializer_range"]),
        bos_token_id=values["bos_token_id"],
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=values["pad_token_id"],
    )


def to_hf(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """The keys that every family writes, from the first layer: a family adds its own."""
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    eos = spec.eos_token_id
    return {
        "architectures": [architecture],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "hidden_act": mlp.hidden_act,
        "max_position_embeddings": spec.max_position_embeddings,
        "initializer_range": spec.initializer_range,
        "rms_norm_eps": spec.rms_norm_eps,
        "use_cache": True,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_dropout": 0.0,
        **rope.to_hf(attention.rope),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": spec.pad_token_id,
    }


def check_layer_types(values: Mapping[str, Any]) -> list[str]:
    """`layer_types`, one known word for each layer."""
    types, layers = values["layer_types"], values["num_hidden_layers"]
    if len(types) != layers:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for num_hidden_layers={layers}")
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ModelError(f"config.json: layer_types: {unknown[0]!r}; kumi knows full_attention and sliding_attention")
    return list(types)


def _check_sizes(values: Mapping[str, Any]) -> None:
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"):  # fmt: skip
        value = values.get(name)
        if value is not None and value < 1:
            raise ModelError(f"config.json: {name}={value} must be 1 or more")
    for name in ("rms_norm_eps", "initializer_range"):
        if values[name] < 0:
            raise ModelError(f"config.json: {name}={values[name]} must not be negative; correct it")


def _head_dim(values: Mapping[str, Any], heads: int) -> int:
    hidden = values["hidden_size"]
    if values["head_dim"] is None and hidden % heads:
        raise ModelError(f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}, "
                         f"and head_dim is not given")  # fmt: skip
    head_dim: int = values["head_dim"] or hidden // heads
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim={head_dim} is odd; rotary embeddings turn pairs")
    return head_dim
