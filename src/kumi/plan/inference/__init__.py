"""Memory and time of generation: cache, weights, decode steps, prompts, and replies of different lengths."""
