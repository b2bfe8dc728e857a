"""Reward models in config.json: the sequence classifiers of transformers, with one label.

A sequence classifier is a decoder with `score.weight` (labels, D), without bias, in place of `lm_head`. Its result for
a sequence is the score of the last token that is not padding. transformers has classifiers for some families only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import brief

# Family -> its class in transformers, from MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES of version 5.23.
CLASSIFIERS = {
    "bloom": "BloomForSequenceClassification",
    "deepseek_v2": "DeepseekV2ForSequenceClassification",
    "deepseek_v3": "DeepseekV3ForSequenceClassification",
    "falcon": "FalconForSequenceClassification",
    "gemma": "GemmaForSequenceClassification",
    "gemma2": "Gemma2ForSequenceClassification",
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "glm4": "Glm4ForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "gpt_neox": "GPTNeoXForSequenceClassification",
    "gpt_oss": "GptOssForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "ministral": "MinistralForSequenceClassification",
    "ministral3": "Ministral3ForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "mixtral": "MixtralForSequenceClassification",
    "olmo2": "Olmo2ForSequenceClassification",
    "olmo3": "Olmo3ForSequenceClassification",
    "phi3": "Phi3ForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen2_moe": "Qwen2MoeForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "qwen3_moe": "Qwen3MoeForSequenceClassification",
    "seed_oss": "SeedOssForSequenceClassification",
    "smollm3": "SmolLM3ForSequenceClassification",
    "starcoder2": "Starcoder2ForSequenceClassification",
}
_FAMILIES = {name: family for family, name in CLASSIFIERS.items()}
# The names that transformers gives to a single label.
_LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def classified_family(config: Mapping[str, Any]) -> str | None:
    """Return the family of the sequence classifier that `config` describes; None for another model.

    Raise ModelError unless it has one label.
    """
    architectures: Any = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if not isinstance(name, str) or name not in _FAMILIES:
        return None
    labels = config.get("num_labels", len(config["id2label"]) if isinstance(config.get("id2label"), dict) else 2)
    if labels != 1:
        raise ModelError(
            f"config.json: architectures={brief(architectures)} with {brief(labels)} labels is not supported: of the "
            f"sequence classifiers, kumi trains reward models, which have one label (num_labels 1)"
        )
    return _FAMILIES[name]


def classifier_config(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the config.json `config` of a language model of `family` as that of its classifier with one label.

    Raise ModelError if transformers has no classifier of the family.
    """
    if family not in CLASSIFIERS:
        raise ModelError(
            f"a {family} model cannot become a reward model, because transformers has no sequence classifier of this "
            f"family that could load it; use a model of {', '.join(CLASSIFIERS)}"
        )
    entries = {key: value for key, value in config.items() if key != "num_labels"}
    return {**entries, "architectures": [CLASSIFIERS[family]], **_LABELS}
