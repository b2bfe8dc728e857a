"""Checkpoints as sharded safetensors files with atomic commits and checksums.

The public interface is `kumi.storage.checkpoint`.
"""
