"""Choose one of the models in the folder of a run: its best checkpoint, its last, or that of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kumi.errors import ConfigError, RefusedError
from kumi.files.run_names import CONFIG_FILE
from kumi.storage.folders import BEST, best_step, list_complete, step_of
from kumi.storage.read import open as open_checkpoint

BEST_CHECKPOINT, LAST_CHECKPOINT = "best", "last"


@dataclass(frozen=True)
class ChosenModel:
    """A model of a run. `folder`: a checkpoint, or an exported folder. `words`: which one it is, and why."""

    folder: Path
    words: str


def is_run_folder(folder: Path) -> bool:
    """Return True if `folder` is that of a run, and not that of a model."""
    has_model = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    return not has_model and ((folder / "checkpoints").is_dir() or (folder / CONFIG_FILE).is_file())


def model_of(folder: Path, checkpoint: str | int | None = None) -> ChosenModel:
    """Return the model in `folder`: that of `choose_model` for a run folder, else `folder` itself, without words.

    Raise ConfigError if `checkpoint` is given and `folder` is one model.
    """
    name = None if checkpoint is None else str(checkpoint)
    if is_run_folder(folder):
        return choose_model(folder, name)
    if name is not None:
        raise ConfigError(f"{folder}: is one model, not a run folder with several checkpoints; leave checkpoint out")
    return ChosenModel(folder, "")


def choose_model(run: Path, checkpoint: str | None = None) -> ChosenModel:
    """Return the model of the run in the folder `run` that `checkpoint` names: "best", "last" or a step, such as "400".

    By default, it is the best one where the run keeps one (checkpoint.best), else the last; without a checkpoint it is
    the exported model. A checkpoint in progress, or one whose index or files are damaged, is never chosen. Raise
    ConfigError or RefusedError, which names the checkpoints that can be read, if there is no such model.
    """
    root = run / "checkpoints"
    complete = list_complete(root)
    if not complete:
        return _export(run, checkpoint)
    if checkpoint is None:
        keeps_best = (root / BEST).is_file()
        chosen = _best(root) if keeps_best else _last(root, complete)
        why = "which the run keeps by checkpoint.best" if keeps_best else "because the run keeps no best one"
        return ChosenModel(chosen.folder, f"{chosen.words}, {why}")
    if checkpoint == BEST_CHECKPOINT:
        return _best(root)
    if checkpoint == LAST_CHECKPOINT:
        return _last(root, complete)
    if not (checkpoint.isascii() and checkpoint.isdecimal()):
        raise ConfigError(
            f"checkpoint={checkpoint!r} is neither {BEST_CHECKPOINT!r} nor {LAST_CHECKPOINT!r} nor a step; "
            f"{_choices(root)}"
        )
    folder = next((folder for folder in complete if step_of(folder) == int(checkpoint)), None)
    if folder is None:
        raise ConfigError(f"{run}: has no checkpoint of step {checkpoint}; {_choices(root)}")
    _check_readable(folder)
    return ChosenModel(folder, f"the checkpoint of step {step_of(folder)}")


def _best(root: Path) -> ChosenModel:
    """Return the best checkpoint under `root`. Raise ConfigError if there is none, RefusedError if it is damaged."""
    try:
        step = best_step(root)
    except RefusedError as error:
        raise RefusedError(f"{error}; {_choices(root)}") from None
    if step is None:
        raise ConfigError(
            f"{root.parent}: has no best checkpoint, because its run file did not set checkpoint.best; {_choices(root)}"
        )
    folder = next((folder for folder in list_complete(root) if step_of(folder) == step), None)
    if folder is None:
        raise RefusedError(f"{root / BEST}: step {step} has no checkpoint beside it; {_choices(root)}")
    _check_readable(folder)
    return ChosenModel(folder, f"the best checkpoint, of step {step}")


def _last(root: Path, complete: list[Path]) -> ChosenModel:
    """Return the newest checkpoint that can be read; its words name newer ones that are damaged."""
    for newer_count, folder in enumerate(reversed(complete)):
        if _is_readable(folder):
            newer = ", ".join(other.name for other in complete[len(complete) - newer_count :])
            words = f"the last checkpoint, of step {step_of(folder)}"
            return ChosenModel(folder, words if not newer else f"{words} (damaged, and not chosen: {newer})")
    _check_readable(complete[-1])
    raise AssertionError(f"{complete[-1]} has become readable")


def _export(run: Path, checkpoint: str | None) -> ChosenModel:
    """Return the exported model of a run without checkpoints."""
    for name in ("hf", "adapter") if checkpoint is None else ():
        if (run / name).is_dir():
            return ChosenModel(run / name, f"the export {name}, because there is no checkpoint")
    raise ConfigError(f"{run}: a run folder without a checkpoint; train it for longer, or name another model")


def _check_readable(folder: Path) -> None:
    """Raise RefusedError unless `folder` can be read; it tells the damage and the checkpoints that can be."""
    try:
        open_checkpoint(folder)
    except RefusedError as error:
        raise RefusedError(f"{error}; {_choices(folder.parent)}") from None


def _is_readable(folder: Path) -> bool:
    """Return True if the index of the checkpoint and the sizes of its files are right; contents are not read."""
    try:
        open_checkpoint(folder)
    except RefusedError:
        return False
    return True


def _choices(root: Path) -> str:
    """Return the remedy in an error: to choose one of the readable checkpoints under `root`."""
    steps = list(_readable_steps(root))
    best = None
    with suppress(RefusedError):  # a damaged best.json names no step
        best = best_step(root)
    choices = [f"step {step}" for step in steps]
    choices += [f"{BEST_CHECKPOINT} (step {best})"] if best in steps else []
    choices += [f"{LAST_CHECKPOINT} (step {steps[-1]})"] if steps else []
    return f"choose one of {', '.join(choices)}" if choices else "no checkpoint of the run can be read"


def _readable_steps(root: Path) -> Iterator[int]:
    return (step_of(folder) for folder in list_complete(root) if _is_readable(folder))
