"""Gemma 3 models that see: Gemma 3's text, and a vision tower and projector that are carried along."""

from __future__ import annotations

from kumi.spec.families import gemma3_text
from kumi.spec.families._shared.vision_language import Seeing

ARCHITECTURE = "Gemma3ForConditionalGeneration"
FAMILY = Seeing(
    "gemma3",
    ARCHITECTURE,
    texts={"gemma3_text": gemma3_text},
    kept=("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    beginnings=("vision_tower.", "multi_modal_projector."),
    prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    # Published configs leave out what is as in the first of the models.
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
)
from_hf, to_hf = FAMILY.from_hf, FAMILY.to_hf
