"""The numerics of a run, its choice of an implementation for each operation on a CPU or a GPU, and their cache.

    precision.numerics = "auto":  from the run folder, else $KUMI_NUMERICS, else this machine's cache, else None
    precision.kernels = "auto":   the same for this machine's GPUs; PyTorch's operations for any other device
    ~/.cache/kumi/numerics/<key>.json   one measurement: of a CPU, with a version of torch and a number of threads;
                                        or of a GPU, with the versions of torch and of packages of kernels

This module does not measure: `kumi.train.measure_numerics` does, at the first start of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kumi.config.job_sections import ClusterSection
from kumi.config.local_machine import cpu_flags, cpu_name, has_gpu, threads_per_rank
from kumi.config.schema import PlanConfig, RunConfig
from kumi.errors import ConfigError, ModelError
from kumi.files.output import open_new
from kumi.files.untrusted import read_object
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job
from kumi.spec.numerics import (
    ASKED,
    MEASURED_PACKAGES,
    REFERENCE,
    Numerics,
    kernels_text,
    parse_kernels,
    parse_numerics,
)

_VARIABLE = "KUMI_NUMERICS"  # of the environment; it replaces the measured numerics of this machine


@dataclass(frozen=True)
class Processor:
    """The conditions for which a measurement is valid.

    `name`: the model of the CPU or GPU.
    `flags`: a digest of the CPU's features; for a GPU, the versions of packages with kernels.
    `torch`: the version of torch.
    `threads`: the threads of a process; 0 for a GPU.
    """

    name: str
    flags: str
    torch: str
    threads: int

    @property
    def file(self) -> str:
        """The name of the file in the cache."""
        key = json.dumps([self.name, self.flags, self.torch, self.threads])
        return f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class MeasuredNumerics:
    """Numerics chosen by measurement.

    `seconds`: operation -> implementation -> measured seconds; 0 for an implementation that took too long.
    `measuring_seconds`: the duration of the measurement without imports; 0 if it was read from the cache.
    """

    numerics: Numerics
    seconds: dict[str, dict[str, float]]
    measuring_seconds: float = field(default=0.0, compare=False)

    @property
    def complete(self) -> bool:
        """True if every implementation was measured in time."""
        return bool(self.seconds) and all(
            timings and all(value > 0 for value in timings.values()) for timings in self.seconds.values()
        )


def this_processor(ranks: int) -> Processor:
    """Return the conditions of a process that is one of `ranks` on this machine."""
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16]
    return Processor(cpu_name(), flags, _version("torch"), threads_per_rank(ranks, os.environ))


def choose_numerics(config: PlanConfig, cluster: ClusterSpec) -> Numerics | None:
    """Return the numerics of the CPUs or GPUs of `cluster`, or None if they have not been measured yet.

    A measured precision is valid for this machine only, not for a cluster that a file describes. Raise ConfigError if
    KUMI_NUMERICS has a value that precision.numerics could not have.
    """
    if cluster.device.kind != "cpu":
        return _choose_kernels(config, cluster)
    if config.precision.numerics != "auto":
        return parse_numerics(config.precision.numerics)
    numerics = numerics_here(cluster.devices_per_node)
    return None if numerics is None else numerics_for_cluster(numerics, config.cluster)


def _choose_kernels(config: PlanConfig, cluster: ClusterSpec) -> Numerics | None:
    """Return the kernels of the GPUs of `cluster`; None if this machine has such GPUs, which have to be measured."""
    if config.precision.kernels != "auto":
        return Numerics(kernels=parse_kernels(config.precision.kernels))
    numerics = numerics_from_environment()
    if numerics is not None:
        return Numerics(kernels=numerics.kernels)
    # No kernel is taken on trust: devices that were not measured and are not here use PyTorch's operations.
    if not cluster.device.is_gpu:
        return REFERENCE
    name = cluster.device.name
    measured = chosen_of(read_cached_numerics(this_gpu(name)), asked_settings(config))
    if measured is not None or config.cluster.source == "auto" or has_gpu(name):
        return measured
    return REFERENCE


def asked_settings(config: PlanConfig) -> tuple[str, ...]:
    """Return which settings of `ASKED` (compile, float8, async_tp) `config` has. They are used only where they pay."""
    compiles = config.train is not None and config.train.compile
    asked = {"compile": compiles, "float8": config.precision.kind == "fp8", "async_tp": config.comm.async_tp}
    return tuple(name for name in ASKED if asked[name])


def compiles_layers(config: PlanConfig, numerics: Numerics | None) -> bool:
    """Return True if layers are compiled: if `config` asks for it, and `numerics` do not say that it does not pay."""
    return config.train is not None and config.train.compile and pays("compile", numerics)


def pays(setting: str, numerics: Numerics | None) -> bool:
    """Return False if a measurement left out `setting`, a key of `ASKED`; `numerics` is None before measurements."""
    return numerics is None or numerics.chosen(setting) != "off"


def chosen_of(measured: MeasuredNumerics | None, asked: Sequence[str]) -> Numerics | None:
    """Return what `measured` chose for a run with the settings `asked`; None if one of them is still to be compared."""
    if measured is None or any(name not in measured.seconds for name in asked):
        return None
    pairs = measured.numerics.kernels
    return Numerics(kernels=tuple(pair for pair in pairs if pair[0] not in ASKED or pair[0] in asked))


def this_gpu(name: str) -> Processor:
    """Return the conditions of a process with a GPU called `name` of this machine."""
    versions = [f"{package}={_version(package)}" for package in sorted({*MEASURED_PACKAGES})]
    return Processor(name, " ".join(versions), _version("torch"), 0)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def numerics_here(ranks: int) -> Numerics | None:
    """Return the default numerics of `ranks` processes on this machine: $KUMI_NUMERICS, else measured, else None."""
    numerics, measured = numerics_from_environment(), read_cached_numerics(this_processor(ranks))
    return numerics if numerics is not None or measured is None else measured.numerics


def numerics_for_cluster(numerics: Numerics, section: ClusterSection) -> Numerics:
    """Return `numerics`. If a file describes the cluster, leave out the precision: the dtypes in that file decide."""
    return numerics if section.source == "auto" else replace(numerics, kind="")


def numerics_from_environment() -> Numerics | None:
    """Return the numerics in the variable KUMI_NUMERICS, which replaces a measurement; None if it is not set."""
    text = os.environ.get(_VARIABLE) or "auto"
    try:
        return None if text == "auto" else parse_numerics(text)
    except ValueError as error:
        raise ConfigError(f"{_VARIABLE}: {error}") from None


def pin_numerics(config: RunConfig, job: Job) -> RunConfig:
    """Return `config` with the numerics of `job` pinned, if they are known."""
    return config if job.numerics is None else with_numerics_pinned(config, job.numerics, job.cluster.device.kind)


def with_numerics_pinned(config: RunConfig, numerics: Numerics, device_kind: str) -> RunConfig:
    """Return `config` with `numerics` in the key for devices of `device_kind`."""
    value = {"numerics": str(numerics)} if device_kind == "cpu" else {"kernels": kernels_text(numerics.kernels)}
    return config.model_copy(update={"precision": config.precision.model_copy(update=value)})


def read_cached_numerics(processor: Processor) -> MeasuredNumerics | None:
    """Return the cached measurement for `processor`, or None if the cache has no usable one."""
    try:
        written = read_object(_folder(), processor.file)
        seconds = {
            str(operation): {str(name): float(value) for name, value in timings.items()}
            for operation, timings in written["seconds"].items()
        }
        measured = MeasuredNumerics(parse_numerics(written["numerics"]), seconds)
        return measured if measured.complete else None
    except (ModelError, KeyError, TypeError, ValueError, AttributeError):
        return None  # no file, or a damaged file: the next start measures again


def cache_numerics(processor: Processor, measured: MeasuredNumerics) -> None:
    """Write `measured` to the cache. If that fails, the next start measures again."""
    entry = {
        "cpu" if processor.threads else "gpu": processor.name,
        "torch": processor.torch,
        "threads": processor.threads,
        "numerics": str(measured.numerics),
        "seconds": measured.seconds,
    }
    folder = _folder()
    if not folder.is_absolute():
        return  # the user has no home folder
    part = folder / f"{processor.file}.{os.getpid()}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with open_new(part) as file:
            file.write(json.dumps(entry, indent=1) + "\n")
        os.replace(part, folder / processor.file)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "kumi" / "numerics"
