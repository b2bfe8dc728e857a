"""Moved to `kumi.spec.families._shared.decoder_config`."""

from kumi.deprecated import moved

_RENAMED = {
    "dense": "first_dense_mlp",
    "grouped": "first_grouped_attention",
    "model": "build_model",
    "to_hf": "common_to_hf",
    "windowed": "layers_with_windows",
}
__getattr__ = moved(__name__, "kumi.spec.families._shared.decoder_config", _RENAMED)
