"""Measure once per machine which numerics are fastest on its CPU or GPU, before ranks start, in a temporary process.

Numerics say by which kernels a device computes (see `kumi.spec.numerics`). The result is stored in the cache of
`kumi.config.numerics` and in the run's configuration.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from kumi.config import ResolvedRun
from kumi.config.local_machine import cpu_dtypes, exclusive_gpu
from kumi.config.numerics import (
    MeasuredNumerics,
    asked_settings,
    cache_numerics,
    chosen_of,
    numerics_for_cluster,
    read_cached_numerics,
    this_gpu,
    this_processor,
)
from kumi.config.resolve import with_numerics_key
from kumi.launch.standing import without_launcher
from kumi.spec.numerics import ASKED, CHOICES, REFERENCE, Numerics, parse_numerics

# A measurement takes about a second; a process that hangs is killed after this time.
_TIMEOUT_SECONDS = 30.0
# A GPU's kernels take up to 20 seconds, most of them the compiler's, and torch's import some more.
_GPU_TIMEOUT_SECONDS = 90.0
# Settings are compiled, which takes a minute on a slow host.
_SETTING_TIMEOUT_SECONDS = 180.0
# PyTorch's name of a GPU, for a process that imports torch.
_GPU = "cuda"


def with_measured_numerics(run: ResolvedRun) -> ResolvedRun:
    """Return `run` with its numerics decided: measure them unless this machine has a stored measurement."""
    if run.numerics is not None:
        return run
    device = run.cluster.device
    if not device.is_gpu:
        return with_numerics(run, measure_here(run.cluster.devices_per_node).numerics)
    asked = asked_settings(run.config)
    measured = measure_gpu(device.name, asked)
    return with_numerics(run, chosen_of(measured, asked) or measured.numerics)


def with_numerics(run: ResolvedRun, numerics: Numerics) -> ResolvedRun:
    """Return `run` with the given `numerics`."""
    if run.numerics == numerics:
        return run
    return with_numerics_key(run, numerics_for_cluster(numerics, run.config.cluster))


def measure_here(ranks: int) -> MeasuredNumerics:
    """Measure the fastest numerics for one of `ranks` processes on this machine, and store them in the cache.

    Return the reference numerics if the measuring process dies or hangs.
    """
    processor, kind = this_processor(ranks), "bf16" if "bfloat16" in cpu_dtypes() else "fp32"
    record = (
        _measure_in_fork(processor.threads, kind) if _may_fork() else _measure_in_subprocess(processor.threads, kind)
    )
    if record is None:
        print("numerics   the fastest numerics of this CPU could not be measured; using the reference", flush=True)
        return MeasuredNumerics(REFERENCE, {})
    measured = MeasuredNumerics(parse_numerics(record["numerics"]), record["seconds"], record["took"])
    if measured.complete:
        print(f"numerics   measured in {measured.measuring_seconds:.1f} s, once on this machine", flush=True)
        cache_numerics(processor, measured)
    else:
        print("numerics   the machine is busy or slow: numerics not measured in time stay at the reference", flush=True)
    return measured


def measure_gpu(name: str, asked: Sequence[str] = ()) -> MeasuredNumerics:
    """Compare and time the kernels of this machine's GPU, called `name`, and the settings `asked` (keys of `ASKED`).
    Store the choice in the cache, whose earlier measurements are not made again.

    If the process that measures kernels dies or hangs, kernels are PyTorch's operations, and settings stay as the run
    file asks. If the process that measures a setting dies or hangs, that setting is off. In exclusive compute mode
    nothing is measured.
    """
    measured = read_cached_numerics(this_gpu(name)) or MeasuredNumerics(REFERENCE, {})
    missing = [setting for setting in asked if setting not in measured.seconds]
    if measured.seconds and not missing:
        return measured
    if exclusive_gpu():
        print(
            "kernels    not compared, because the GPU is in exclusive compute mode: PyTorch's operations are used, and "
            "settings as the run file asks (`nvidia-smi -c DEFAULT` changes the mode)",
            flush=True,
        )
        return measured
    if not measured.seconds:
        record = _run_measurement([sys.executable, "-m", "kumi.nn.fastest_kernels", _GPU], _GPU_TIMEOUT_SECONDS)
        if record is None:
            print("kernels    this GPU's kernels could not be compared; using PyTorch's operations", flush=True)
            return measured
        measured = _with(measured, record)
    # Each in a process of its own, so that one that crashes does not cost the others.
    for setting in missing:
        command = [sys.executable, "-m", "kumi.train.fastest_settings", _GPU, setting]
        record = _run_measurement(command, _SETTING_TIMEOUT_SECONDS)
        measured = _with(measured, _crashed(setting) if record is None else record)
    cache_numerics(this_gpu(name), measured)
    return measured


def _crashed(setting: str) -> dict[str, Any]:
    """Return the record (see `fastest_settings.compare_setting`) of a setting whose process crashed or hung."""
    note = f"{setting} crashed or hung when it was compared; {ASKED[setting]} is not used"
    return {"numerics": f"kernels={setting}:off", "seconds": {setting: {"off": 1e-9}}, "notes": [note], "took": 0.0}


def _with(measured: MeasuredNumerics, record: dict[str, Any]) -> MeasuredNumerics:
    """Return `measured` with another measurement, `record`, and print its notes."""
    for line in record["notes"]:
        print(f"kernels    {line}", flush=True)
    joined = _joined(measured, parse_numerics(record["numerics"]), record["seconds"])
    return replace(joined, measuring_seconds=measured.measuring_seconds + record["took"])


def _joined(measured: MeasuredNumerics, numerics: Numerics, seconds: dict[str, dict[str, float]]) -> MeasuredNumerics:
    """Return `measured` with the choice `numerics` of another measurement, which wins where both measured."""
    older = (pair for pair in measured.numerics.kernels if pair[0] not in seconds)
    pairs = dict((*older, *numerics.kernels))
    kernels = tuple((name, pairs[name]) for name in CHOICES if name in pairs)
    return MeasuredNumerics(Numerics(kernels=kernels), measured.seconds | seconds)


def store_measurement(name: str, numerics: Numerics, seconds: dict[str, dict[str, float]]) -> None:
    """Add a measurement of this machine's GPU, called `name`, to the cache; see `measure_gpu`.

    Settings alone are not stored: the next start would take the kernels as measured.
    """
    measured = read_cached_numerics(this_gpu(name)) or MeasuredNumerics(REFERENCE, {})
    joined = _joined(measured, numerics, seconds)
    if seconds and not ASKED.keys() >= joined.seconds.keys():
        cache_numerics(this_gpu(name), joined)


def _may_fork() -> bool:
    """Return True if a fork of this process can compute.

    If torch is imported already, it may have started threads, which a fork lacks and would wait for.
    """
    return sys.platform == "linux" and "torch" not in sys.modules


def _measure_in_fork(threads: int, kind: str) -> dict[str, Any] | None:
    """Measure in a fork, which need not import torch again; return None if the fork dies or hangs."""
    import torch  # noqa: F401  (so that the fork has it; this process needs it a moment later, too)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def measure() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        there.send(_measure(threads, kind))

    child = context.Process(target=measure, daemon=True)
    child.start()
    there.close()
    try:
        with here, suppress(EOFError):
            return cast(dict[str, Any], here.recv()) if here.poll(_TIMEOUT_SECONDS) else None
        return None
    finally:
        child.kill()
        child.join()


def _measure_in_subprocess(threads: int, kind: str) -> dict[str, Any] | None:
    """Measure in a new Python process; return None if that process dies or hangs."""
    return _run_measurement([sys.executable, "-m", "kumi.train.measure_numerics", str(threads), kind], _TIMEOUT_SECONDS)


def _run_measurement(command: list[str], timeout: float) -> dict[str, Any] | None:
    """Return the JSON that `command` prints; None if it fails or takes longer than `timeout` seconds."""
    try:
        environ = without_launcher(os.environ)
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=timeout, check=True, env=environ)
        return cast(dict[str, Any], json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _measure(threads: int, kind: str) -> dict[str, Any]:
    """Return the measurement of `kumi.nn.fastest_numerics` with `threads` threads, and the seconds that it took.
    Imports are not counted."""
    import torch

    from kumi.nn.fastest_numerics import measure
    from kumi.train.process_memory import keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()  # ranks do the same
    began = time.perf_counter()
    numerics, seconds = measure(kind)
    return {"numerics": str(numerics), "seconds": seconds, "took": time.perf_counter() - began}


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]), sys.argv[2])))
