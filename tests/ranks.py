"""A pool of gloo ranks that lives as long as the test session.

Ranks are forked from a server that has imported torch but computed nothing, so forking is safe whatever the test
process did before. The ranks keep their process group between tests, so a multi-rank test takes tenths of a second.

    results = run_ranks(4, work, argument)      # work(argument) on ranks 0..3 of one gloo group; their return values

`work` must be a module-level function. Each world size has its own ranks. World size 1 has no process group. If a rank
raises, dies or hangs, `RankError` has the error of the first rank that failed; the ranks are killed, and the next call
starts new ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Imports of the fork server. A syntax error in kumi is left to the ranks, where it fails one test.
PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.debug",
    "torch.utils.checkpoint",
    "torch.nn.parallel",
    "torch.optim",
    "preloaded",
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
# Every process group that a test makes leaves threads in the ranks, which wake up a hundred times a second. A pool with
# more threads per rank than this is replaced.
THREADS = 60
GRACE = 1.0  # seconds for the other ranks to finish after a rank has failed
# The error of a rank whose peer has ended. The peer's own error may come later: a busy machine first writes its core.
LOST = re.compile("Connection (reset|closed) by peer|Broken pipe")
LOST_GRACE = 30.0


class RankError(AssertionError):
    """A rank failed; the text is the traceback of the first rank that did."""


@dataclass
class Rank:
    """A process of the pool and the pipe to it."""

    process: BaseProcess
    pipe: Connection


class Ranks:
    """The pools of all world sizes. Call it like `run_ranks`."""

    def __init__(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.pools: dict[int, list[Rank]] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="kumi-ranks-")
        self.started = 0

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Return the results of `function(*args)` on each rank of a group of `world_size`.

        Raise RankError if a rank fails, or does not answer within `timeout` seconds.
        """
        pool = self.pools.get(world_size) or self._start(world_size)
        module = sys.modules[function.__module__]
        job = (function.__module__, module.__file__, list(sys.path), pickle.dumps((function, args)))
        try:
            for rank in pool:
                rank.pipe.send(job)
            results = _collect(pool, timeout)
        except BaseException:
            self.stop(world_size)
            raise
        if _threads(pool[0].process) > THREADS:
            self.stop(world_size)
        return results

    def _start(self, world_size: int) -> list[Rank]:
        self.started += 1
        store = Path(self.folder.name) / str(self.started)
        pool = []
        with _found_here():
            forkserver.ensure_running()
        with _plain_main():
            for rank in range(world_size):
                parent_end, rank_end = self.context.Pipe()
                process = self.context.Process(target=serve, args=(rank, world_size, str(store), rank_end), daemon=True)
                process.start()
                rank_end.close()
                pool.append(Rank(process, parent_end))
        self.pools[world_size] = pool
        return pool

    def stop(self, world_size: int | None = None) -> None:
        """Kill the ranks of one world size, or of all."""
        for size in [world_size] if world_size else list(self.pools):
            for rank in self.pools.pop(size, []):
                rank.process.kill()
                rank.process.join()
                rank.pipe.close()


def _threads(process: BaseProcess) -> int:
    """Return the number of threads of `process`; 0 if the system does not tell."""
    tasks = Path(f"/proc/{process.pid}/task")
    return len(os.listdir(tasks)) if tasks.exists() else 0


@contextlib.contextmanager
def _found_here() -> Iterator[None]:
    """Have a server that starts in the block find `preloaded`, too: it does not get `sys.path`, and skips modules that
    it does not find."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [before]), str(Path(__file__).parent)])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def _plain_main() -> Any:
    """Keep new processes from importing the main program (pytest), which they do not need."""
    main = sys.modules["__main__"]
    saved = {name: getattr(main, name, None) for name in ("__file__", "__spec__")}
    main.__dict__.update(dict.fromkeys(saved))
    try:
        yield
    finally:
        main.__dict__.update(saved)


def _collect(pool: list[Rank], timeout: float) -> list[Any]:
    """Return the ranks' results in order.

    Raise RankError with the first failure, preferably of a rank that did not merely lose its connection to another.
    """
    results: dict[int, Any] = {}
    failures: list[tuple[bool, float, str]] = []  # (only lost another rank, time, error)
    deadline = time.monotonic() + timeout
    waiting = set(range(len(pool)))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for index in _answering(pool, waiting, left):
            waiting.discard(index)
            try:
                moment, error, value = pool[index].pipe.recv()
            except (EOFError, ConnectionError):
                moment, error, value = time.time(), f"rank {index} {_death(pool[index].process)}", None
            results[index] = value
            if error:
                failures.append((bool(LOST.search(error)), moment, error))
                deadline = min(deadline, time.monotonic() + (LOST_GRACE if min(failures)[0] else GRACE))
    if failures:
        raise RankError(min(failures)[2])
    if waiting:
        raise RankError(f"ranks {sorted(waiting)} of {len(pool)} gave no answer in {timeout:.0f} s")
    return [results[index] for index in range(len(pool))]


def _answering(pool: list[Rank], waiting: set[int], timeout: float) -> list[int]:
    ready = wait([pool[index].pipe for index in waiting], timeout)
    return [index for index in sorted(waiting) if pool[index].pipe in ready]


def _death(process: BaseProcess) -> str:
    process.join(5 * GRACE)  # a busy machine takes its time to write a core
    code = process.exitcode
    if code is None:
        return "closed its pipe"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    """Join the process group as `rank`, then run the functions that arrive by the pipe until it closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(rank, job))


def _run(rank: int, job: tuple[str, str, list[str], bytes]) -> tuple[float, str | None, Any]:
    import torch

    name, file, path, payload = job
    try:
        sys.path[:] = path
        if name not in sys.modules:
            _load(name, file)
        function, args = pickle.loads(payload)
        torch.manual_seed(0)
        return 0.0, None, function(*args)
    except BaseException:
        return time.time(), f"on rank {rank}:\n{traceback.format_exc()}", None


def _load(name: str, file: str) -> None:
    """Import a test module from its file, under the name that it has in the test process."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


run_ranks = Ranks()
