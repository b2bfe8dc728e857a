"""The model shapes of the benchmarks, as contents of Hugging Face `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kumi.validation.model_shapes import LLAMA, LLAMA_1B, LLAMA_8B, QWEN_30B_A3B, TINY, TINY_EXPERTS

__all__ = [
    "LLAMA_1B",
    "LLAMA_8B",
    "QWEN_30B_A3B",
    "TINY",
    "TINY_EXPERTS",
    "W1",
    "W1_EXPERTS",
    "W1_MAMBA",
    "with_layers",
    "write_config",
]

# 18.9 M parameters: the workload of the CPU benchmark.
W1 = LLAMA | {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}

# W1 with 8 experts, 2 per token, which together are as wide as its MLP.
W1_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# W1 with Mamba-2 in place of attention in three of four layers.
W1_MAMBA: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-*-",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "mamba_num_heads": 12,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 128,
    "chunk_size": 128,
    "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return `config` with another number of layers: the same matrix shapes in less memory."""
    return config | {"num_hidden_layers": layers}


def write_config(config: dict[str, Any], folder: Path) -> Path:
    """Write `config` into `folder` as config.json, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
