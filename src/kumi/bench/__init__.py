"""Measuring this machine for the planner, and refitting a cluster file from finished runs.

bench(out, ranks, quick, write_json)   kumi bench: kernels and collectives, timed, as a cluster file
recalibrate(folders, cluster, out)      kumi plan --calibrate: the constants of a cluster file from measured steps

Torch is imported by the ranks that measure, not here.
"""

from kumi.bench.refit import recalibrate
from kumi.bench.start import bench

__all__ = ["bench", "recalibrate"]
