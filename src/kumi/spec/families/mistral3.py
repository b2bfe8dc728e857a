"""Ministral 3, and Mistral Small since 3.1: the text, and a vision tower and projector that are carried along."""

from __future__ import annotations

from kumi.spec.families import ministral3, mistral
from kumi.spec.families._shared.vision_language import Seeing

ARCHITECTURE = "Mistral3ForConditionalGeneration"
FAMILY = Seeing(
    "mistral3",
    ARCHITECTURE,
    texts={"mistral": mistral, "ministral3": ministral3},
    kept=(
        "vision_config",
        "image_token_index",
        "image_token_id",
        "projector_hidden_act",
        "vision_feature_layer",
        "multimodal_projector_bias",
        "spatial_merge_size",
    ),
    beginnings=("vision_tower.", "multi_modal_projector."),
    prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
)
from_hf, to_hf = FAMILY.from_hf, FAMILY.to_hf
