"""Measure this machine for the planner, or refit a cluster file to finished runs.

bench(out, ranks, quick, write_json)   kumi bench: time kernels and collectives, write a cluster file
recalibrate(folders, cluster, out)      kumi plan --calibrate: refit the constants of a cluster file to measured steps

This package does not import torch; the ranks that measure do.
"""

from kumi.bench.refit import recalibrate
from kumi.bench.run_bench import bench

__all__ = ["bench", "recalibrate"]
