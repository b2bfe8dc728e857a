"""Mixtral: Mistral with eight experts in every layer, two per token (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared import rope_config
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_KEYS, Key, read
from kumi.spec.families._shared.decoder_config import build_model, check_sizes, common_to_hf, layers_with_windows
from kumi.spec.families._shared.experts import aux_loss_coef, checked_moe, first_moe
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.weight_rules import Rename, Stack, Weights

ARCHITECTURE = "MixtralForCausalLM"
KEYS = {
    **DECODER,
    "rms_norm_eps": Key("number", 1e-5),
    "max_position_embeddings": Key("integer", 131_072),
    **ROUTER_KEYS,
    "num_key_value_heads": Key("integer or null", 8),
    "sliding_window": Key("integer or null", None),
    "num_local_experts": Key("integer", 8),
    "num_experts_per_tok": Key("integer", 2),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 2),
}
_DEFAULT_THETA = 1_000_000.0

# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights(
    (
        Rename("mlp.gate", "block_sparse_moe.gate"),
        Stack(
            "mlp.experts.gate_up_proj",
            ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
        ),
        Stack("mlp.experts.down_proj", ("block_sparse_moe.experts.{}.w2.weight",)),
    )
)


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "mixtral" describes."""
    values = rope_config.with_default_theta(read("mixtral", config, KEYS), _DEFAULT_THETA)
    check_sizes(values)
    moe = MoE(
        values["num_local_experts"],
        values["num_experts_per_tok"],
        values["intermediate_size"],
        router_aux_loss_coef=aux_loss_coef("mixtral", values, "router_aux_loss_coef", 0.001),
    )
    windows = [values["sliding_window"]] * values["num_hidden_layers"]
    return build_model(
        "mixtral", values, layers_with_windows("mixtral", values, windows, checked_moe(moe)), weights=WEIGHTS
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    moe = first_moe(spec)
    own = {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "router_aux_loss_coef": moe.router_aux_loss_coef,
        "sliding_window": spec.layers[0].window,
    }
    return common_to_hf(spec, ARCHITECTURE, moe.moe_intermediate_size) | own
