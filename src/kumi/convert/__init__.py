"""Convert, load and export weights one tensor at a time: Hugging Face folders, kumi and Megatron checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kumi.convert.convert import convert

if TYPE_CHECKING:
    from kumi.convert.load_weights import load_decoder, weights_reader

__all__ = ["convert", "load_decoder", "weights_reader"]


def __getattr__(name: str) -> Any:
    """Import `kumi.convert.load_weights` on first use: it needs torch, and converting files does not."""
    if name not in __all__:
        raise AttributeError(f"module 'kumi.convert' has no attribute {name!r}")
    from kumi.convert import load_weights

    return getattr(load_weights, name)
