"""`kumi bench`: start the ranks, let them measure, fit, and write the cluster file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kumi.bench.file import node_toml, refuse_existing, write_new
from kumi.bench.found import Found, read_found
from kumi.bench.machine import main_dtype, node_of, remarks
from kumi.config.cluster import cluster_spec
from kumi.config.cluster_file import NodeFile
from kumi.config.numerics import known_here
from kumi.config.schema import ClusterSection
from kumi.errors import OK, ConfigError
from kumi.launch.local import environment, is_rank
from kumi.spec.cluster import ClusterSpec
from kumi.spec.numerics import REFERENCE, Numerics
from kumi.train.numerics import measure_here

# Ranks on a machine without GPUs unless told: the fewest that communicate.
CPU_RANKS = 2

# Processes that want a core before we do, from which on figures are not the machine's own.
BUSY = 0.5


def bench(*, out: Path | None, ranks: int | None, quick: bool, write_json: Callable[[Any], None] | None = None) -> int:
    """Measure this machine with `ranks` ranks at once and write it to the new file `out`; the exit code.

    Without `out` the file's text is printed after the tables. `write_json` takes all of it as plain data instead.
    Raises RefusedError when `out` exists, before anything is measured, and ConfigError when there are not as many GPUs
    as `ranks`.
    """
    if out is not None:
        refuse_existing(out, "--out")
    machine, load = this_machine(ranks), os.getloadavg()[0]
    if load > BUSY:
        print(
            f"bench: {load:.1f} processes wanted a core of this machine in the last minute; what is measured beside "
            f"other work is too slow",
            file=sys.stderr,
        )
    # OpenMP reads these once, when torch is imported.
    os.environ.update(environment(machine.devices_per_node, os.environ))
    numerics, machine = _chosen(machine)
    code, found = _measure(machine, numerics, quick=quick)
    if found is None:
        return code
    node = node_of(found, machine.device, machine.devices_per_node)
    text = node_toml(node, remarks(found, machine.device, machine.devices_per_node, load))
    if out is not None:
        write_new(out, text, "--out")
    if write_json is not None:
        write_json({"file": None if out is None else str(out), "toml": text, "found": asdict(found)})
    else:
        _print(found, node, text, out)
    return OK


def this_machine(ranks: int | None) -> ClusterSpec:
    """This machine as `ranks` devices; by default its GPUs, or `CPU_RANKS` shares of its CPU."""
    if is_rank(os.environ):
        raise ConfigError(
            "bench: this process is one rank of a launcher (RANK and WORLD_SIZE are set), and bench starts its own "
            "ranks; run it without torchrun or srun, on one machine"
        )
    found = cluster_spec(ClusterSection(source="auto"))
    if found.device.kind == "cpu":
        return cluster_spec(ClusterSection(source="auto", devices_per_node=ranks or CPU_RANKS))
    if ranks is not None and ranks > found.devices_per_node:
        raise ConfigError(
            f"bench: --ranks {ranks}, and this machine has {found.devices_per_node} GPUs; use at most as many"
        )
    return cluster_spec(ClusterSection(source="auto", devices_per_node=ranks)) if ranks else found


def _chosen(machine: ClusterSpec) -> tuple[Numerics, ClusterSpec]:
    """How a CPU is to compute, measured where it has not been; and the machine, where bfloat16 counts as a fast format
    only if it is the faster one."""
    device, ranks = machine.device, machine.devices_per_node
    if device.kind != "cpu":
        return REFERENCE, machine
    numerics = known_here(ranks) or measure_here(ranks).numerics
    if not numerics.kind:
        return numerics, machine
    fast = ("float32", "bfloat16") if numerics.kind == "bf16" else ("float32",)
    return numerics, replace(machine, device=replace(device, dtypes=fast))


def _measure(machine: ClusterSpec, numerics: Numerics, *, quick: bool) -> tuple[int, Found | None]:
    """The ranks' exit code, and what they found unless they were stopped."""
    from kumi.bench.rank import Wanted, measure_rank
    from kumi.launch import local

    device = machine.device
    dtypes = tuple(dtype for dtype in device.dtypes if dtype in MEASURED)
    wanted = Wanted(device.kind, dtypes, main_dtype(device), quick, numerics)
    with tempfile.TemporaryDirectory(prefix="kumi-bench-") as folder:
        result = Path(folder) / "found.json"
        arguments = (wanted, result)
        code = local.run_ranks(measure_rank, arguments, nproc=machine.devices_per_node, log_dir=Path(folder) / "logs")
        return code, read_found(json.loads(result.read_text())) if code == OK else None


# Dtypes of plain matrix products; float8 and float4 need scales beside their matrices.
MEASURED = ("float32", "bfloat16", "float16")


def _print(found: Found, node: NodeFile, text: str, out: Path | None) -> None:
    from kumi.bench.show import render
    from kumi.describe import console

    console().print(render(found, node))
    if out is None:
        print(f"\nA cluster file with these figures (--out FILE.toml writes it):\n\n{text}", end="")
    else:
        print(f'\nwrote {out}; use it with cluster.source="{out}"')
