"""StarCoder2: layer norms, biases everywhere, a plain GELU, and a sliding window (arXiv:2402.19173)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared.config_keys import DECODER, Key, checked_activation, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    layers_with_windows,
)
from kumi.spec.model import MLP, ModelSpec
from kumi.spec.weight_rules import Rename, Weights

ARCHITECTURE = "Starcoder2ForCausalLM"
KEYS = {
    **{name: key for name, key in DECODER.items() if name != "rms_norm_eps"},
    "max_position_embeddings": Key("integer", 4_096),
    "num_key_value_heads": Key("integer", 2),
    "hidden_act": Key("text", "gelu_pytorch_tanh"),
    "norm_epsilon": Key("number", 1e-5),
    "initializer_range": Key("number", 0.018042),
    "use_bias": Key("true or false", True),
    "sliding_window": Key("integer or null", None),
    "tie_word_embeddings": Key("true or false", True),
    "bos_token_id": Key("integer or null", 50256),
    "eos_token_id": Key("integer or list of integers or null", 50256),
    # Published, but not read by transformers.
    "activation_function": Key("text or null", None),
    "attention_softmax_in_fp32": Key("true or false", True),
    "layer_norm_epsilon": Key("number", 1e-5),
    "mlp_type": Key("text", "default"),
    "norm_type": Key("text", "layer_norm"),
    "scale_attention_softmax_in_fp32": Key("true or false", True),
    "scale_attn_weights": Key("true or false", True),
}
# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights((Rename("mlp.up_proj", "mlp.c_fc"), Rename("mlp.down_proj", "mlp.c_proj")))


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "starcoder2" describes."""
    values = read("starcoder2", config, KEYS)
    check_sizes(values | {"layer_norm_eps": values["norm_epsilon"]})
    require_values("starcoder2", values, mlp_type="default", norm_type="layer_norm", scale_attn_weights=True)
    bias, windows = values["use_bias"], [values["sliding_window"]] * values["num_hidden_layers"]
    act = checked_activation("starcoder2", "hidden_act", values["hidden_act"])
    mlp = MLP(values["intermediate_size"], bias, act, gated=False)
    layers = layers_with_windows("starcoder2", values, windows, mlp, qkv_bias=bias, out_bias=bias)
    return build_model(
        "starcoder2", values, layers, norm="layernorm", norm_eps=float(values["norm_epsilon"]), weights=WEIGHTS
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    mlp = first_dense_mlp(spec)
    written = common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size) | {
        "norm_epsilon": spec.norm_eps,
        "use_bias": mlp.bias,
        "sliding_window": spec.layers[0].window,
    }
    return {name: value for name, value in written.items() if name != "rms_norm_eps"}
