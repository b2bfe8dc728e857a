"""Log-probs at a temperature: the number by which a sampler divides the logits before it draws tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from kumi.nn.decoder import Decoder


@contextmanager
def at_temperature(model: nn.Module, temperature: float) -> Iterator[None]:
    """A context in which the decoders in `model` return and train log-probs at `temperature`.

    Logits, and the tokens that a generation draws, do not change. The model must have no softcap on its logits.
    """
    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    before = [decoder.temperature for decoder in decoders]
    for decoder in decoders:
        decoder.temperature = temperature
    try:
        yield
    finally:
        for decoder, value in zip(decoders, before, strict=True):
            decoder.temperature = value
