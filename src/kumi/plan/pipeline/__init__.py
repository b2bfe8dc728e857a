"""The stages of a pipeline and the time of its schedule."""
