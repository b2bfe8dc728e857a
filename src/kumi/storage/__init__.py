"""Checkpoints as sharded safetensors files with atomic commits and checksums; import `kumi.storage.checkpoint`."""
