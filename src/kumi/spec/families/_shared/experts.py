"""What families with routed experts have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import decoder_config
from kumi.spec.families._shared.config_keys import Key, neutral
from kumi.spec.model import MLP, LayerSpec, ModelSpec, MoE

# transformers 4 and 5 write one or the other.
COUNT = {"num_experts": Key("integer?", None), "num_local_experts": Key("integer?", None)}
# Which layers have experts.
SPARSE = {"decoder_sparse_step": Key("integer", 1), "mlp_only_layers": Key("list?", None)}


def count(family: str, values: Mapping[str, Any]) -> int:
    """How many routed experts a layer has, under either of the two names of `COUNT`."""
    said = {values[name] for name in COUNT if values[name] is not None}
    if len(said) != 1:
        raise ModelError(
            f"config.json: num_experts={values['num_experts']} and num_local_experts="
            f"{values['num_local_experts']} of a {family} model; give one of them"
        )
    return int(said.pop())


def check_experts(moe: MoE) -> MoE:
    """`moe`, when its router can choose as many experts as it should."""
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
    size = moe.num_experts // moe.n_group
    if moe.topk_group * size < moe.num_experts_per_tok:
        raise ModelError(
            f"config.json: topk_group={moe.topk_group} groups of {size} experts are fewer than "
            f"num_experts_per_tok={moe.num_experts_per_tok}; correct one of them"
        )
    if moe.has_correction_bias and size < 2:
        raise ModelError(
            f"config.json: n_group={moe.n_group} leaves one expert a group, and a group is as good as its "
            f"two best; use at most {moe.num_experts // 2}"
        )
    return moe


def in_some_layers(values: Mapping[str, Any], layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return `layers`, which all have experts, with a dense part instead where `values` (see `SPARSE`) want it: but in
    each `decoder_sparse_step`-th, and in those of `mlp_only_layers`."""
    count, step, dense = len(layers), values["decoder_sparse_step"], values["mlp_only_layers"] or []
    if any(type(index) is not int or not 0 <= index < count for index in dense):
        raise ModelError(f"config.json: mlp_only_layers={dense!r} must be numbers of layers, 0 to {count - 1}")
    mlp = MLP(values["intermediate_size"])
    return [
        layer if index not in dense and (index + 1) % step == 0 else replace(layer, mlp=mlp)
        for index, layer in enumerate(layers)
    ]


def to_hf(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """Return the keys of families with `SPARSE`: dense layers are listed; without any, their width is an expert's."""
    moe = routed(spec)
    dense = {index: layer.mlp for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MLP)}
    width = next(iter(dense.values())).intermediate_size if dense else moe.moe_intermediate_size
    same = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef")
    return (
        decoder_config.to_hf(spec, architecture, width)
        | {name: getattr(moe, name) for name in same}
        | {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}
    )


def aux_loss_coef(family: str, values: Mapping[str, Any], name: str, default: float) -> float:
    """The weight of the loss that keeps experts equally busy, under the key `name`."""
    if values.get("router_jitter_noise"):
        neutral(family, values, router_jitter_noise=0)
    coef = values[name]
    if coef is not None and coef < 0:
        raise ModelError(f"config.json: {name}={coef} must not be negative; use 0 for no such loss")
    return default if coef is None else float(coef)


def routed(spec: ModelSpec) -> MoE:
    """The experts of the first layer that has any; ModelError where none has."""
    found = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoE)]
    if not found:
        raise ModelError(f"a {spec.family} model without experts in any layer has no config.json; use a dense family")
    return found[0]
