"""Moved to `kumi.spec.families._shared.config_keys`."""

from kumi.deprecated import moved

__getattr__ = moved(__name__, "kumi.spec.families._shared.config_keys", {"neutral": "require_values"})
