"""Tensors in files: slices, byte ranges, safetensors, streaming copies."""
