"""Moved to `kumi.spec.weight_rules`."""

from kumi.deprecated import moved

__getattr__ = moved(__name__, "kumi.spec.weight_rules")
