"""Detect steps that are slow because other processes use the CPU.

The sign is the time in which this process was ready to run but had no CPU. Linux counts this time for every thread, in
/proc/self/task/*/schedstat. Other systems only have the load average.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kumi.process_limits import usable_cores

# A step is slow if it takes at least _SLOW_FACTOR times the expected seconds. The machine is busy if a thread waited
# for a CPU during at least _BUSY_SHARE of the step.
_SLOW_FACTOR, _BUSY_SHARE = 1.25, 0.2


class CpuWait:
    """Measures how long the threads of this process wait for a CPU."""

    def __init__(self) -> None:
        self._waits, self._since = cpu_wait_seconds(), time.perf_counter()
        self._fastest: float | None = None

    def explain(self, step_s: float, estimated: float | None) -> str:
        """Return a note if waiting for a CPU explains a slow step of `step_s` seconds, else "".

        The expected time is `estimated`; if that is None, the time of the fastest step so far. Waiting is counted since
        the previous call.
        """
        waits, now = cpu_wait_seconds(), time.perf_counter()
        waited = max((seconds - self._waits.get(thread, 0.0) for thread, seconds in waits.items()), default=None)
        share = None if waited is None else waited / max(now - self._since, 1e-9)
        self._waits, self._since = waits, now
        expected = estimated or self._fastest
        self._fastest = min(step_s, self._fastest or step_s)
        return busy_note(step_s, expected, share, os.getloadavg()[0], usable_cores())


def busy_note(step_s: float, expected: float | None, share: float | None, load: float, cores: int) -> str:
    """Return the note for a step of `step_s` seconds that is slow because the machine is busy, else "".

    `share`: the fraction of the time for which a thread waited for a CPU, the largest of all threads. If `share` is
    None, because the system does not count it, a `load` average above 1.5 times the `cores` counts as busy.
    """
    if expected is None or step_s < _SLOW_FACTOR * expected:
        return ""
    busy = load > 1.5 * cores if share is None else share >= _BUSY_SHARE
    return f"machine busy: load {load:.1f}/{cores}" if busy else ""


def cpu_wait_seconds() -> dict[str, float]:
    """Return the seconds that each thread of this process was ready but had no CPU; {} if the system does not count
    them."""
    waits = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # the thread has just ended, or the kernel keeps no count
            continue
    return waits
