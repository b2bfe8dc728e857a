"""Moved to `kumi.export`."""

from kumi.deprecated import moved

__getattr__ = moved(__name__, "kumi.export")
