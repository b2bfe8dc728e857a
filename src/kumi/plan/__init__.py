"""Arithmetic on specs: what a run needs, and which layout to take."""
