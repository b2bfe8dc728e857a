"""Tiny models of every family and variant, as transformers configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import transformers

from kumi.nn import Decoder
from kumi.spec import families, ledger
from kumi.spec.model import ModelSpec
from kumi.spec.weights import stored_parts

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}

LATENT = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_shared_experts": 2,
    "rms_norm_eps": 1e-5,
}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
GROWING = YARN | {
    "original_max_position_embeddings": 10,
    "max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}

PHI = {"pad_token_id": None}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 2.5, 3.0, 4.0],
}
GEMMA = {"head_dim": 16, "sliding_window": 5, "pad_token_id": None}
NEOX = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}}

GLM = {"n_routed_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "head_dim": 8}

# Models that see are given text alone here. Their special tokens are none of the vocabulary's.
QWEN_SEES = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 8}
QWEN25_VL = {**QWEN_SEES, "vision_config": {**TOWER, "fullatt_block_indexes": [0]}}
QWEN3_VL = {**QWEN_SEES, "vision_config": {**TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}}
GEMMA3_SEES = {
    "mm_tokens_per_image": 4,
    "image_token_index": 200,
    "boi_token_index": 201,
    "eoi_token_index": 202,
    "vision_config": SIGLIP,
}
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}

OMNI = "NemotronH_Omni_Reasoning_V3_"
RADIO = {
    "model_type": "radio",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "video_temporal_patch_size": 2,
}

# Sizes that a family has no key for; it has keys of its own for the others.
WITHOUT = {
    "GPT2": ("intermediate_size", "num_key_value_heads"),
    "GPTNeoX": ("num_key_value_heads",),
    "Falcon": ("intermediate_size", "num_key_value_heads"),
    "Bloom": ("intermediate_size", "num_key_value_heads", "max_position_embeddings"),
    "NemotronH": ("num_hidden_layers",),
    OMNI: ("num_hidden_layers",),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM", OMNI: "NemotronH_Omni_Reasoning_V3"} | {
    family: f"{family}ForConditionalGeneration" for family in ("Gemma3", "Mistral3", "Qwen2_5_VL", "Qwen3VL")
}
# Their norms multiply by 1 + weight.
ZERO_CENTERED = ("Gemma", "Gemma2", "Gemma3Text", "Gemma3")
# Prefixes of names in memory and in files, where they differ.
IN_MEMORY = {
    "nemotron_h": ("model.", "backbone."),
    "gemma3": ("model.language_model.", "language_model.model."),
    "mistral3": ("model.language_model.", "language_model.model."),
    "qwen2_5_vl": ("model.language_model.", "model."),
    "nemotron_h_omni": ("language_model.model.", "language_model.backbone."),
}
MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 5, "head_dim": 8}

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
    "llama-yarn-spelled-out": (
        "Llama",
        {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3}},
    ),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 6, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3-moe-norm": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "norm_topk_prob": True,
            "num_experts_per_tok": 3,
        },
    ),
    # A padding token would get no gradient from transformers.
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None, "eos_token_id": 2}),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 12,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "rope_parameters": MSCALE,
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None}),
    "deepseek-v3": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 12, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "rope_parameters": MSCALE},
    ),
    "deepseek-v3-plain": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "qwen2-moe-sparse": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
        },
    ),
    "glm4": ("Glm4", {"pad_token_id": None, "head_dim": 8}),
    "glm4-whole": (
        "Glm4",
        {
            "pad_token_id": None,
            "head_dim": 16,
            "partial_rotary_factor": 1.0,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "seed-oss": ("SeedOss", {"pad_token_id": None, "head_dim": 16}),
    "seed-oss-biases": (
        "SeedOss",
        {
            "pad_token_id": None,
            "head_dim": 8,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **GLM,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "glm4-moe-plain": (
        "Glm4Moe",
        {
            **GLM,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": None}),
    "olmo2-biases": (
        "Olmo2",
        {
            "pad_token_id": None,
            "attention_bias": True,
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "olmo3": ("Olmo3", {"pad_token_id": None, "num_hidden_layers": 4, "sliding_window": 5}),
    "olmo3-yarn": (
        "Olmo3",
        {
            "pad_token_id": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    "ministral": (
        "Ministral",
        {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ministral-windows": ("Ministral", {"head_dim": 8, "sliding_window": 6, "tie_word_embeddings": True}),
    # Rows of 24 tokens reach into the third of contexts of 10.
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "ministral3-window": (
        "Ministral3",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "sliding_window": 5,
            "rope_parameters": GROWING | {"llama_4_scaling_beta": 1.3},
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.11,
            "logits_scaling": 3.0,
        },
    ),
    "granite-biases": (
        "Granite",
        {"embedding_multiplier": 0.7, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3", {"pad_token_id": None, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {
            "pad_token_id": None,
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3,
        },
    ),
    "cohere2": (
        "Cohere2",
        {"pad_token_id": None, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "cohere2-biases": (
        "Cohere2",
        {
            "pad_token_id": None,
            "sliding_window": 64,
            "attention_bias": True,
            "logit_scale": 0.3,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-sees": ("Gemma3", {**GEMMA3_SEES, "text_config": GEMMA | {"num_hidden_layers": 7}}),
    "gemma3-sees-scaled": (
        "Gemma3",
        {
            **GEMMA3_SEES,
            "text_config": GEMMA
            | {
                "query_pre_attn_scalar": 7,
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            },
        },
    ),
    "ministral3-sees": (
        "Mistral3",
        {
            "image_token_index": 200,
            "vision_config": PIXTRAL,
            "text_config": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": GROWING},
        },
    ),
    "mistral-sees": (
        "Mistral3",
        {
            "image_token_index": 200,
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
            "text_config": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        },
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", {**QWEN25_VL, "text_config": {"rope_parameters": MROPE}}),
    "qwen2.5-vl-tied": (
        "Qwen2_5_VL",
        {
            **QWEN25_VL,
            "tie_word_embeddings": True,
            "text_config": {
                "use_sliding_window": True,
                "sliding_window": 5,
                "max_window_layers": 1,
                "rope_parameters": MROPE,
            },
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {**QWEN3_VL, "text_config": {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}}},
    ),
    "qwen3-vl-tied": (
        "Qwen3VL",
        {
            **QWEN3_VL,
            "tie_word_embeddings": True,
            "text_config": {
                "head_dim": 16,
                "attention_bias": True,
                "rope_parameters": MROPE | {"mrope_section": [4, 2, 2]},
            },
        },
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2-window": (
        "Starcoder2",
        {"use_bias": False, "sliding_window": 5, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
    "nemotron-h-omni": (
        OMNI,
        {
            "vision_config": RADIO,
            "vision_hidden_size": 16,
            "projector_hidden_size": 20,
            "image_token_id": 200,
            "text_config": {
                **MAMBA,
                "model_type": "nemotron_h",
                "hybrid_override_pattern": "M-*E",
                "chunk_size": 7,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "moe_shared_expert_intermediate_size": 20,
                "pad_token_id": None,
            },
        },
    ),
    # Rows of 24 tokens are not a multiple of chunks of 7.
    "nemotron-h": (
        "NemotronH",
        {
            **MAMBA,
            "hybrid_override_pattern": "M-*M-",
            "chunk_size": 7,
            "use_bias": True,
            "mlp_bias": True,
            "time_step_min": 0.4,
        },
    ),
    "nemotron-h-moe": (
        "NemotronH",
        {
            **MAMBA,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "chunk_size": 8,
            "use_conv_bias": False,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "routed_scaling_factor": 2.5,
        },
    ),
    "phi3": ("Phi3", PHI),
    "phi3-partial": (
        "Phi3",
        PHI
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
            "sliding_window": 7,
        },
    ),
    "phi3-longrope": ("Phi3", PHI | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    # As Phi-4-mini has it.
    "phi3-longrope-partial": (
        "Phi3",
        PHI
        | {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]},
        },
    ),
    # Embeddings are scaled by the root of the width, here a whole number, which is the same in every precision.
    "gemma": ("Gemma", {"pad_token_id": None, "head_dim": 16, "hidden_size": 64}),
    "gemma-biases": (
        "Gemma",
        {
            "pad_token_id": None,
            "head_dim": 8,
            "hidden_size": 64,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_act": "gelu",
        },
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}),
    "gemma2-uncapped": (
        "Gemma2",
        GEMMA
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 7,
            "attention_bias": True,
        },
    ),
    "gemma3": ("Gemma3Text", GEMMA | {"num_hidden_layers": 7}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 5,
            "swiglu_limit": 0.5,
            "pad_token_id": None,
        },
    ),
    "gpt-neox": ("GPTNeoX", NEOX),
    "gpt-neox-in-turn": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "gelu_fast"},
    ),
    "gpt2": ("GPT2", {}),
    "gpt2-wide": (
        "GPT2",
        {
            "n_inner": 40,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "falcon": ("Falcon", {}),
    "falcon-groups": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-in-turn": ("Falcon", {"parallel_attn": False, "multi_query": False}),
    "falcon-alibi": ("Falcon", {"alibi": True, "bias": True, "hidden_size": 48, "num_attention_heads": 12}),
    "bloom": ("Bloom", {}),
    "bloom-twelve-heads": ("Bloom", {"hidden_size": 48, "num_attention_heads": 12}),
}
# Biases that choose experts, by far enough to change the choice.
BIASES = ".e_score_correction_bias"


def build_reference(name: str) -> transformers.PreTrainedModel:
    """transformers' model of the case, with random weights everywhere (norms and biases too)."""
    return reference_of(*CASES[name])


