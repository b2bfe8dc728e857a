"""Device memory of a rank: states, activations, buffers."""
