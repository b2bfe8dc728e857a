"""Read and write Megatron-Core's distributed checkpoints."""
