"""How a CPU is to compute: as the run file pins it, as the run began, or as was measured on this machine.

    precision.numerics = "auto":  the run folder's, else $KUMI_NUMERICS, else what this machine's cache has, else None
    ~/.cache/kumi/numerics/<key>.json   one measurement: of a CPU, with a version of torch and a number of threads

Nothing here measures: `kumi.train.measure_numerics` does, at the first start of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kumi.config.local_machine import cpu_flags, cpu_name, threads_per_rank
from kumi.config.schema import ClusterSection, PlanConfig, RunConfig
from kumi.errors import ConfigError, ModelError
from kumi.files.output import open_new
from kumi.files.untrusted import read_object
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job
from kumi.spec.numerics import REFERENCE, Numerics, parse

VARIABLE = "KUMI_NUMERICS"


@dataclass(frozen=True)
class Processor:
    """What a measurement holds for: a CPU, by its name and what it can do, torch, and the threads of a process."""

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
class Measured:
    """The choices made by measurement, and the seconds of every way by what was chosen: none of what took too long.

    `took` is what the measurement itself took, in seconds, without imports: 0 where it is from the cache.
    """

    numerics: Numerics
    seconds: dict[str, dict[str, float]]
    took: float = field(default=0.0, compare=False)

    @property
    def complete(self) -> bool:
        """Whether everything was measured in time."""
        return bool(self.seconds) and all(
            ways and all(one > 0 for one in ways.values()) for ways in self.seconds.values()
        )


def this_processor(ranks: int) -> Processor:
    """Return what a process has here that is one of `ranks` on this machine."""
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16]
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return Processor(cpu_name(), flags, torch, threads_per_rank(ranks, os.environ))


def chosen(config: PlanConfig, cluster: ClusterSpec) -> Numerics | None:
    """Return how the CPU of `cluster` is to compute, where that is known; None where it has not been measured.

    The precision that was measured counts for this machine only, not for one that a file describes. Raise ConfigError
    where the variable KUMI_NUMERICS has none of the values that the key precision.numerics may have.
    """
    if cluster.device.kind != "cpu":
        return REFERENCE
    if config.precision.numerics != "auto":
        return parse(config.precision.numerics)
    numerics = known_here(cluster.devices_per_node)
    return None if numerics is None else of_cluster(numerics, config.cluster)


def known_here(ranks: int) -> Numerics | None:
    """Return how each of `ranks` processes is to compute here, where a run does not say: what KUMI_NUMERICS says, else
    what was measured; None where nothing was."""
    numerics, measured = given(), cached(this_processor(ranks))
    return numerics if numerics is not None or measured is None else measured.numerics


def of_cluster(numerics: Numerics, section: ClusterSection) -> Numerics:
    """Return `numerics` without their precision where a file describes the cluster, and so says which one is fast."""
    return numerics if section.source == "auto" else replace(numerics, kind="")


def given() -> Numerics | None:
    """Return what the variable KUMI_NUMERICS says, which stands in for a measurement; None where it is not set."""
    text = os.environ.get(VARIABLE) or "auto"
    try:
        return None if text == "auto" else parse(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from None


def spelled_out(config: RunConfig, job: Job) -> RunConfig:
    """Return `config` with the numerics of `job` spelled out, where it is of a CPU and they are known."""
    if job.numerics is None or job.cluster.device.kind != "cpu":
        return config
    precision = config.precision.model_copy(update={"numerics": str(job.numerics)})
    return config.model_copy(update={"precision": precision})


def cached(processor: Processor) -> Measured | None:
    """Return what was measured on `processor` before; None where nothing was, or the file cannot be used."""
    try:
        written = read_object(_folder(), processor.file)
        seconds = {
            str(what): {str(way): float(one) for way, one in ways.items()} for what, ways in written["seconds"].items()
        }
        measured = Measured(parse(written["numerics"]), seconds)
        return measured if measured.complete else None
    except (ModelError, KeyError, TypeError, ValueError, AttributeError):
        return None  # it is measured again


def keep(processor: Processor, measured: Measured) -> None:
    """Write `measured` to the cache. Where that cannot be written, the next start measures again."""
    text = {
        "cpu": processor.name,
        "torch": processor.torch,
        "threads": processor.threads,
        "numerics": str(measured.numerics),
        "seconds": measured.seconds,
    }
    folder = _folder()
    if not folder.is_absolute():
        return  # a user without a home
    part = folder / f"{processor.file}.{os.getpid()}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with open_new(part) as file:
            file.write(json.dumps(text, indent=1) + "\n")
        os.replace(part, folder / processor.file)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "kumi" / "numerics"
