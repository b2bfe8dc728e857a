"""Attention on one device: grouped-query and latent attention, and their kernels."""
