"""Nemotron 3 Nano Omni: its language model is a Nemotron-H; the vision and audio parts are passthrough tensors,
which are copied unchanged and not trained."""

from __future__ import annotations

from kumi.spec.families import nemotron_h
from kumi.spec.families._shared.vision_language import VisionLanguageFamily

ARCHITECTURE = "NemotronH_Omni_Reasoning_V3"
_FAMILY = VisionLanguageFamily(
    "nemotron_h_omni",
    ARCHITECTURE,
    text_families={"nemotron_h": nemotron_h},
    passthrough_keys=(
        "vision_config",
        "audio_config",
        "force_image_size",
        "downsample_ratio",
        "projector_hidden_size",
        "vision_hidden_size",
        "video_pruning_rate",
        "video_temporal_patch_size",
        "image_token_id",
        "video_token_id",
        "audio_token_id",
    ),
    passthrough_prefixes=("vision_model.", "mlp1.", "sound_encoder.", "sound_projection."),
    prefixes=(
        *((native, f"language_model.{stored}") for native, stored in nemotron_h.WEIGHTS.prefixes),
        ("lm_head.", "language_model.lm_head."),
    ),
)
from_hf, to_hf = _FAMILY.from_hf, _FAMILY.to_hf
