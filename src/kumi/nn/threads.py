"""Run independent parts of one operator in parallel, one thread each.

PyTorch splits each operator over its threads. An operator of hundreds of small products then waits for its threads
hundreds of times. If the parts of the operator are independent, each thread can compute a complete part instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

_T = TypeVar("_T")


def run_in_threads(parts: Sequence[Callable[[], _T]]) -> list[_T]:
    """Return the results of `parts`, in order. Raise the first exception of a part.

    Gradients are not recorded in several threads; with one thread, the caller's setting counts.
    """
    if len(parts) == 1 or torch.get_num_threads() == 1:
        return [part() for part in parts]
    # The pool is keyed by process: a forked process does not inherit its parent's threads.
    return list(_pool(torch.get_num_threads(), os.getpid()).map(_without_gradients, parts))


def _without_gradients(part: Callable[[], _T]) -> _T:
    with torch.no_grad():  # each thread has its own setting of whether gradients are recorded
        return part()


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return a pool of `threads` threads in which PyTorch does not split operators."""
    started = threading.Barrier(threads)

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # without this call, a thread's first operator would set the process's number
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="kumi-parts", initializer=start)
    list(pool.map(lambda _: None, range(threads)))
    torch.set_num_threads(threads)  # `start` also changed the number for threads that start later
    return pool
