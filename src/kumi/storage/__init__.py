"""Tensors in and out of safetensors files: sharded, atomic, checksummed; `kumi.storage.checkpoint` is its face."""
