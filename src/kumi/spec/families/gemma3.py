"""Gemma 3 vision-language models: Gemma 3's text model, and a vision tower and projector as passthrough tensors, which
are copied unchanged and not trained."""

from __future__ import annotations

from kumi.spec.families import gemma3_text
from kumi.spec.families._shared.vision_language import VisionLanguageFamily

ARCHITECTURE = "Gemma3ForConditionalGeneration"
_FAMILY = VisionLanguageFamily(
    "gemma3",
    ARCHITECTURE,
    text_families={"gemma3_text": gemma3_text},
    passthrough_keys=(
        "vision_config",
        "mm_tokens_per_image",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
    ),
    passthrough_prefixes=("vision_tower.", "multi_modal_projector."),
    prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    # Published configs leave out values that equal those of the first model.
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
)
from_hf, to_hf = _FAMILY.from_hf, _FAMILY.to_hf
