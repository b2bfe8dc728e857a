"""Fit a cluster's constants to measured steps."""
