"""Checks of software: versions and the configuration are the same on all nodes."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from kumi import __version__
from kumi.doctor.device_workers import first_error
from kumi.doctor.finding import Fleet, Judgement, Reading
from kumi.doctor.fleet_rules import shorten
from kumi.doctor.here import Here

# A worker imports torch before it answers for the first time: on a cold network disk that takes long.
IMPORT_SECONDS = 60.0
# Keys of paths, which may differ between nodes: `shared folder` tests train.out itself.
_PATH_KEYS = ("model.source", "data.sources", "data.cache", "data.validation", "train.out", "train.offload_dir")


def kumi_version(here: Here) -> Reading:
    """Return the version of kumi."""
    return Reading(__version__)


def python_version(here: Here) -> Reading:
    """Return the version of Python, without the patch level."""
    return Reading(".".join(platform.python_version_tuple()[:2]))


def torch_version(here: Here) -> Reading:
    """Return the version of torch, with its build, from the metadata of the package: importing it takes seconds."""
    try:
        return Reading(version("torch"))
    except PackageNotFoundError:
        return Reading(problems=("torch is not installed",))


def configuration(here: Here) -> Reading:
    """Return the hashes of the values of all keys of the run file, with overrides and defaults."""
    if here.run is None:
        return Reading(absent="no run file is given")
    return Reading(dict(here.run.digests), problems=(here.run.problem,) if here.run.problem else ())


def same_configuration(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """Every key has the same value on all nodes; keys of paths may differ, with a warning. Values are not shown."""
    limit = f"the same on all {fleet.noun}s"
    different: dict[str, list[int]] = {}
    for key in sorted({key for reading in readings.values() for key in reading.value}):
        hashes = {node: reading.value.get(key) for node, reading in readings.items()}
        counts = Counter(hashes.values())
        common = max(hashes.values(), key=lambda digest: counts[digest])
        if len(counts) > 1:
            different[key] = [node for node, digest in hashes.items() if digest != common]
    if not different:
        return Judgement("ok", f"{len(next(iter(readings.values())).value)} keys", limit)
    nodes = tuple(sorted({node for differing in different.values() for node in differing}))
    listed = [f"{key} on {shorten([fleet.label(node) for node in differing])}" for key, differing in different.items()]
    only_paths = all(key.startswith(_PATH_KEYS) for key in different)
    return Judgement("warn" if only_paths else "fail", f"another value of {shorten(listed)}", limit, nodes)


def cuda_libraries(here: Here) -> Reading:
    """Return the versions of CUDA and NCCL that torch has loaded, and the kinds of GPUs."""
    replies = here.workers.ask("versions", IMPORT_SECONDS)
    if error := first_error(replies):
        return Reading(problems=(error,))
    if here.devices.kind != "cuda":
        return Reading(absent="the devices are CPUs, which use no NCCL")
    kinds = Counter(reply["name"] for reply in replies.values())
    first = next(iter(replies.values()))
    return Reading(f"NCCL {first['nccl']}, CUDA {first['cuda']}, {', '.join(sorted(kinds))}")
