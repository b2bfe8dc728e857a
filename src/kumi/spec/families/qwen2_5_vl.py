"""Qwen2.5-VL: Qwen2.5's text model, and a vision tower as passthrough tensors, which are copied unchanged and not
trained (arXiv:2502.13923)."""

from __future__ import annotations

from kumi.spec.families import qwen2
from kumi.spec.families._shared.vision_language import VisionLanguageFamily

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
_FAMILY = VisionLanguageFamily(
    "qwen2_5_vl",
    ARCHITECTURE,
    text_families={"qwen2_5_vl_text": qwen2},
    passthrough_keys=(
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
    ),
    passthrough_prefixes=("visual.",),
    unsupported_text_keys=("head_dim",),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "bos_token_id": 151_643, "eos_token_id": 151_645},
    default_theta=1_000_000.0,
    either_ties=True,
)
from_hf, to_hf = _FAMILY.from_hf, _FAMILY.to_hf
