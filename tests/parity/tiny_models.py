"""Tiny models of every family and variant, as transformers configs."""

from __future__ import annotations

import torch
import transformers

from kumi.nn import Decoder
from kumi.spec import families

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 500.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}

CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-spelled-out": ("Llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0,
                                                                    "truncate": False, "attention_factor": 1.3}}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6,
                               "layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip


def build_reference(name: str) -> transformers.PreTrainedModel:
    """transformers' model of the case, with random weights everywhere (norms and biases too)."""
    family, changes = CASES[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(1 + noise if "norm" in key else noise)
    return model.eval()


def build_pair(name: str) -> tuple[transformers.PreTrainedModel, Decoder]:
    """The case in transformers and in kumi, with equal weights."""
    reference = build_reference(name)
    decoder = Decoder(families.from_hf(reference.config.to_dict()))
    decoder.load_state_dict(dict(reference.named_parameters()))
    return reference, decoder
