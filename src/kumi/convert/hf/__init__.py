"""Read and write Hugging Face model folders and PEFT adapters."""
