"""Whether other processes explain a slow step: how long this process was ready to run and had no CPU.

Linux counts that for every thread, in /proc/self/task/*/schedstat. Elsewhere the load average has to do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# A step is slow from SLOW times the expected seconds on. Waiting for the share EXPLAINS of its time makes it as slow.
SLOW, EXPLAINS = 1.25, 0.2


class CpuWait:
    """Watches how long the threads of this process wait for a CPU."""

    def __init__(self) -> None:
        self._waits, self._since = waited_seconds(), time.perf_counter()
        self._fastest: float | None = None

    def explain(self, step_s: float, estimated: float | None) -> str:
        """Return why a step that took `step_s` seconds was slow, "" unless waiting for a CPU explains it.

        Slow is compared with the `estimated` seconds, else with the fastest step so far. Each call begins a new span.
        """
        waits, now = waited_seconds(), time.perf_counter()
        waited = max((seconds - self._waits.get(thread, 0.0) for thread, seconds in waits.items()), default=None)
        share = None if waited is None else waited / max(now - self._since, 1e-9)
        self._waits, self._since = waits, now
        expected = estimated or self._fastest
        self._fastest = min(step_s, self._fastest or step_s)
        return explanation(step_s, expected, share, os.getloadavg()[0], _cores())


def explanation(step_s: float, expected: float | None, share: float | None, load: float, cores: int) -> str:
    """Return what the line of a step of `step_s` seconds says of the machine, "" where that is not why it was slow.

    `share` is the part of the time that a thread waited for a CPU, None where the system does not say; then the load
    average has to exceed the `cores` by half.
    """
    if expected is None or step_s < SLOW * expected:
        return ""
    busy = load > 1.5 * cores if share is None else share >= EXPLAINS
    return f"machine busy: load {load:.1f}/{cores}" if busy else ""


def waited_seconds() -> dict[str, float]:
    """Return for each thread of this process the seconds that it was ready and had no CPU; none where Linux does not
    count them."""
    waits = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # the thread has just ended, or the kernel does not count
            continue
    return waits


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
