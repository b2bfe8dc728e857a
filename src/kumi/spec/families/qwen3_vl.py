"""Qwen3-VL, the dense models: Qwen3's text model, and a vision tower as passthrough tensors, which are copied
unchanged and not trained."""

from __future__ import annotations

from kumi.spec.families import qwen3
from kumi.spec.families._shared.sliding_windows import WINDOW_KEYS
from kumi.spec.families._shared.vision_language import VisionLanguageFamily

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
_FAMILY = VisionLanguageFamily(
    "qwen3_vl",
    ARCHITECTURE,
    text_families={"qwen3_vl_text": qwen3},
    passthrough_keys=(
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    ),
    passthrough_prefixes=("model.visual.",),
    prefixes=(("model.", "model.language_model."),),
    defaults={"max_position_embeddings": 128_000},
    default_theta=500_000.0,
    unsupported_text_keys=tuple(WINDOW_KEYS),
)
from_hf, to_hf = _FAMILY.from_hf, _FAMILY.to_hf
