"""Weights in and out, a tensor at a time: Hugging Face folders and kumi's checkpoints."""

from kumi.convert.convert import convert
from kumi.convert.load import load_decoder, weights_reader

__all__ = ["convert", "load_decoder", "weights_reader"]
