"""The runs of a job array: launch.slurm.array lists the overrides by which each differs from the run file.

    run file, overrides, [["train.seed=1"], ["train.seed=2"]] --array_runs--> (configuration, overrides) of each run

Each run has a name and a run folder of its own, so that no two write to one folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kumi.config import RunConfig, load
from kumi.config.stored_config import run_folder
from kumi.errors import ConfigError


def array_runs(run_file: str, overrides: Sequence[str]) -> list[tuple[RunConfig, tuple[str, ...]]]:
    """Return the configuration and all overrides of each run of launch.slurm.array; [] without that key.

    Raise ConfigError if a run is invalid, changes [launch] or [cluster], or has the run folder of another run.
    """
    whole = load(run_file, overrides)
    runs = [_run(whole, number, run_file, overrides) for number in range(len(whole.launch.slurm.array))]
    folders = [run_folder(config) for config, _ in runs]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise ConfigError(
                f"launch.slurm.array.{number}: train.out={folder} is also the folder of run {folders.index(folder)}, "
                f"and a folder has one run; leave out train.out, or give each run another one"
            )
    return runs


def _run(whole: RunConfig, number: int, run_file: str, overrides: Sequence[str]) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration and all overrides of run `number`. `whole`: the configuration that all runs share."""
    where, words = f"launch.slurm.array.{number}", list(whole.launch.slurm.array[number])
    try:
        config = load(run_file, [*overrides, *words])
        if (config.launch, config.cluster) != (whole.launch, whole.cluster):
            raise ConfigError("it changes [launch] or [cluster], which all runs of a job share; set these for all")
        # Quotes keep the text a string of TOML, even if it looks like a number.
        if config.name == whole.name:
            words.append(f"name={_quoted(f'{whole.name}-{number}')}")
        if config.train.out == whole.train.out:
            words.append(f"train.out={_quoted(f'{whole.train.out}-{number}')}")
        return load(run_file, [*overrides, *words]), (*overrides, *words)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
