"""`kumi plan --calibrate`: finished runs' folders in, a cluster file with refitted constants out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from kumi.bench.file import digits, node_toml, refuse_existing, write_new
from kumi.config import job, load_plan, resolve
from kumi.config.cluster_file import DeviceFile, LinkFile, NetworkFile, NodeFile
from kumi.config.model import fetch_snapshots, model_source, read_hf_config
from kumi.config.presets import read_node
from kumi.config.run_plan import read_plan
from kumi.config.schema import ClusterSection
from kumi.config.stored import CONFIG, load_stored, read_begun
from kumi.describe import console
from kumi.errors import OK, ConfigError
from kumi.paths import looked_for
from kumi.plan.calibrate import Calibration, MeasuredRun, calibrate
from kumi.spec.layout import Layout
from kumi.train.metrics import read_metrics
from kumi.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

Joins = TypeVar("Joins", LinkFile, NetworkFile)

# The first steps compile kernels, warm caches, and hold the fire drill.
WARM_UP = 5
LEAST_STEPS = 10


def recalibrate(folders: Sequence[Path], cluster: str, out: Path) -> Calibration:
    """The constants of `cluster` (a preset or a TOML file) that the runs in `folders` determine, written to the new
    file `out`. Raises ConfigError for a run that cannot be used, RefusedError when `out` exists."""
    refuse_existing(out, "--out")
    if cluster == "auto":
        raise ConfigError(
            "calibrate: cluster.source='auto' is no file with constants; write one with kumi bench --out FILE.toml, "
            "and set cluster.source to it"
        )
    found = calibrate([read_run(folder, cluster) for folder in folders])
    node = refitted(read_node(cluster), found)
    write_new(out, node_toml(node, [f"{cluster}, {found.source}."]), "--out")
    return found


def run(
    folders: Sequence[str],
    plan: str,
    overrides: Sequence[str],
    out: str | None,
    write_json: Callable[[Any], None] | None = None,
) -> int:
    """Refit the cluster that the run file `plan` names to the runs in `folders`, into the new file `out`, and print
    what moved, or hand it to `write_json`. Returns the exit code."""
    if out is None:
        raise ConfigError("plan: --calibrate writes a cluster file; name it with --out FILE.toml")
    cluster = load_plan(plan, overrides).cluster.source
    found = recalibrate([Path(folder) for folder in folders], cluster, Path(out))
    if write_json is not None:
        write_json(asdict(found))
    else:
        console().print(render(found))
        print(f'wrote {out}; use it with cluster.source="{out}"')
    return OK


def read_run(folder: Path, cluster: str) -> MeasuredRun:
    """The finished run in `folder`, as if on `cluster`. Raises ConfigError when it is none or has too few steps."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"calibrate: {looked_for(folder)} has no {CONFIG}, so it is no run folder; name a train.out")
    config = load_stored(folder)
    snapshots = fetch_snapshots(config)
    # Without a plan, as in a folder of an earlier version, what would be chosen today is all that is known.
    plan = read_plan(folder) or resolve(config, snapshots, read_begun(config)).plan
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
    hf_config = read_hf_config(config.model, model_source(config.model.source, snapshots))
    return MeasuredRun(
        config.name,
        job(config, hf_config),
        plan.layout,
        median(entry["perf/step_s"] for entry in steps),
        len(steps),
        max(int(entry["mem/peak_bytes"]) for entry in steps),
    )


def _steps(folder: Path, layout: Layout) -> list[dict[str, Any]]:
    """Return the metrics of the steps that the run in `folder` made with `layout`; of steps without one, any."""
    entries = read_metrics(folder / "metrics.jsonl")
    return [one for one in entries if "perf/step_s" in one and one.get("layout", layout.words) == layout.words]


def _check_same_machine(folder: Path, kind: str, section: ClusterSection, cluster: str) -> None:
    """Refuses a cluster that is not what the run ran on. The ranks of a CPU share its cores, so that each number of
    them is another cluster."""
    node = read_node(cluster)
    ranks = section.devices_per_node or (1 if kind == "cpu" else node.devices_per_node)
    if node.device.kind != kind:
        raise ConfigError(
            f"calibrate: {folder} ran on a {kind} device, and {cluster} describes a {node.device.kind} device; "
            f"name the cluster file of the machine it ran on"
        )
    if kind == "cpu" and node.devices_per_node != ranks:
        raise ConfigError(
            f"calibrate: {folder} ran with {ranks} ranks, and {cluster} describes {node.devices_per_node} that share "
            f"the CPU; measure with kumi bench --ranks {ranks}"
        )


def refitted(node: NodeFile, found: Calibration) -> NodeFile:
    """`node` with the constants that `found` moved, and where they come from."""
    factors = {name: after / before for name, (before, after) in found.moved.items()}
    network = None if node.network is None else _joined(node.network, factors, found.source)
    return node.model_copy(
        update={
            "device": _device(node.device, found),
            "links": tuple(_joined(link, factors, found.source) for link in node.links),
            "network": network,
        }
    )


def _device(file: DeviceFile, found: Calibration) -> DeviceFile:
    moved = {
        name.removeprefix("device."): digits(after)
        for name, (_, after) in found.moved.items()
        if name.startswith("device.")
    }
    shares = {name.removeprefix("matmul."): moved.pop(name) for name in list(moved) if name.startswith("matmul.")}
    update: dict[str, Any] = dict(moved)
    if "reserved" in moved:
        update["reserved"] = round(found.moved["device.reserved"][1])
    if shares:
        update["matmul"] = (file.matmul or {}) | shares
    return file.model_copy(update={**update, "sources": _sources(file.sources, list(update), found.source)})


def _joined(file: Joins, factors: Mapping[str, float], source: str) -> Joins:
    names = [name for name in ("bandwidth", "latency") if f"{file.name}: {name}" in factors]
    update: dict[str, Any] = {name: digits(getattr(file, name) * factors[f"{file.name}: {name}"]) for name in names}
    return file.model_copy(update={**update, "sources": _sources(file.sources, names, source)})


def _sources(before: Mapping[str, str], names: Sequence[str], source: str) -> dict[str, str]:
    """`before` with `names`, which may stand in keys that name several figures, attributed to `source`."""
    kept = {
        ", ".join(left): text
        for key, text in before.items()
        if (left := [name for name in key.split(", ") if name not in names])
    }
    return kept | ({", ".join(names): source} if names else {})


def render(found: Calibration) -> RenderableType:
    """What moved, what stayed and why, and the runs before and after, as tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    constants = Table("constant", "before", "after", box=None, pad_edge=False)
    for name, (before, after) in found.moved.items():
        constants.add_row(name, f"{before:.4g}", f"{after:.4g}")
    steps = Table(
        "run", "steps", "measured", "estimated before", "after", "memory", "estimated", box=None, pad_edge=False
    )
    for run in found.runs:
        steps.add_row(
            run.name,
            str(run.steps),
            f"{run.measured * 1e3:.4g} ms",
            f"{run.before * 1e3:.4g} ms ({run.before / run.measured - 1:+.1%})",
            f"{run.after * 1e3:.4g} ms ({run.after / run.measured - 1:+.1%})",
            format_bytes(run.measured_memory),
            format_bytes(run.estimated_memory),
        )
    reasons = dict.fromkeys(found.kept.values())
    kept = [
        Text(f"kept {', '.join(name for name, why in found.kept.items() if why == reason)}: {reason}")
        for reason in reasons
    ]
    return Group(constants, Text(), steps, Text(), *kept)
