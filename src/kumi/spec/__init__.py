"""Descriptions of models, clusters and layouts: frozen data and arithmetic on it, with the standard library only."""
