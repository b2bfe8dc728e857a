"""Estimate the memory and step time of layouts, and search for the fastest layout that fits."""
