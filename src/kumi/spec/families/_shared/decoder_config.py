"""Helpers of all families: build a ModelSpec from checked config.json values, and write the common keys back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import bounds, rope_config
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.weight_rules import Weights


def build_llama_like(
    family: str,
    values: Mapping[str, Any],
    *,
    windows: Sequence[int | None],
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """Return a Llama-like ModelSpec of `values` (from `config_keys.read`); `windows`: each layer's window, or None."""
    check_sizes(values)
    mlp = MLP(values["intermediate_size"], mlp_bias)
    layers = layers_with_windows(family, values, windows, mlp, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=qk_norm)
    return build_model(family, values, layers)


def layers_with_windows(
    family: str, values: Mapping[str, Any], windows: Sequence[int | None], mlp: MLP | MoE, **attention: Any
) -> list[LayerSpec]:
    """Return layers that differ only in their sliding window.

    `windows`: the window of each layer, None for full attention. `attention` are further fields of `Attention`.
    """
    base = grouped_attention(values, rope_config.rope_from_hf(family, values), **attention)
    layer = {window: LayerSpec(replace(base, sliding_window=window), mlp) for window in set(windows)}
    return [layer[window] for window in windows]


def grouped_attention(values: Mapping[str, Any], rope: Rope | None, **fields: Any) -> Attention:
    """Return the attention that `values` describe; `fields` are further fields of `Attention`.

    Raise ModelError if the numbers of heads, hidden_size and head_dim contradict each other.
    """
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"] or values["num_attention_heads"]
    head_dim = _head_dim(values, heads, rotary=rope is not None)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}; "
            f"correct one of them"
        )
    return Attention(heads, kv_heads, head_dim, rope, **fields)


def build_model(family: str, values: Mapping[str, Any], layers: Sequence[LayerSpec], **fields: Any) -> ModelSpec:
    """Return the ModelSpec of `values` with `layers`; `fields` replace the fields that follow from `values`."""
    eos = values["eos_token_id"]
    spec_fields = {
        "norm_eps": float(values["rms_norm_eps"]) if "rms_norm_eps" in values else None,
        "max_position_embeddings": values.get("max_position_embeddings"),
        "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
    }
    same = ("vocab_size", "hidden_size", "tie_word_embeddings", "bos_token_id", "pad_token_id")
    spec_fields |= {name: values[name] for name in same} | {"initializer_range": float(values["initializer_range"])}
    return ModelSpec(**{"family": family, "layers": tuple(layers), **spec_fields, **fields})


def mtp_fields(weights: Weights, layers: int, extra: int) -> dict[str, Any]:
    """Return the ModelSpec fields for `extra` multi-token-prediction layers in the files, after `layers` layers."""
    names = tuple(f"model.layers.{layers + index}." for index in range(extra))
    note = (
        f"{', '.join(f'{name}*' for name in names)} are layers for multi-token prediction: passthrough tensors, "
        f"copied unchanged, not computed, not trained, not counted"
    )
    return {"weights": replace(weights, passthrough=names), "notes": (note,) if extra else ()}


def common_to_hf(spec: ModelSpec, architecture: str, intermediate_size: int) -> dict[str, Any]:
    """Return the config.json keys that every family writes, with the first layer's values for keys about layers.

    A family adds its own keys.
    """
    attention, mlp, eos = spec.first_attention, spec.first_mlp, spec.eos_token_id
    ropes = [layer.attends.rope for layer in spec.layers if layer.attends is not None and layer.attends.rope]
    return {
        "architectures": [architecture],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        **({"head_dim": attention.head_dim} if isinstance(attention, Attention) else {}),
        "hidden_act": mlp.hidden_act,
        "max_position_embeddings": spec.max_position_embeddings,
        "initializer_range": spec.initializer_range,
        "rms_norm_eps": spec.norm_eps,
        "use_cache": True,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_dropout": 0.0,
        **(rope_config.rope_to_hf(ropes[0]) if ropes else {}),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": spec.pad_token_id,
    }


def first_grouped_attention(spec: ModelSpec) -> Attention:
    """Return the first layer's attention; raise ModelError unless it is an `Attention`."""
    attention = spec.layers[0].attention
    if not isinstance(attention, Attention):
        raise ModelError(f"a {spec.family} config.json cannot express {type(attention).__name__}; use Attention")
    return attention


def first_dense_mlp(spec: ModelSpec) -> MLP:
    """Return the first layer's MLP; raise ModelError unless it is dense."""
    mlp = spec.layers[0].mlp
    if not isinstance(mlp, MLP):
        raise ModelError(f"a {spec.family} config.json cannot express {type(mlp).__name__}; use MLP")
    return mlp


def read_layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return `layer_types`; raise ModelError unless it has one supported type per layer."""
    types, layers = values["layer_types"], values["num_hidden_layers"]
    if len(types) != layers:
        raise ModelError(
            f"config.json: layer_types has {len(types)} entries for num_hidden_layers={layers}; correct one of them"
        )
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ModelError(
            f"config.json: layer_types has {unknown[0]!r}, and kumi supports full_attention and sliding_attention; "
            f"use these"
        )
    return list(types)


def check_sizes(values: Mapping[str, Any]) -> None:
    """Raise ModelError for a number in `values` that is out of range (see `bounds.check_ranges`)."""
    bounds.check_ranges(values)


def _head_dim(values: Mapping[str, Any], heads: int, *, rotary: bool) -> int:
    """Return the size of a head, by default hidden_size / `heads`.

    Raise ModelError if this default is no whole number, or if RoPE cannot rotate pairs of an odd size.
    """
    hidden = values["hidden_size"]
    if values.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}, and head_dim is missing; "
            f"set head_dim"
        )
    head_dim: int = values.get("head_dim") or hidden // heads
    if rotary and head_dim % 2:
        raise ModelError(
            f"config.json: head_dim={head_dim} is odd, but RoPE rotates pairs of dimensions; use an even size"
        )
    return head_dim
