"""`kumi plan --calibrate`: refit the constants of a cluster file to finished runs.

A constant is a figure of the file on which estimates depend, such as a bandwidth or the share of the peak that matmuls
reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kumi.bench.cluster_toml import node_toml, refuse_existing, round_to_four_digits, write_new
from kumi.config import job, load_plan, resolve
from kumi.config.cluster_file import DeviceFile, LinkFile, MeasuredFile, NetworkFile, NodeFile
from kumi.config.job_sections import ClusterSection
from kumi.config.local_machine import this_node
from kumi.config.model_source import fetch_snapshots, read_hf_config, source_folder
from kumi.config.presets import read_node
from kumi.config.run_plan import read_plan
from kumi.config.schema import RunConfig
from kumi.config.stored_config import load_stored_config, read_stored_run
from kumi.errors import OK, ConfigError
from kumi.files.run_names import CONFIG_FILE
from kumi.paths import shown_path
from kumi.plan.calibration.calibrate import MAX_FACTOR, Calibration, MeasuredRun, calibrate
from kumi.report import phrases
from kumi.report.phrases import plural
from kumi.report.run_description import make_console
from kumi.train.measured_steps import WARM_UP, measured_steps
from kumi.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

AnyLink = TypeVar("AnyLink", LinkFile, NetworkFile)

# The fewest measured steps that give a usable median.
MIN_STEPS = 10
# The name of the new cluster file in the first run folder.
DEFAULT_OUT = "calibrated.toml"


def recalibrate(folders: Sequence[Path], cluster: str, out: Path) -> Calibration:
    """Refit the constants of `cluster` (a preset or a TOML file) to the runs in `folders`; write the new file `out`.

    Raise ConfigError for a run that cannot be used and for runs on different devices; see `refuse_existing` for `out`.
    """
    refuse_existing(out, "--out")
    runs = [read_run(folder, cluster) for folder in folders]
    _check_one_device(folders, runs)
    calibration = calibrate(runs)
    node = refit_node(_node(cluster, runs[0].job.cluster.devices_per_node), calibration)
    origin = "this machine" if cluster == "auto" else cluster
    write_new(out, node_toml(node, [f"{origin}, {calibration.source}."]), "--out")
    return calibration


def _node(cluster: str, devices: int) -> NodeFile:
    """Return the node that `cluster` describes; for "auto" this machine with `devices` devices."""
    return this_node(devices) if cluster == "auto" else read_node(cluster)


def run(
    folders: Sequence[str],
    plan: str | None,
    overrides: Sequence[str],
    out: str | None,
    write_json: Callable[[Any], None] | None = None,
) -> int:
    """Refit the cluster of the run file `plan` to the runs in `folders`, and write the new file `out`.

    Without `plan`, refit the cluster of the first run. Without `out`, write `calibrated.toml` into the first run's
    folder. Print the changes, or pass them to `write_json`. Return the exit code.
    """
    first = Path(folders[0])
    cluster = (_stored_config(first) if plan is None else load_plan(plan, overrides)).cluster.source
    out = str(first / DEFAULT_OUT) if out is None else out
    calibration = recalibrate([Path(folder) for folder in folders], cluster, Path(out))
    if write_json is not None:
        write_json(asdict(calibration))
    else:
        make_console().print(render_calibration(calibration))
        print(f'wrote {out}; use it with cluster.source="{out}"')
    return OK


def read_run(folder: Path, cluster: str) -> MeasuredRun:
    """Return the measurements of the run in `folder`, with `cluster` as its cluster.

    Raise ConfigError if `folder` is not a run folder, or if the run has [rollout] or too few steps, or used another
    kind of machine.
    """
    config = _stored_config(folder)
    if config.rollout is not None:
        raise ConfigError(
            f"calibrate: {folder} is a run with [rollout], whose steps have as many rows as their replies need; name a "
            f"run that trains on data"
        )
    snapshots = fetch_snapshots(config)
    # Folders of earlier versions have no stored plan: assume the one that would be chosen today.
    plan = read_plan(folder) or resolve(config, snapshots, read_stored_run(config)).plan
    measured = measured_steps(folder, plan.layout)
    if measured is None or measured.count < MIN_STEPS:
        raise ConfigError(
            f"calibrate: {folder} has {0 if measured is None else measured.count} measured steps after the first "
            f"{WARM_UP}, too few for a median; "
            f"train for at least {WARM_UP + MIN_STEPS} steps"
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
        measured.seconds,
        measured.count,
        measured.peak_memory,
        plan.made_for.device,
    )


def _stored_config(folder: Path) -> RunConfig:
    """Return the configuration of the run in `folder`. Raise ConfigError if `folder` is not a run folder."""
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"calibrate: {shown_path(folder)} has no {CONFIG_FILE}, so it is not a run folder; name the "
            f"train.out of a run"
        )
    return load_stored_config(folder)


def _check_one_device(folders: Sequence[Path], runs: Sequence[MeasuredRun]) -> None:
    """Raise ConfigError unless all `runs`, in `folders`, used the same kind of device."""
    names = dict[str, list[str]]()
    for folder, run in zip(folders, runs, strict=True):
        names.setdefault(run.device, []).append(str(folder))
    if len(names) > 1:
        listed = "; ".join(f"{name}: {', '.join(used)}" for name, used in names.items())
        raise ConfigError(
            f"calibrate: the runs used {len(names)} kinds of devices ({listed}), and a cluster file describes one; "
            f"calibrate a file for each device with its own runs"
        )


def _check_same_machine(folder: Path, kind: str, section: ClusterSection, cluster: str) -> None:
    """Raise ConfigError unless `cluster` describes the kind of machine of the run.

    On a CPU the number of ranks must match too, because ranks share its cores.
    """
    node = _node(cluster, section.devices_per_node or 1)
    ranks = section.devices_per_node or (1 if kind == "cpu" else node.devices_per_node)
    if node.device.kind != kind:
        raise ConfigError(
            f"calibrate: {folder} ran on a {kind} device, but {cluster} describes a {node.device.kind} device; "
            f"name the cluster file of the machine that the run used"
        )
    if kind == "cpu" and node.devices_per_node != ranks:
        raise ConfigError(
            f"calibrate: {folder} ran with {plural(ranks, 'rank')}, but {cluster} describes "
            f"{plural(node.devices_per_node, 'rank')} that share the CPU; measure with kumi bench --ranks {ranks}"
        )


def refit_node(node: NodeFile, calibration: Calibration) -> NodeFile:
    """Return `node` with the constants that `calibration` changed and their provenance."""
    # Constants of devices are replaced, not multiplied: `device.reserved` may have been 0.
    factors = {
        name: after / before for name, (before, after) in calibration.moved.items() if not name.startswith("device.")
    }
    network = None if node.network is None else _refit_link(node.network, factors, calibration.source)
    return node.model_copy(
        update={
            "device": _device(node.device, calibration),
            "links": tuple(_refit_link(link, factors, calibration.source) for link in node.links),
            "network": network,
            "measured": _measured(node.device.reserved or 0, calibration),
        }
    )


def _measured(reserved: int, calibration: Calibration) -> MeasuredFile:
    """Return the mean ratios of measured to refitted times and memory; `reserved`: reserved bytes before the refit."""
    before, after = calibration.moved.get("device.reserved", (reserved, reserved))
    memory = [(run.measured_memory + before) / (run.estimated_memory + after) for run in calibration.runs]
    return MeasuredFile(
        runs=len(calibration.runs),
        time_ratio=round_to_four_digits(calibration.time_ratio),
        memory_ratio=round_to_four_digits(exp(sum(map(log, memory)) / len(memory))),
    )


def _device(file: DeviceFile, calibration: Calibration) -> DeviceFile:
    """Return `file` with the changed constants of the device, `device.FIELD` and `device.matmul.DTYPE`."""
    moved = {
        name.removeprefix("device."): round_to_four_digits(after)
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


def _refit_link(file: AnyLink, factors: Mapping[str, float], source: str) -> AnyLink:
    """Return `file` with its bandwidth and latency multiplied by `factors`, by names such as "NVLink 3: latency"."""
    names = [name for name in ("bandwidth", "latency") if f"{file.name}: {name}" in factors]
    update: dict[str, Any] = {
        name: round_to_four_digits(getattr(file, name) * factors[f"{file.name}: {name}"]) for name in names
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
    """Return tables of the changed constants and of the runs before and after, and why others are unchanged."""
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
    return Group(constants, Text(), steps, Text(), *_stopped(calibration), *unchanged)


def _stopped(calibration: Calibration) -> list[RenderableType]:
    """Return a sentence on the constants that stopped at a bound, if the runs still differ from their estimates."""
    if not calibration.bounded or abs(calibration.time_ratio - 1) <= phrases.SMALL_ERROR:
        return []
    from rich.text import Text

    slower = phrases.longer(calibration.time_ratio - 1)
    return [
        Text(
            f"stopped at a bound: {', '.join(calibration.bounded)}, and the runs still take {slower} than estimated; "
            f"a factor beyond {MAX_FACTOR:g} or a share above 100% indicates another cause, such as other programs on "
            f"the machine, so remove this cause and measure again (until then, the intervals of plans with this file "
            f"cover times with and without it)"
        )
    ]
