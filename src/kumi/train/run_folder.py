"""The run folder: whose it is, and what may change when the same command runs again.

runs/<name>/
  config.toml        the resolved configuration, with the layout spelled out
  plan.json          what the run file pinned of the layout, what it was made for, and its estimate
  sources.json       the commits of what came from a hub
  metrics.jsonl      one JSON object a step, and one an evaluation
  data/              tokenizer and tokenised data
  checkpoints/       step_000200/ ...
  logs/              output of the ranks
  hf/                the Hugging Face folder, at the end
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kumi.config import RunConfig, dump
from kumi.config.run_plan import PLAN, RunPlan
from kumi.config.stored_config import CONFIG, changes, load_stored
from kumi.data import foreign_files
from kumi.errors import RefusedError
from kumi.files.output import open_kept, open_new, refuse_link

CHECKPOINTS, DATA, LOCK = "checkpoints", "data", ".lock"
CONFIG_DRAFT, PLAN_DRAFT = "config.part", "plan.part"
# What a run writes here. Others' files may lie beside it once the run has begun, links among them.
OWN = (
    LOCK,
    CONFIG,
    CONFIG_DRAFT,
    PLAN,
    PLAN_DRAFT,
    CHECKPOINTS,
    DATA,
    "sources.json",
    "metrics.jsonl",
    "logs",
    "hf",
    "hf.unverified",
    "adapter",
    "adapter.unverified",
    "offload",
    "probe.safetensors",
    "tensorboard",
    "wandb",
)

# What may differ between a run and its continuation: nothing here changes what is learned.
FREE = (
    "cluster",
    "layout",
    "eval",
    "checkpoint",
    "log",
    "export",
    "sample",
    "data.workers",
    "data.cache",
    "data.on_error",
    "train.out",
    "train.compile",
    "train.trace_step",
    "train.timeout_s",
    "train.offload_dir",
    "comm.bucket_mb",
    "comm.prefetch",
    "precision.numerics",
)


def checkpoint_root(out: Path) -> Path:
    """Return the folder of the checkpoints of the run in `out`."""
    return out / CHECKPOINTS


@contextmanager
def claim(
    out: Path,
    config: RunConfig,
    allow_change: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
    plan: RunPlan | None = None,
) -> Iterator[bool]:
    """Hold the folder `out` for this run; yields whether an earlier start of the run left its configuration there.

    Raises RefusedError when the folder belongs to another run, when the configuration differs in a key that decides
    what is learned and that `allow_change` does not name, or when another process is training there; and whatever
    `check` raises, which is called once the folder is held. Nothing is written before all of that is clear; then
    `config` is, and `plan` unless it is None.
    """
    _check_names(allow_change)
    _refuse_links(out)
    _check(out, config, allow_change)
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        _check(out, config, allow_change)  # another start may have claimed it while this one waited
        check()
        resumed = (out / CONFIG).exists()
        if plan is not None:  # first, so that a configuration with a layout has a plan beside it
            _write_atomically(out / PLAN, out / PLAN_DRAFT, plan.text())
        _write_atomically(out / CONFIG, out / CONFIG_DRAFT, dump(config))
        yield resumed


def _refuse_links(out: Path) -> None:
    """Raise RefusedError where a link has the name of a file or folder that a run writes in `out`."""
    for name in OWN:
        refuse_link(out / name, "; to keep the run on another disk, let train.out be a folder there, or a link to one")


def _check(out: Path, config: RunConfig, allow_change: Sequence[str]) -> None:
    if out.exists() and not out.is_dir():
        raise RefusedError(f"train.out: {out} is a file; name a folder for the run")
    if not (out / CONFIG).exists():
        _refuse_foreign(out)
        return
    changed = changes(load_stored(out), config)
    refused = [line for key, line in changed if not _allowed(key, allow_change)]
    if refused:
        keys = " ".join(f"--allow-change {key}" for key, _ in changed if not _allowed(key, allow_change))
        raise RefusedError(
            f"train.out: {out} holds a run with another configuration ({'; '.join(refused)}); "
            f"choose another train.out, or continue with the new values: {keys}"
        )


def _refuse_foreign(out: Path) -> None:
    """Raise RefusedError where `out`, which is no run's folder yet, holds more than what kumi leaves before a run.

    That is the data that `kumi data prepare` makes, and what a start leaves that was killed before it wrote its
    configuration.
    """
    names = {item.name for item in out.iterdir()} if out.exists() else set()
    names -= {LOCK, CONFIG_DRAFT, PLAN, PLAN_DRAFT}
    if CHECKPOINTS in names:
        raise RefusedError(
            f"train.out: {out} holds checkpoints but no {CONFIG}, so it is not known whose they are; restore the file "
            f"(`kumi describe RUN.toml --resolved` prints it), or name another folder"
        )
    if (out / DATA).is_dir():
        names = (names - {DATA}) | {f"{DATA}/{name}" for name in foreign_files(out / DATA)}
    if names:
        raise RefusedError(
            f"train.out: {out} holds {len(names)} files that kumi did not write ({', '.join(sorted(names)[:3])}); "
            f"name an empty or new folder"
        )


def _check_names(keys: Sequence[str]) -> None:
    """Raises RefusedError where one of the dotted `keys` names nothing that a run file can say."""
    for key in keys:
        section, *inner = key.split(".")
        field = RunConfig.model_fields.get(section)
        within: Any = getattr(field and field.annotation, "model_fields", None)
        if field is None or (inner and within is not None and inner[0] not in within):
            raise RefusedError(f"--allow-change {key}: no key of a run file has this name; name one, as in optim.lr")


def _allowed(key: str, allow_change: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in (*FREE, *allow_change))


@contextmanager
def _locked(out: Path, patience: float = 15.0) -> Iterator[None]:
    """Hold an exclusive lock on `out`. The ranks of a killed run let go of it within seconds, hence the patience."""
    with open_kept(out / LOCK) as file:
        for attempt in range(int(patience / 0.1) + 1):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == int(patience / 0.1):
                    raise RefusedError(
                        f"train.out: {out} is in use by another kumi process; wait for it, or stop it"
                    ) from None
                time.sleep(0.1)
        yield


def _write_atomically(file: Path, part: Path, text: str) -> None:
    with open_new(part) as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(part, file)
