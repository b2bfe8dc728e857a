"""`kumi bench`: start ranks that measure, fit the measurements, and write the cluster file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kumi.bench.cluster_toml import node_toml, refuse_existing, write_new
from kumi.bench.describe_machine import main_dtype, node_of, remarks
from kumi.bench.measurements import Measurements, read_measurements
from kumi.config.cluster_file import NodeFile
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.config.numerics import numerics_here
from kumi.errors import OK, ConfigError
from kumi.launch.local import is_rank, rank_environment
from kumi.launch.standing import refuse_several_nodes
from kumi.spec.cluster import ClusterSpec
from kumi.spec.numerics import REFERENCE, Numerics
from kumi.train.measure_numerics import measure_here

# Default number of ranks on a machine without GPUs: the smallest number that communicates.
_CPU_RANKS = 2

# A load average above this before the start makes the measurements unreliable.
_BUSY = 0.5


def bench(*, out: Path | None, ranks: int | None, quick: bool, write_json: Callable[[Any], None] | None = None) -> int:
    """Measure this machine with `ranks` ranks at once, and write the new cluster file `out`. Return the exit code.

    Print tables of the measurements and, without `out`, the text of the file. With `write_json`, pass it the
    measurements and the text instead.

    Raise RefusedError before measuring if `out` cannot be a new cluster file, and ConfigError if the machine has fewer
    GPUs than `ranks`.
    """
    if out is not None:
        refuse_existing(out, "--out")
    machine, load = machine_to_measure(ranks), os.getloadavg()[0]
    if load > _BUSY:
        print(
            f"bench: the load average of the last minute is {load:.1f}; other processes slow the measurements down, "
            f"stop them and measure again",
            file=sys.stderr,
        )
    # OpenMP reads these variables once, when torch is imported.
    os.environ.update(rank_environment(machine.devices_per_node, os.environ))
    numerics, machine = _choose_numerics(machine)
    code, measured = _measure(machine, numerics, quick=quick)
    if measured is None:
        return code
    node = node_of(measured, machine.device, machine.devices_per_node)
    text = node_toml(node, remarks(measured, machine.device, machine.devices_per_node, load))
    if out is not None:
        write_new(out, text, "--out")
    if write_json is not None:
        write_json({"file": None if out is None else str(out), "toml": text, "found": asdict(measured)})
    else:
        _print(measured, node, text, out)
    return OK


def machine_to_measure(ranks: int | None) -> ClusterSpec:
    """Return this machine as `ranks` devices; by default its GPUs, or its CPU in `_CPU_RANKS` parts.

    Raise ConfigError if a launcher has started this on several nodes or as one of its ranks, or for more `ranks` than
    GPUs.
    """
    refuse_several_nodes("bench", os.environ)
    if is_rank(os.environ):
        raise ConfigError(
            "bench: this process is one rank of a launcher (RANK and WORLD_SIZE are set), but bench starts its own "
            "ranks; run it without torchrun or srun, on one machine"
        )
    machine = cluster_spec(ClusterSection(source="auto"))
    if machine.device.kind == "cpu":
        return cluster_spec(ClusterSection(source="auto", devices_per_node=ranks or _CPU_RANKS))
    if ranks is not None and ranks > machine.devices_per_node:
        raise ConfigError(
            f"bench: --ranks {ranks}, but this machine has {machine.devices_per_node} GPUs; use at most "
            f"{machine.devices_per_node}"
        )
    return cluster_spec(ClusterSection(source="auto", devices_per_node=ranks)) if ranks else machine


def _choose_numerics(machine: ClusterSpec) -> tuple[Numerics, ClusterSpec]:
    """Return how a CPU computes, measured if needed, and the machine.

    The dtypes of the machine include bfloat16 only if it was measured to be faster than float32.
    """
    device, ranks = machine.device, machine.devices_per_node
    if device.kind != "cpu":
        return REFERENCE, machine
    numerics = numerics_here(ranks) or measure_here(ranks).numerics
    if not numerics.kind:
        return numerics, machine
    fast = ("float32", "bfloat16") if numerics.kind == "bf16" else ("float32",)
    return numerics, replace(machine, device=replace(device, dtypes=fast))


def _measure(machine: ClusterSpec, numerics: Numerics, *, quick: bool) -> tuple[int, Measurements | None]:
    """Return the exit code of the ranks and their measurements; None if they did not finish."""
    from kumi.bench.measuring_rank import BenchRequest, measure_rank
    from kumi.launch import local

    device = machine.device
    dtypes = tuple(dtype for dtype in device.dtypes if dtype in _DTYPES)
    request = BenchRequest(device.kind, dtypes, main_dtype(device), quick, numerics)
    with tempfile.TemporaryDirectory(prefix="kumi-bench-") as folder:
        result = Path(folder) / "measurements.json"
        arguments = (request, result)
        code = local.run_ranks(measure_rank, arguments, nproc=machine.devices_per_node, log_dir=Path(folder) / "logs")
        return code, read_measurements(json.loads(result.read_text())) if code == OK else None


# Dtypes of plain matrix products; float8 and float4 need scales as well.
_DTYPES = ("float32", "bfloat16", "float16")


def _print(measured: Measurements, node: NodeFile, text: str, out: Path | None) -> None:
    """Print the tables, and the text of the cluster file or where it was written."""
    from kumi.bench.bench_tables import render_measurements
    from kumi.report.run_description import make_console

    make_console().print(render_measurements(measured, node))
    if out is None:
        print(f"\nA cluster file with these figures (--out FILE.toml writes it):\n\n{text}", end="")
    else:
        print(f'\nwrote {out}; use it with cluster.source="{out}"')
