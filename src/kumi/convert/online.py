"""Moved to `kumi.parallel.export_weights`."""

from kumi.deprecated import moved

__getattr__ = moved(__name__, "kumi.parallel.export_weights")
