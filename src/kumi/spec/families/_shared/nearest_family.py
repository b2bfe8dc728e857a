"""Explain why a model is not supported: how it differs from the nearest family, judged by model_type and other keys.

To name only the nearest family would mislead: read as a config of that family, the file would describe another model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

_ENCODER = "it is an encoder, and kumi trains models that predict the next token"
_ENCODER_DECODER = "it has an encoder in addition to its decoder"
_MULTIMODAL = "it is a multimodal model, and kumi has no family that copies its vision or audio weights"
_RECURRENT = "it has recurrent layers that kumi does not compute"
_CLASSIFIER = "it has a classification head, and kumi trains models that predict the next token or score a sequence"

# Reason -> values of model_type.
_KINDS = {
    _ENCODER: "albert bert camembert deberta deberta-v2 distilbert electra longformer modernbert mpnet nomic_bert "
    "roberta xlm-roberta",
    _ENCODER_DECODER: "bart m2m_100 marian mbart mt5 pegasus speech_to_text t5 t5gemma umt5 whisper",
    _MULTIMODAL: "chameleon clip gemma3n gemma4 glm4v glm4v_moe idefics3 internvl kimi_k25 llama4 llava llava_next "
    "mllama paligemma phi3_v phi4mm pixtral qwen2_audio qwen2_vl qwen2_5_omni qwen3_5 qwen3_omni_moe qwen3_vl_moe "
    "siglip vit",
    _RECURRENT: "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 mamba mamba2 qwen3_next rwkv "
    "xlstm zamba zamba2",
}
# Decoders that resemble a supported family: model_type -> difference.
_DIFFERS = {
    "cohere": "unlike cohere2, all its layers have RoPE and none has a sliding window, and some of its models have "
    "QK norm",
    "chatglm": "its code comes with its weights, and unlike glm4 it has no norms after attention and MLP",
    "deepseek_v32": "unlike deepseek_v3 it has sparse attention",
    "glm": "unlike glm4 it has no norms after attention and MLP",
    "glm4_moe_lite": "unlike glm4_moe it has latent attention (MLA)",
    "gpt_bigcode": "unlike gpt2 it has multi-query attention",
    "gpt_neo": "unlike gpt2 it has sliding windows and unscaled attention scores",
    "gptj": "unlike gpt_neox it has one norm per layer and no biases in attention",
    "granitemoe": "unlike granite it has experts",
    "olmo": "unlike olmo2, its norms have no weights",
    "opt": "unlike gpt2 it has ReLU, and its positions start at 2",
    "phi": "unlike phi3 it has LayerNorm, and attention and MLP in parallel",
    "phimoe": "unlike phi3 it has experts with a router of its own",
    "qwen": "its code comes with its weights, and its tensor names differ from qwen2's",
    "stablelm": "unlike llama it has LayerNorm and partial RoPE",
}
# Endings of the names of classes whose heads kumi does not have.
_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def unsupported_reason(config: Mapping[str, Any], families: Container[str]) -> str:
    """Return the reason why `config` describes a model of none of the `families`, which are named by model_type."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type in _DIFFERS:
        return _DIFFERS[model_type]
    kinds = [kind for kind, names in _KINDS.items() if model_type in names.split()]
    if kinds:
        return kinds[0]
    if isinstance(architectures, list) and any(str(name).endswith(_HEADS) for name in architectures):
        return _CLASSIFIER
    if config.get("is_encoder_decoder") is True:
        return _ENCODER_DECODER
    if model_type in families:
        return f"the architecture of a {model_type} model is another one: correct whichever is wrong"
    if {"vision_config", "audio_config"} & set(config):
        return _MULTIMODAL
    return "kumi has no family of this name"
