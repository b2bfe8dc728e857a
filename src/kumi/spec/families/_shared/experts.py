"""Helpers for families with routed experts (MoE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import decoder_config
from kumi.spec.families._shared.config_keys import Key, require_values
from kumi.spec.model import MLP, LayerSpec, ModelSpec, MoE

# The number of experts has two names: transformers 4 writes one, transformers 5 the other.
NUM_EXPERTS_KEYS = {"num_experts": Key("integer or null", None), "num_local_experts": Key("integer or null", None)}
# The keys that select the layers with experts.
SPARSE_LAYER_KEYS = {"decoder_sparse_step": Key("integer", 1), "mlp_only_layers": Key("list or null", None)}


def num_experts(family: str, values: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer; raise ModelError unless `NUM_EXPERTS_KEYS` give exactly one."""
    counts = {values[name] for name in NUM_EXPERTS_KEYS if values[name] is not None}
    if len(counts) != 1:
        raise ModelError(
            f"config.json: num_experts={values['num_experts']} and num_local_experts="
            f"{values['num_local_experts']} of a {family} model; set exactly one of the two"
        )
    return int(counts.pop())


def checked_moe(moe: MoE) -> MoE:
    """Return `moe`; raise ModelError unless the router can choose `num_experts_per_tok` experts from its groups."""
    if moe.num_experts_per_tok > moe.num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok={moe.num_experts_per_tok} is more than the "
            f"{moe.num_experts} experts of a layer; correct one of them"
        )
    if moe.num_experts % moe.n_group or moe.topk_group > moe.n_group:
        raise ModelError(
            f"config.json: n_group={moe.n_group} must divide the {moe.num_experts} experts of a layer, "
            f"and topk_group={moe.topk_group} be at most n_group; correct them"
        )
    group_size = moe.num_experts // moe.n_group
    if moe.topk_group * group_size < moe.num_experts_per_tok:
        raise ModelError(
            f"config.json: topk_group={moe.topk_group} groups of {group_size} experts are fewer than "
            f"num_experts_per_tok={moe.num_experts_per_tok}; correct one of them"
        )
    if moe.has_correction_bias and group_size < 2:
        raise ModelError(
            f"config.json: n_group={moe.n_group} leaves one expert per group, but the router scores a group by its "
            f"two best experts; use at most {moe.num_experts // 2}"
        )
    return moe


def with_dense_layers(values: Mapping[str, Any], layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return MoE `layers` with a dense MLP where the `SPARSE_LAYER_KEYS` of `values` demand it.

    Every `decoder_sparse_step`-th layer keeps its experts, except the layers in `mlp_only_layers`.
    """
    count, step, dense = len(layers), values["decoder_sparse_step"], values["mlp_only_layers"] or []
    if any(type(index) is not int or not 0 <= index < count for index in dense):
        raise ModelError(
            f"config.json: mlp_only_layers={dense!r} must be layer indices from 0 to {count - 1}; correct it"
        )
    mlp = MLP(values["intermediate_size"])
    return [
        layer if index not in dense and (index + 1) % step == 0 else replace(layer, mlp=mlp)
        for index, layer in enumerate(layers)
    ]


def experts_to_hf(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """Return the config.json keys of families with `SPARSE_LAYER_KEYS`.

    Dense layers are listed in `mlp_only_layers`; without dense layers, intermediate_size is that of an
    expert.
    """
    moe = first_moe(spec)
    dense = {index: layer.mlp for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MLP)}
    width = next(iter(dense.values())).intermediate_size if dense else moe.moe_intermediate_size
    same = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef")
    return (
        decoder_config.common_to_hf(spec, architecture, width)
        | {name: getattr(moe, name) for name in same}
        | {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}
    )


def aux_loss_coef(family: str, values: Mapping[str, Any], name: str, default: float) -> float:
    """Return the weight of the load-balancing loss under the key `name`, or `default` where it is null."""
    if values.get("router_jitter_noise"):
        require_values(family, values, router_jitter_noise=0)
    coef = values[name]
    if coef is not None and coef < 0:
        raise ModelError(f"config.json: {name}={coef} must not be negative; use 0 for no load-balancing loss")
    return default if coef is None else float(coef)


def first_moe(spec: ModelSpec) -> MoE:
    """Return the MoE of the first layer with experts; raise ModelError if no layer has experts."""
    moes = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoE)]
    if not moes:
        raise ModelError(f"a {spec.family} config.json needs at least one layer with experts; use a dense family")
    return moes[0]
