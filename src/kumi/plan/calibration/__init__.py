"""Calibration of a cluster's constants to measured steps."""
