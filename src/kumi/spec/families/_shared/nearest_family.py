"""What sets a model of no known family apart from the nearest one, or from all, as far as its name and keys say.

The name of the nearest family alone is no help: under it the config would be read as another model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

ENCODER = "it is an encoder, and kumi trains models that predict the next token"
TRANSLATOR = "it has an encoder beside its decoder"
SENSES = "it sees or hears, and kumi knows no family that carries what it does that with along"
RECURRENT = "its layers keep a state that kumi does not compute"
CLASSIFIER = "its head classifies, and kumi trains models that predict the next token"

# Architectures of well-known models, by the word in model_type.
_KINDS = {
    ENCODER: "albert bert camembert deberta deberta-v2 distilbert electra longformer modernbert mpnet nomic_bert "
    "roberta xlm-roberta",
    TRANSLATOR: "bart m2m_100 marian mbart mt5 pegasus speech_to_text t5 t5gemma umt5 whisper",
    SENSES: "chameleon clip gemma3n gemma4 glm4v glm4v_moe idefics3 internvl kimi_k25 llama4 llava llava_next mllama "
    "paligemma phi3_v phi4mm pixtral qwen2_audio qwen2_vl qwen2_5_omni qwen3_5 qwen3_omni_moe qwen3_vl_moe "
    "siglip vit",
    RECURRENT: "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 mamba mamba2 qwen3_next rwkv "
    "xlstm zamba zamba2",
}
# Decoders that are easily taken for a family that kumi knows, and by what they differ from it.
_DIFFERS = {
    "cohere": "unlike those of cohere2 all its layers rotate and none has a window, and some of its models normalise "
    "queries and keys",
    "chatglm": "its code comes with its files, and unlike glm4 it has no norms after attention and MLP",
    "deepseek_v32": "unlike deepseek_v3 it attends to chosen positions only",
    "glm": "unlike glm4 it has no norms after attention and MLP",
    "glm4_moe_lite": "unlike glm4_moe its attention is latent",
    "gpt_bigcode": "unlike gpt2 all its heads share one key and one value",
    "gpt_neo": "unlike gpt2 it has windows and does not scale scores",
    "gptj": "unlike gpt_neox it has one norm a layer, and no biases in attention",
    "granitemoe": "unlike granite it has experts",
    "olmo": "unlike those of olmo2 its norms have no weights",
    "opt": "unlike gpt2 it has ReLU, and positions that begin at 2",
    "phi": "unlike phi3 it has layer norms, and attention and MLP side by side",
    "phimoe": "unlike phi3 it has experts, chosen in a way of their own",
    "qwen": "its code comes with its files, and its names differ from qwen2's",
    "stablelm": "unlike llama it has layer norms, and turns a part of every head",
}
_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def difference(config: Mapping[str, Any], families: Container[str]) -> str:
    """Return what sets the model of `config` apart from the `families` (by model_type) that kumi knows."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type in _DIFFERS:
        return _DIFFERS[model_type]
    kinds = [kind for kind, names in _KINDS.items() if model_type in names.split()]
    if kinds:
        return kinds[0]
    if isinstance(architectures, list) and any(str(name).endswith(_HEADS) for name in architectures):
        return CLASSIFIER
    if config.get("is_encoder_decoder") is True:
        return TRANSLATOR
    if model_type in families:
        return f"a model of type {model_type} has another architecture: correct the one that is wrong"
    if {"vision_config", "audio_config"} & set(config):
        return SENSES
    return "kumi has no family of that name"
