"""The decoder on one device: PyTorch modules and functions that know no mesh."""

from kumi.nn.decoder import Decoder, DecoderLayer

__all__ = ["Decoder", "DecoderLayer"]
