"""The mapping of native tensors, in kumi's names and shapes, to those of Megatron-Core's checkpoints (torch_dist).

A checkpoint has either one tensor for the matrices of all layers, with a leading dim of layers (homogeneous), or one
tensor per layer, with the layer's index in its name. Queries, keys and values are fused by key-value head, [its
queries, key, value]; gate and up are concatenated by rows. A `Part` (`kumi.spec.weights`) is a rectangle of a native
tensor and its place in a tensor of the checkpoint. Sources: megatron-core 0.16.1 and 0.19.2:
models/gpt/gpt_layer_specs.py, transformer/{transformer_block,mlp,attention,multi_latent_attention}.py,
transformer/moe/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from kumi.errors import ModelError
from kumi.spec.ledger import tensors
from kumi.spec.model import Attention, LatentAttention, LayerSpec, ModelSpec, MoE
from kumi.spec.op import Param
from kumi.spec.weights import Part

Shape = tuple[int, ...]

# Native tensor outside of the layers -> Megatron's tensor.
_OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.embed_positions.weight": "embedding.position_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "model.norm.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
}
# Tensors with a row per token of the vocabulary, which Megatron may pad.
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# Native module of a layer -> Megatron's module, where both have the same tensors.
_MODULES = {
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
}
# Native tensor of a layer -> Megatron's tensor, for tensors whose names follow no rule.
_TENSORS = {
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "self_attn_post_norm.weight": "self_attention.linear_proj.post_layernorm.weight",
    "mlp_post_norm.weight": "mlp.linear_fc2.post_layernorm.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
}
# Native module -> its index in Megatron's fused matrix of queries, keys and values.
_QKV = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}
# Native half of a gated mlp -> its index, and the name of the fused module.
_HALVES = {
    "mlp.gate_proj": (0, "mlp.linear_fc1"),
    "mlp.up_proj": (1, "mlp.linear_fc1"),
    "mlp.shared_experts.gate_proj": (0, "mlp.shared_experts.linear_fc1"),
    "mlp.shared_experts.up_proj": (1, "mlp.shared_experts.linear_fc1"),
}
# Native tensor of all experts of a layer -> Megatron's module.
_EXPERTS = {"gate_up_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2"}

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class CheckpointKeys:
    """The naming scheme of a checkpoint.

    - `homogeneous`: layers are a dim of a tensor, not a part of its name.
    - `vocab`: rows of the embedding, with padding.
    - `local`: the model consists of Megatron-Core's own modules; else of TransformerEngine's, which fuse a norm with
      the matrix after it. The names of some norms depend on this (`_norm_name`).
    - `halves`: gate and up are separate tensors ("_w" and "_v"), and the index of an expert is a part of the name.
    """

    homogeneous: bool
    vocab: int
    local: bool = False
    halves: bool = False


def checkpoint_keys(spec: ModelSpec, *, local: bool = False, multiple: int = 1) -> CheckpointKeys:
    """Return the scheme that Megatron-Core expects for `spec`, with the vocabulary padded to a multiple of
    `multiple`."""
    mixed = len({isinstance(layer.mlp, MoE) for layer in spec.unique_layers()[0]}) > 1
    return CheckpointKeys(not mixed, -(-spec.vocab_size // multiple) * multiple, local)


def megatron_parts(spec: ModelSpec, param: Param, keys: CheckpointKeys) -> tuple[Part, ...]:
    """Return the parts of `param`, a tensor of `spec`, in a checkpoint. Raise ModelError if it has no counterpart."""
    if param.name in _OUTSIDE_LAYERS:
        name = _OUTSIDE_LAYERS[param.name]
        shape = (keys.vocab, *param.shape[1:]) if name in VOCABULARY else param.shape
        return (_as_rectangle(name, shape, param, at=(0,) * len(shape)),)
    matched = _LAYER.fullmatch(param.name)
    inner_parts = None if matched is None else _in_layer(spec, param, matched[2], int(matched[1]), keys)
    if not inner_parts:
        raise ModelError(
            f"{param.name!r} of this {spec.family} model has no counterpart in a Megatron-Core GPT checkpoint; "
            f"convert to hf or kumi instead"
        )
    return tuple(_in_checkpoint(part, int(matched[1]) if matched else 0, spec, keys) for part in inner_parts)


def megatron_tensors(spec: ModelSpec, keys: CheckpointKeys) -> dict[str, Shape]:
    """Return the name and shape of every tensor of a checkpoint of `spec`."""
    return {part.name: part.shape for param in tensors(spec) for part in megatron_parts(spec, param, keys)}


def extra_states(spec: ModelSpec, keys: CheckpointKeys) -> Iterator[str]:
    """Yield the names of the empty entries "_extra_state" of modules, which Megatron-Core expects in a checkpoint."""
    layers = spec.num_hidden_layers
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    for index, layer in enumerate(spec.layers):
        for module, experts in _modules(layer, keys):
            index_text, total = (f"{index}", f"{layers}") if keys.homogeneous else ("0", "1")
            owner = f"decoder.layers.{module}" if keys.homogeneous else f"decoder.layers.{index}.{module}"
            for expert in range(experts):
                lead = f"{index_text}." if keys.homogeneous else ""
                tail = f"{total}." if keys.homogeneous else ""
                yield f"{owner}._extra_state/shard_{lead}{expert}_{tail}{experts}"
            if not experts:
                yield f"{owner}._extra_state/shard_{index_text}_{total}"


def _modules(layer: LayerSpec, keys: CheckpointKeys) -> Iterator[tuple[str, int]]:
    """Yield (module, experts) for each module of `layer` that has extra states.

    `experts` is their number if each expert has one, and 0 if the module has a single one.
    """
    attention = ["core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm"]
    if isinstance(layer.attention, LatentAttention):
        attention = [
            "core_attention",
            "linear_proj",
            "linear_q_proj",
            "linear_q_down_proj",
            "linear_q_up_proj",
            "linear_kv_down_proj",
            "linear_kv_up_proj",
            "q_layernorm",
            "kv_layernorm",
        ]
    yield from ((f"self_attention.{name}", 0) for name in attention)
    yield from ((name, 0) for name in ("input_layernorm", "pre_mlp_layernorm"))
    if not isinstance(layer.mlp, MoE):
        yield from (("mlp.linear_fc1", 0), ("mlp.linear_fc2", 0))
        return
    yield from ((f"mlp.experts.experts.{name}", layer.mlp.num_experts) for name in ("linear_fc1", "linear_fc2"))
    if layer.mlp.shared_intermediate_size:
        yield from (("mlp.shared_experts.linear_fc1", 0), ("mlp.shared_experts.linear_fc2", 0))


def _in_layer(spec: ModelSpec, param: Param, inner: str, index: int, keys: CheckpointKeys) -> list[Part]:
    """Return the parts of `param`, whose name within layer `index` is `inner`, in tensors of this layer alone.

    The list is empty if `param` has no counterpart.
    """
    layer = spec.layers[index]
    module, _, kind = inner.rpartition(".")
    if module in _QKV and isinstance(layer.attention, Attention):
        return [_qkv_part(layer.attention, param, _QKV[module], kind)]
    if module == "self_attn.q_proj":
        return [_complete(f"self_attention.linear_q_proj.{kind}", param)]
    if module in _HALVES:
        half, name = _HALVES[module]
        return [_gate_or_up(f"{name}.{kind}", param, half, gated=_gated(layer), keys=keys)]
    if module == "mlp.experts" and isinstance(layer.mlp, MoE):
        return list(_expert_parts(layer.mlp, param, kind, keys))
    megatron_name = _norm_name(layer, module, kind, keys) or _TENSORS.get(inner)
    if megatron_name is None and module in _MODULES:
        megatron_name = f"{_MODULES[module]}.{kind}"
    return [] if megatron_name is None else [_complete(megatron_name, param)]


def _gated(layer: LayerSpec) -> bool:
    """True if the dense or the shared feed-forward layer of `layer` has a gate."""
    return layer.mlp is not None and layer.mlp.gated


def _norm_name(layer: LayerSpec, module: str, kind: str, keys: CheckpointKeys) -> str | None:
    """Return Megatron's name of a norm's tensor, which may belong to the next matrix; None for other modules."""
    latent, moe = isinstance(layer.attention, LatentAttention), isinstance(layer.mlp, MoE)
    if module == "input_layernorm":
        return f"input_layernorm.{kind}" if latent else f"self_attention.linear_qkv.layer_norm_{kind}"
    if module == "post_attention_layernorm":
        # TransformerEngine fuses this norm with the matrix of a dense mlp only. Megatron-Core's own modules give it
        # the fused name in all layers, except with latent attention.
        is_separate = latent if keys.local else moe
        return f"pre_mlp_layernorm.{kind}" if is_separate else f"mlp.linear_fc1.layer_norm_{kind}"
    for native, stem in (("q_a_layernorm", "q"), ("kv_a_layernorm", "kv")):
        if module == f"self_attn.{native}":
            separate_name = f"self_attention.{stem}_layernorm.{kind}"
            return separate_name if keys.local else f"self_attention.linear_{stem}_up_proj.layer_norm_{kind}"
    return None


def _as_rectangle(name: str, shape: Shape, param: Param, at: Shape) -> Part:
    """Return the complete `param` as the rectangle at index `at` of a tensor of `shape`."""
    return Part(
        name,
        shape,
        start=(0,) * len(param.shape),
        extent=param.shape,
        view=shape,
        at=at,
        size=param.shape,
        order=tuple(range(len(shape))),
    )


def _complete(name: str, param: Param) -> Part:
    return _as_rectangle(name, param.shape, param, (0,) * len(param.shape))


def _qkv_part(attention: Attention, param: Param, which: int, kind: str) -> Part:
    """Return `param`, of queries (`which` = 0), keys (1) or values (2), as a part of the fused tensor.

    The fused tensor is viewed as (groups, queries of a group + 2, head_dim, ...).
    """
    groups, size = attention.num_key_value_heads, attention.head_dim
    queries, rest = attention.num_attention_heads // groups, param.shape[1:]
    view = (groups, queries + 2, size, *rest)
    at = (0, (0, queries, queries + 1)[which], 0, *(0 for _ in rest))
    shape, name = (prod(view[:3]), *rest), f"self_attention.linear_qkv.{kind}"
    return Part(
        name,
        shape,
        start=(0,) * len(param.shape),
        extent=param.shape,
        view=view,
        at=at,
        size=(groups, queries if which == 0 else 1, size, *rest),
        order=tuple(range(len(view))),
    )


def _gate_or_up(name: str, param: Param, half: int, *, gated: bool, keys: CheckpointKeys) -> Part:
    """Return `param`, gate (`half` = 0) or up (1), as a part of [gate; up], or as the only matrix without a gate."""
    if not gated:
        return _complete(name, param)
    if keys.halves:
        return _complete(f"{name}_{'wv'[half]}", param)
    rows, rest = param.shape[0], param.shape[1:]
    return _as_rectangle(name, (2 * rows, *rest), param, (half * rows, *(0 for _ in rest)))


def _expert_parts(moe: MoE, param: Param, kind: str, keys: CheckpointKeys) -> Iterator[Part]:
    """Yield a part for each expert of a tensor (X, ...) of all experts."""
    which, bias = kind.removesuffix("_bias"), kind.endswith("_bias")
    leaf = f"{_EXPERTS[which]}.{'bias' if bias else 'weight'}"
    for expert in range(moe.num_experts):
        start, extent = (expert, *(0 for _ in param.shape[1:])), (1, *param.shape[1:])
        if not keys.halves:
            name, order = f"mlp.experts.experts.{leaf}", tuple(range(len(param.shape)))
            yield Part(name, param.shape, start, extent, view=param.shape, at=start, size=extent, order=order)
        else:
            yield from _expert_halves(
                f"mlp.experts.experts.{expert}.{leaf}", start, extent, pair=which == "gate_up_proj"
            )


def _expert_halves(name: str, start: Shape, extent: Shape, *, pair: bool) -> Iterator[Part]:
    """Yield the parts of one expert where each expert has tensors of its own (`CheckpointKeys.halves`).

    These are gate ("_w") and up ("_v") of a `pair`, else one tensor.
    """
    rows = extent[1] // 2 if pair else extent[1]
    for half in range(2 if pair else 1):
        shape = (rows, *extent[2:])
        native = (start[0], half * rows, *start[2:])
        order = tuple(range(len(shape)))
        ending = f"_{'wv'[half]}" if pair else ""
        at = (0,) * len(shape)
        yield Part(name + ending, shape, native, (1, *shape), view=shape, at=at, size=shape, order=order)


def _in_checkpoint(part: Part, index: int, spec: ModelSpec, keys: CheckpointKeys) -> Part:
    """Return `part` of layer `index` with its place in the checkpoint."""
    if not keys.homogeneous:
        return replace(part, name=f"decoder.layers.{index}.{part.name}")
    layers = spec.num_hidden_layers
    return replace(
        part,
        name=f"decoder.layers.{part.name}",
        shape=(layers, *part.shape),
        view=(layers, *part.view),
        at=(index, *part.at),
        size=(1, *part.size),
        order=(0, *(dim + 1 for dim in part.order)),
    )
