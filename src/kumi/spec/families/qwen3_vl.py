"""Qwen3-VL, the dense models: Qwen3's text, and a vision tower that is carried along."""

from __future__ import annotations

from kumi.spec.families import qwen3
from kumi.spec.families._shared.sliding_windows import WINDOW_KEYS
from kumi.spec.families._shared.vision_language import Seeing

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
FAMILY = Seeing(
    "qwen3_vl",
    ARCHITECTURE,
    texts={"qwen3_vl_text": qwen3},
    kept=("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    beginnings=("model.visual.",),
    prefixes=(("model.", "model.language_model."),),
    defaults={"max_position_embeddings": 128_000},
    theta=500_000.0,
    unsaid=tuple(WINDOW_KEYS),
)
from_hf, to_hf = FAMILY.from_hf, FAMILY.to_hf
