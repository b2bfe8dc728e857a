"""Moved to `kumi.spec.families._shared.decoder_config`."""

from kumi.deprecated import moved

__getattr__ = moved(__name__, "kumi.spec.families._shared.decoder_config", {"to_hf": "common_to_hf"})
