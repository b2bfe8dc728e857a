"""The decoder on one device. These modules and functions know nothing of process groups."""

from kumi.nn.decoder import Decoder, DecoderLayer

__all__ = ["Decoder", "DecoderLayer"]
