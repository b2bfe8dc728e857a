"""config.json files as published, and the parameter counts that their model cards or safetensors headers state."""

import json
from pathlib import Path

_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip

PUBLISHED = {
    "Llama-2-7b": (
        {
            "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
        6_738_415_616,
    ),
    "Llama-3.1-8B": (_LLAMA3, 8_030_261_248),
    "Llama-3.2-1B": (
        _LLAMA3 | {
            "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "rope_scaling": {**_LLAMA3["rope_scaling"], "factor": 32.0}, "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "Llama-3.3-70B-Instruct": (
        _LLAMA3 | {
            "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_size": 8192, "intermediate_size": 28672,
            "num_attention_heads": 64, "num_hidden_layers": 80,
        },
        70_553_706_496,
    ),
    "Mistral-7B-v0.1": (_MISTRAL, 7_241_732_096),
    "Mistral-7B-v0.3": (
        _MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768, "attention_dropout": 0.0},
        7_248_023_552,
    ),
    "Qwen2.5-0.5B": (
        _QWEN2 | {
            "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "sliding_window": 32768,
            "tie_word_embeddings": True, "vocab_size": 151936,
        },
        494_032_768,
    ),
    "Qwen2.5-7B": (_QWEN2, 7_615_616_512),
    "Qwen3-0.6B": (
        _QWEN3 | {
            "hidden_size": 1024, "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16,
            "num_hidden_layers": 28, "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Qwen3-8B": (_QWEN3, 8_190_735_360),
}  # fmt: skip

_DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1536,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 3, "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16",
    "transformers_version": "4.39.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "num_local_experts": 128, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
_GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
    "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip

# Of families that are planned for, but not trained.
_GRANITE = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
    "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12800,
    "logits_scaling": 16.0, "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "granite",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.46.0.dev0", "use_cache": True,
    "vocab_size": 49155,
}  # fmt: skip
_QWEN25_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "image_token_id": 151655,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False, "video_token_id": 151656,
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "out_hidden_size": 3584},
    "vision_end_token_id": 151653, "vision_start_token_id": 151652, "vision_token_id": 151654, "vocab_size": 152064,
}  # fmt: skip
_QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
        "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
    "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024},
    "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}  # fmt: skip
_GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14},
}  # fmt: skip
# Of models that see, the text's parameters alone.
FURTHER = {
    "GLM-4.5-Air": (
        {
            "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
            "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
            "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
            "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
            "torch_dtype": "bfloat16", "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False,
            "vocab_size": 151552,
        },
        106_852_245_504,
    ),
    "OLMo-2-7B": (
        {
            "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
            "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": True, "vocab_size": 100352,
        },
        7_298_617_344,
    ),
    "Ministral-8B": (
        _MISTRAL | {
            "head_dim": 128, "intermediate_size": 12288, "num_hidden_layers": 36, "rope_theta": 100000000.0,
            "sliding_window": 32768, "vocab_size": 131072,
        },
        8_019_808_256,
    ),
    "Granite-3.0-8B": (_GRANITE, 8_170_848_256),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
            "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False,
            "use_sliding_window": False, "vocab_size": 128256,
        },
        3_075_098_624,
    ),
    "Command-R7B": (
        {
            "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192,
            "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
            "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
            "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "float16",
            "transformers_version": "4.48.0.dev0", "use_cache": True, "use_embedding_sharing": True,
            "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
            "use_qk_norm": False, "vocab_size": 256000,
        },
        8_028_033_024,
    ),
    "starcoder2-7b": (
        {
            "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
            "attention_softmax_in_fp32": True, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608, "initializer_range": 0.018042,
            "intermediate_size": 18432, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384,
            "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
            "num_attention_heads": 36, "num_hidden_layers": 32, "num_key_value_heads": 4, "residual_dropout": 0.1,
            "rope_theta": 1000000, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
            "sliding_window": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.37.0.dev0",
            "use_bias": True, "use_cache": True, "vocab_size": 49152,
        },
        7_173_923_840,
    ),
    "Qwen2.5-VL-7B": (_QWEN25_VL, 7_615_616_512),
    "Qwen3-VL-4B": (_QWEN3_VL, 4_022_468_096),
    "gemma-3-4b": (_GEMMA3_4B, 3_880_263_168),
    "Llama-3-8B": ({**_LLAMA3, "max_position_embeddings": 8192, "rope_scaling": None}, 8_030_261_248),
    "Llama-3.2-3B": (
        _LLAMA3 | {
            "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
            "num_hidden_layers": 28, "rope_scaling": {**_LLAMA3["rope_scaling"], "factor": 32.0},
            "tie_word_embeddings": True,
        },
        3_212_749_824,
    ),
}  # fmt: skip

