"""`kumi plan --calibrate`: refit the constants of a cluster file to finished runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from kumi.bench.cluster_toml import four_digits, node_toml, refuse_existing, write_new
from kumi.config import job, load_plan, resolve
from kumi.config.cluster_file import DeviceFile, LinkFile, NetworkFile, NodeFile
from kumi.config.model_source import fetch_snapshots, read_hf_config, source_folder
from kumi.config.presets import read_node
from kumi.config.run_plan import read_plan
from kumi.config.schema import ClusterSection
from kumi.config.stored_config import CONFIG_FILE, load_stored_config, read_stored_run
from kumi.errors import OK, ConfigError
from kumi.paths import looked_for
from kumi.plan.calibration.calibrate import Calibration, MeasuredRun, calibrate
from kumi.report.phrases import plural
from kumi.report.run_description import make_console
from kumi.spec.layout import Layout
from kumi.train.metrics import read_metrics
from kumi.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

AnyLink = TypeVar("AnyLink", LinkFile, NetworkFile)

# Steps to skip: they compile kernels, warm caches, and include the preflight checks.
WARM_UP = 5
LEAST_STEPS = 10


def recalibrate(folders: Sequence[Path], cluster: str, out: Path) -> Calibration:
    """Refit the constants of `cluster` (a preset or a TOML file) to the runs in `folders`; write the new file `out`.

    Raise ConfigError for a run that cannot be used, RefusedError if `out` exists.
    """
    refuse_existing(out, "--out")
    if cluster == "auto":
        raise ConfigError(
            "calibrate: cluster.source='auto' is not a cluster file with constants; write one with "
            "kumi bench --out FILE.toml, and set cluster.source to it"
        )
    calibration = calibrate([read_run(folder, cluster) for folder in folders])
    node = refitted(read_node(cluster), calibration)
    write_new(out, node_toml(node, [f"{cluster}, {calibration.source}."]), "--out")
    return calibration


def run(
    folders: Sequence[str],
    plan: str,
    overrides: Sequence[str],
    out: str | None,
    write_json: Callable[[Any], None] | None = None,
) -> int:
    """Refit the cluster of the run file `plan` to the runs in `folders`, and write the new file `out`.

    Print the changes, or pass them to `write_json`. Return the exit code.
    """
    if out is None:
        raise ConfigError("plan: --calibrate writes a cluster file; name it with --out FILE.toml")
    cluster = load_plan(plan, overrides).cluster.source
    calibration = recalibrate([Path(folder) for folder in folders], cluster, Path(out))
    if write_json is not None:
        write_json(asdict(calibration))
    else:
        make_console().print(render_calibration(calibration))
        print(f'wrote {out}; use it with cluster.source="{out}"')
    return OK


def read_run(folder: Path, cluster: str) -> MeasuredRun:
    """Return the measurements of the run in `folder`, with `cluster` as its cluster.

    Raise ConfigError if it is not a run folder, has too few steps, or ran on another kind of machine.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"calibrate: {looked_for(folder)} has no {CONFIG_FILE}, so it is not a run folder; name the "
            f"train.out of a run"
        )
    config = load_stored_config(folder)
    snapshots = fetch_snapshots(config)
    # Folders of earlier versions have no stored plan: assume the one that would be chosen today.
    plan = read_plan(folder) or resolve(config, snapshots, read_stored_run(config)).plan
    steps = _steps(folder, plan.layout)[WARM_UP:]
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"calibrate: {folder} has {len(steps)} measured steps after the first {WARM_UP}, too few for a median; "
            f"train for at least {WARM_UP + LEAST_STEPS} steps"
        )
    section = config.cluster.model_copy(update={"source": cluster, "devices_per_node": plan.made_for.devices_per_node})
    _check_same_machine(folder, plan.made_for.device_kind, section, cluster)
    precision = config.precision.model_copy(update={"kind": plan.made_for.precision})
    config = config.model_copy(update={"cluster": section, "precision": precision})
    hf_config = read_hf_config(config.model, source_folder(config.model.source, snapshots))
    return MeasuredRun(
        config.name,
        job(config, hf_config),
        plan.layout,
        median(entry["perf/step_s"] for entry in steps),
        len(steps),
        max(int(entry["mem/peak_bytes"]) for entry in steps),
    )


