"""Ministral 3, and Mistral Small since 3.1: the text model, and a vision tower and projector as passthrough
tensors, which are copied unchanged and not trained."""

from __future__ import annotations

from kumi.spec.families import ministral3, mistral
from kumi.spec.families._shared.vision_language import VisionLanguageFamily

ARCHITECTURE = "Mistral3ForConditionalGeneration"
_FAMILY = VisionLanguageFamily(
    "mistral3",
    ARCHITECTURE,
    text_families={"mistral": mistral, "ministral3": ministral3},
    passthrough_keys=(
        "vision_config",
        "image_token_index",
        "image_token_id",
        "projector_hidden_act",
        "vision_feature_layer",
        "multimodal_projector_bias",
        "spatial_merge_size",
    ),
    passthrough_prefixes=("vision_tower.", "multi_modal_projector."),
    prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
)
from_hf, to_hf = _FAMILY.from_hf, _FAMILY.to_hf