PLANNED = {
    "DeepSeek-V2": (_DEEPSEEK_V2, 235_741_434_880),
    "DeepSeek-V2-Lite": (
        _DEEPSEEK_V2 | {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
            "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
        },
        15_706_484_224,
    ),
    "gpt-oss-120b": (_GPT_OSS, 116_829_156_672),
    "gpt-oss-20b": (_GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20_914_757_184),
    "OLMoE-1B-7B": (
        {
            "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
            "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "output_router_logits": False, "pad_token_id": 1, "rope_scaling": None, "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
        },
        6_919_161_856,
    ),
    "gpt2": (_GPT2, 124_439_808),
    "gpt2-xl": (_GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200),
    "GPT-NeoX-20B": (
        {
            "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 0,
            "eos_token_id": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144,
            "initializer_range": 0.02, "intermediate_size": 24576, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 64,
            "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.19.0.dev0", "use_cache": True, "vocab_size": 50432,
        },
        20_554_567_680,
    ),
    "bloom-560m": (
        {
            "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
            "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 1024,
            "n_head": 16, "n_inner": None, "n_layer": 24, "offset_alibi": 100, "pad_token_id": 3,
            "pretraining_tp": 1, "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False,
            "unk_token_id": 0, "use_cache": False, "vocab_size": 250880,
        },
        559_214_592,
    ),
    "falcon-7b": (
        {
            "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
            "attention_dropout": 0.0, "auto_map": {}, "bias": False, "bos_token_id": 11, "eos_token_id": 11,
            "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
            "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
            "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
        },
        6_921_720_704,
    ),
    "phi-4": (
        {
            "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {}, "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265,
            "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17920,
            "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
            "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
            "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.47.0", "use_cache": True, "vocab_size": 100352,
        },
        14_659_507_200,
    ),
    "gemma-2-2b": (_GEMMA2, 2_614_341_888),
    "gemma-2-9b": (
        _GEMMA2 | {
            "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42,
            "num_key_value_heads": 8, "sliding_window_size": 4096,
        },
        9_241_705_984,
    ),
    "gemma-3-1b": (
        {
            "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
            "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
            "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True,
            "vocab_size": 262144,
        },
        999_885_952,
    ),
}  # fmt: skip

# The folders of examples/models: parameters in all and, where experts make it fewer, those that a token meets.
EXAMPLES = {
    "bloom-176b": (176_247_271_424, None),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "gpt-3-175b": (174_615_846_912, None),
    "llama-2-13b": (13_015_864_320, None),
    "llama-2-70b": (68_976_648_192, None),
    "llama-2-7b": (6_738_415_616, None),
    "llama-3-70b": (70_553_706_496, None),
    "llama-3-8b": (8_030_261_248, None),
    "llama-3.1-405b": (405_853_388_800, None),
    "llama-3.1-8b": (8_030_261_248, None),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "nemotron-3-nano-30b-a3b": (31_577_937_344, 3_580_073_408),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-8b": (8_190_735_360, None),
}

# Of checkpoints whose config.json lies in tests/published_configs: parameters, as counted in their files.
COUNTS = {
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512, "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624, "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "allenai/Olmo-3-32B-Think": 32_233_522_176, "allenai/Olmo-3-7B-Instruct": 7_298_011_136,
    "google/gemma-2b-it": 2_506_172_416, "google/gemma-7b": 8_537_680_896,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760, "zai-org/GLM-4-9B-0414": 9_400_279_040,
}  # fmt: skip
_FOLDER = Path(__file__).parents[1] / "published_configs"
COUNTED = {
    name: (json.loads((_FOLDER / f"{name.replace('/', '--')}.json").read_text())["config"], count)
    for name, count in COUNTS.items()
}
