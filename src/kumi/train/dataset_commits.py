"""The commits of a run's datasets of the hub: those recorded in its folder, and those that it reads."""

from __future__ import annotations

from kumi.config import ResolvedRun
from kumi.data import Source
from kumi.hub import Snapshot, recorded_commit
from kumi.hub.datasets import fetch_dataset, is_dataset


def dataset_paths(run: ResolvedRun) -> dict[str, str]:
    """Return the paths of the run's data that name datasets of the hub, by their keys in the run file."""
    return {
        f"data.sources.{number}.{key}": path
        for number, section in enumerate(run.config.data.sources)
        for key, path in (("path", section.path), ("validation", section.validation))
        if path is not None and section.format != "indexed" and is_dataset(path)
    }


def run_sources(run: ResolvedRun) -> list[Source]:
    """Return the sources of a run. A run that has begun keeps the commits of its first start."""
    recorded = {path: recorded_commit(run.out, key, path) for key, path in dataset_paths(run).items()}
    commits = {path: commit for path, commit in recorded.items() if commit is not None}
    return [Source(**section.model_dump(), commits=commits) for section in run.config.data.sources]


def dataset_snapshots(run: ResolvedRun) -> dict[str, Snapshot]:
    """Return the snapshots of the hub datasets that the run reads, by the keys that name them."""
    paths = dataset_paths(run)
    return {key: fetch_dataset(path, recorded_commit(run.out, key, path)).snapshot for key, path in paths.items()}