def _steps(folder: Path, layout: Layout) -> list[dict[str, Any]]:
    """Return the metrics of the run's steps with `layout`, and of steps that do not record a layout."""
    entries = read_metrics(folder / "metrics.jsonl")
    return [entry for entry in entries if "perf/step_s" in entry and entry.get("layout", layout.words) == layout.words]


def _check_same_machine(folder: Path, kind: str, section: ClusterSection, cluster: str) -> None:
    """Raise ConfigError unless `cluster` describes the kind of machine of the run.

    On a CPU the number of ranks must match too, because ranks share its cores.
    """
    node = read_node(cluster)
    ranks = section.devices_per_node or (1 if kind == "cpu" else node.devices_per_node)
    if node.device.kind != kind:
        raise ConfigError(
            f"calibrate: {folder} ran on a {kind} device, but {cluster} describes a {node.device.kind} device; "
            f"name the cluster file of the machine that it ran on"
        )
    if kind == "cpu" and node.devices_per_node != ranks:
        raise ConfigError(
            f"calibrate: {folder} ran with {plural(ranks, 'rank')}, but {cluster} describes "
            f"{plural(node.devices_per_node, 'rank')} that share the CPU; measure with kumi bench --ranks {ranks}"
        )


def refitted(node: NodeFile, calibration: Calibration) -> NodeFile:
    """Return `node` with the constants that `calibration` changed and their provenance."""
    factors = {name: after / before for name, (before, after) in calibration.moved.items()}
    network = None if node.network is None else _refitted_link(node.network, factors, calibration.source)
    return node.model_copy(
        update={
            "device": _device(node.device, calibration),
            "links": tuple(_refitted_link(link, factors, calibration.source) for link in node.links),
            "network": network,
        }
    )


def _device(file: DeviceFile, calibration: Calibration) -> DeviceFile:
    moved = {
        name.removeprefix("device."): four_digits(after)
        for name, (_, after) in calibration.moved.items()
        if name.startswith("device.")
    }
    shares = {name.removeprefix("matmul."): moved.pop(name) for name in list(moved) if name.startswith("matmul.")}
    update: dict[str, Any] = dict(moved)
    if "reserved" in moved:
        update["reserved"] = round(calibration.moved["device.reserved"][1])
    if shares:
        update["matmul"] = (file.matmul or {}) | shares
    return file.model_copy(update={**update, "sources": _sources(file.sources, list(update), calibration.source)})


def _refitted_link(file: AnyLink, factors: Mapping[str, float], source: str) -> AnyLink:
    names = [name for name in ("bandwidth", "latency") if f"{file.name}: {name}" in factors]
    update: dict[str, Any] = {
        name: four_digits(getattr(file, name) * factors[f"{file.name}: {name}"]) for name in names
    }
    return file.model_copy(update={**update, "sources": _sources(file.sources, names, source)})


def _sources(before: Mapping[str, str], names: Sequence[str], source: str) -> dict[str, str]:
    """Return the provenances `before` with `names` attributed to `source`; a key may list several names."""
    others = {
        ", ".join(remaining): text
        for key, text in before.items()
        if (remaining := [name for name in key.split(", ") if name not in names])
    }
    return others | ({", ".join(names): source} if names else {})


def render_calibration(calibration: Calibration) -> RenderableType:
    """Return tables of the changed constants and of the runs before and after, and why other constants stayed."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    constants = Table("constant", "before", "after", box=None, pad_edge=False)
    for name, (before, after) in calibration.moved.items():
        constants.add_row(name, f"{before:.4g}", f"{after:.4g}")
    steps = Table(
        "run", "steps", "measured", "estimated before", "after", "memory", "estimated", box=None, pad_edge=False
    )
    for run in calibration.runs:
        steps.add_row(
            run.name,
            str(run.steps),
            f"{run.measured * 1e3:.4g} ms",
            f"{run.before * 1e3:.4g} ms ({run.before / run.measured - 1:+.1%})",
            f"{run.after * 1e3:.4g} ms ({run.after / run.measured - 1:+.1%})",
            format_bytes(run.measured_memory),
            format_bytes(run.estimated_memory),
        )
    reasons = dict.fromkeys(calibration.kept.values())
    unchanged = [
        Text(f"unchanged: {', '.join(name for name, why in calibration.kept.items() if why == reason)}: {reason}")
        for reason in reasons
    ]
    return Group(constants, Text(), steps, Text(), *unchanged)
