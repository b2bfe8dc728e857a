"""Bytes of device memory that a rank needs: states, activations, buffers."""
