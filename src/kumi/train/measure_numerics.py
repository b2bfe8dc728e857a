"""Measure once on a machine how its CPU computes fastest, before there are ranks, in a process that ends afterwards.

What was measured is in `kumi.config.numerics`' cache from then on, and in the run's configuration.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, cast

from kumi.config import ResolvedRun
from kumi.config.local_machine import cpu_dtypes
from kumi.config.numerics import Measured, keep, of_cluster, this_processor
from kumi.config.resolve import with_numerics_key
from kumi.spec.numerics import REFERENCE, Numerics, parse

# A measurement takes a second. One that hangs is given up.
_PATIENCE_SECONDS = 30.0


def with_measured(run: ResolvedRun) -> ResolvedRun:
    """Return `run` with the way its CPU computes decided: measured where that has not been done on this machine."""
    if run.numerics is not None:
        return run
    return with_numerics(run, measure_here(run.cluster.devices_per_node).numerics)


def with_numerics(run: ResolvedRun, numerics: Numerics) -> ResolvedRun:
    """Return `run` on CPUs that compute as `numerics` says."""
    if run.numerics == numerics:
        return run
    return with_numerics_key(run, str(of_cluster(numerics, run.config.cluster)))


def measure_here(ranks: int) -> Measured:
    """Measure how one of `ranks` processes computes fastest on this machine, and keep that in the cache.

    Return the reference where the measuring process dies or hangs.
    """
    processor, kind = this_processor(ranks), "bf16" if "bfloat16" in cpu_dtypes() else "fp32"
    record = _forked(processor.threads, kind) if _may_fork() else _started(processor.threads, kind)
    if record is None:
        print(
            "numerics   how this CPU computes fastest could not be measured; it computes as the reference", flush=True
        )
        return Measured(REFERENCE, {})
    measured = Measured(parse(record["numerics"]), record["seconds"], record["took"])
    if measured.complete:
        print(f"numerics   measured in {measured.took:.1f} s, once on this machine", flush=True)
        keep(processor, measured)
    else:
        print("numerics   the machine is busy, or slow: what was not measured in time is as the reference", flush=True)
    return measured


def _may_fork() -> bool:
    """Whether a copy of this process can compute: not once torch may have started threads here, which it would lack."""
    return sys.platform == "linux" and "torch" not in sys.modules


def _forked(threads: int, kind: str) -> dict[str, Any] | None:
    """What a copy of this process measures, which need not import torch once more; None where it dies or hangs."""
    import torch  # noqa: F401  (it is needed here anyway, a moment later)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def measure() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        there.send(_measured(threads, kind))

    child = context.Process(target=measure, daemon=True)
    child.start()
    there.close()
    try:
        with here, suppress(EOFError):
            return cast(dict[str, Any], here.recv()) if here.poll(_PATIENCE_SECONDS) else None
        return None
    finally:
        child.kill()
        child.join()


def _started(threads: int, kind: str) -> dict[str, Any] | None:
    """The same of a new process."""
    command = [sys.executable, "-m", "kumi.train.measure_numerics", str(threads), kind]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_PATIENCE_SECONDS, check=True)
        return cast(dict[str, Any], json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _measured(threads: int, kind: str) -> dict[str, Any]:
    """Return what `kumi.nn.fastest_numerics` measures with so many threads, and the seconds that it took, imports
    apart."""
    import torch

    from kumi.nn.fastest_numerics import measure
    from kumi.train.process_memory import keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()  # as in a run
    began = time.perf_counter()
    numerics, seconds = measure(kind)
    return {"numerics": str(numerics), "seconds": seconds, "took": time.perf_counter() - began}


if __name__ == "__main__":
    print(json.dumps(_measured(int(sys.argv[1]), sys.argv[2])))