def config_of(family: str, changes: Mapping[str, object]) -> transformers.PreTrainedConfig:
    """transformers' configuration of `family` with `changes` of the sizes."""
    sizes = {key: value for key, value in SIZES.items() if key not in WITHOUT.get(family, ())}
    if "text_config" in changes:
        changes = changes | {"text_config": sizes | changes["text_config"]}
        sizes = {}
    return getattr(transformers, f"{family}Config")(**sizes | changes)


def reference_of(family: str, changes: Mapping[str, object]) -> transformers.PreTrainedModel:
    """transformers' model of `family` with `changes` of the sizes, with random weights everywhere."""
    config = config_of(family, changes)
    # Experts are computed by matmuls that PyTorch's counter knows.
    config._experts_implementation = "eager"
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            is_factor = key.endswith("weight") and ("norm" in key or "ln_" in key) and family not in ZERO_CENTERED
            parameter.copy_(1 + noise if is_factor else noise)
        for key, buffer in model.named_buffers():
            if key.endswith(BIASES):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model.eval()


def build_pair(name: str) -> tuple[transformers.PreTrainedModel, Decoder]:
    """The case in transformers and in kumi, with equal weights."""
    reference = build_reference(name)
    return reference, decoder_of(reference)


@contextmanager
def in_float64() -> Iterator[None]:
    """Models made and called within compute in float64, also where their code asks for float32: rounding cannot hide a
    difference between them, or be taken for one."""
    usual, wide = torch.get_default_dtype(), torch.float64
    torch.set_default_dtype(wide)
    names = mock.patch.multiple(torch, float32=wide, float=wide)
    with names, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def decoder_of(reference: transformers.PreTrainedModel) -> Decoder:
    """kumi's model of the config of `reference`, with its weights."""
    decoder = Decoder(families.from_hf(reference.config.to_dict()), dtype=reference.dtype)
    biases = {key: buffer for key, buffer in reference.named_buffers() if key.endswith(BIASES)}
    decoder.load_state_dict(native(decoder.spec, dict(reference.named_parameters()) | biases))
    return decoder


def native(spec: ModelSpec, theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return transformers' tensors in memory, weights or their gradients, under kumi's names and in kumi's shapes."""
    tensors, (memory, files) = {}, IN_MEMORY.get(spec.family, ("", ""))
    theirs = {files + key.removeprefix(memory) if key.startswith(memory) else key: x for key, x in theirs.items()}
    for param in ledger.tensors(spec):
        pieces = stored_parts(spec, param, stacked=True)
        if not all(piece.name in theirs for piece in pieces):  # only files have it under another name
            tensors[param.name] = theirs[param.name].detach()
            continue
        tensors[param.name] = torch.full(param.shape, torch.nan, dtype=theirs[pieces[0].name].dtype)
        for piece in pieces:
            source = theirs[piece.name].detach()
            assert source.shape == piece.shape, piece
            values = source.reshape(piece.view)[_box(piece.at, piece.size)].permute(piece.order)
            tensors[param.name][_box(piece.start, piece.extent)] = values.reshape(piece.extent)
    return tensors


def _box(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
