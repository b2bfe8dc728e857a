"""Checks of what the system allows a process: shared memory, open files, locked memory, threads."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from kumi.doctor.finding import Reading
from kumi.doctor.here import Here

SHARED_MEMORY = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
# Shared memory per rank of a node: NCCL's buffers between processes of a machine, or the semaphores of gloo's ranks.
_SHM_PER_RANK = {"cuda": 64 * 2**20, "cpu": 2**20}
# Open files of a process: its own, and a few connections to each rank that it communicates with, at most
# _MOST_PARTNERS ranks.
_OWN_FILES, _FILES_PER_RANK, _MOST_PARTNERS = 512, 4, 1024
# Memory that drivers of InfiniBand lock for a rank's messages.
_LOCKED_PER_RANK = 2**30
# Threads of a user: those of other programs, and of each rank for computation, communication, autograd and saving.
_OWN_THREADS, _THREADS_PER_RANK = 256, 128


def shared_memory(here: Here) -> Reading:
    """Return the free bytes of /dev/shm, and those that the ranks of this machine need."""
    devices = here.devices
    if not SHARED_MEMORY.is_dir():
        return Reading(absent=f"this system has no {SHARED_MEMORY}")
    if devices.per_node == 1 and not here.several_nodes:
        return Reading(absent="one rank uses no shared memory")
    return Reading(shutil.disk_usage(SHARED_MEMORY).free, need=_SHM_PER_RANK[devices.kind] * devices.per_node)


def open_files(here: Here) -> Reading:
    """Return the limit of open files of a process (`ulimit -n`), and the number that a rank needs."""
    ranks = min(here.ranks, _MOST_PARTNERS)
    return Reading(_soft_limit(resource.RLIMIT_NOFILE), need=_OWN_FILES + _FILES_PER_RANK * ranks)


def locked_memory(here: Here) -> Reading:
    """Return the limit of locked memory (`ulimit -l`), and the bytes that InfiniBand needs for a rank."""
    if not _INFINIBAND.is_dir() or not os.listdir(_INFINIBAND):
        return Reading(absent="no InfiniBand or RoCE adapter, which alone needs locked memory")
    return Reading(_soft_limit(resource.RLIMIT_MEMLOCK), need=_LOCKED_PER_RANK)


def processes(here: Here) -> Reading:
    """Return the limit of threads of this user (`ulimit -u`), and the number that the ranks of this machine need."""
    return Reading(_soft_limit(resource.RLIMIT_NPROC), need=_OWN_THREADS + _THREADS_PER_RANK * here.devices.per_node)


def show_count(count: float) -> str:
    """Format a limit; a huge one stands for no limit."""
    return "unlimited" if count >= 2**62 else f"{count:,.0f}"


def _soft_limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return 2**62 if soft == resource.RLIM_INFINITY else soft
