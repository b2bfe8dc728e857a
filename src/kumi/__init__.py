"""kumi trains large language models on many GPUs from one description of model and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kumi.convert import load_decoder

__all__ = ["__version__", "load_decoder"]


def __getattr__(name: str) -> Any:
    # torch is imported only when a caller asks for something that needs it.
    if name == "load_decoder":
        from kumi.convert import load_decoder

        return load_decoder
    raise AttributeError(f"module 'kumi' has no attribute {name!r}")
