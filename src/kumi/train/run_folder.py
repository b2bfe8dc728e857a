"""The run folder: claim it for one run and one process, and check which keys a resume changes.

runs/<name>/
  config.toml        the resolved configuration, with every field of the layout
  plan.json          the layout's pinned fields, the cluster that the layout was planned for, and its estimate
  sources.json       the commits of models, tokenizers and datasets from a hub
  metrics.jsonl      one JSON object per step, and one per evaluation
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
from kumi.config.document_lengths import DATA
from kumi.config.run_plan import PLAN_FILE, RunPlan
from kumi.config.stored_config import CONFIG_FILE, changed_keys, load_stored_config
from kumi.data import foreign_files
from kumi.errors import RefusedError
from kumi.files.output import open_append, open_new, refuse_link

_CHECKPOINTS, _LOCK = "checkpoints", ".lock"
_CONFIG_DRAFT, _PLAN_DRAFT = "config.part", "plan.part"
# Names that a run writes in its folder. Users may add files and links with other names once the run has begun.
RUN_FILES = (
    _LOCK,
    CONFIG_FILE,
    _CONFIG_DRAFT,
    PLAN_FILE,
    _PLAN_DRAFT,
    _CHECKPOINTS,
    DATA,
    "sources.json",
    "metrics.jsonl",
    "logs",
    "samples",
    "hf",
    "hf.unverified",
    "adapter",
    "adapter.unverified",
    "offload",
    "probe.safetensors",
    "tensorboard",
    "wandb",
)

# Keys that a resume may change, because they do not change the training result beyond rounding.
_CHANGEABLE_KEYS = (
    "cluster",
    "layout",
    "plan",
    "eval",
    "checkpoint",
    "log",
    "export",
    "sample",
    "batch.mean_document_tokens",
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
    return out / _CHECKPOINTS


@contextmanager
def claim_run_folder(
    out: Path,
    config: RunConfig,
    allow_change: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
    plan: RunPlan | None = None,
) -> Iterator[bool]:
    """Lock the folder `out` for this run and write `config` and `plan` there; yield True if the run has begun before.

    Raise RefusedError if the folder belongs to another run, if the stored configuration differs in a key that neither
    `_CHANGEABLE_KEYS` nor `allow_change` names, or if another process is training there. Call `check` once the folder
    is locked, and let its errors through. Nothing is written before all checks have passed.
    """
    _check_names(allow_change)
    _refuse_links(out)
    _check_config(out, config, allow_change)
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        _check_config(out, config, allow_change)  # another process may have claimed the folder in the meantime
        check()
        resumed = (out / CONFIG_FILE).exists()
        if plan is not None:  # first, so that a configuration with a layout always has a plan
            _write_atomically(out / PLAN_FILE, out / _PLAN_DRAFT, plan.text())
        _write_atomically(out / CONFIG_FILE, out / _CONFIG_DRAFT, dump(config))
        yield resumed


def _refuse_links(out: Path) -> None:
    """Raise RefusedError if `out` has a link with the name of a file or folder that a run writes."""
    for name in RUN_FILES:
        refuse_link(out / name, "; to keep the run on another disk, let train.out be a folder there, or a link to one")


def _check_config(out: Path, config: RunConfig, allow_change: Sequence[str]) -> None:
    if out.exists() and not out.is_dir():
        raise RefusedError(f"train.out: {out} is a file; name a folder for the run")
    if not (out / CONFIG_FILE).exists():
        _refuse_foreign(out)
        return
    changed = changed_keys(load_stored_config(out), config)
    refused = [line for key, line in changed if not _may_change(key, allow_change)]
    if refused:
        keys = " ".join(f"--allow-change {key}" for key, _ in changed if not _may_change(key, allow_change))
        raise RefusedError(
            f"train.out: {out} has a run with another configuration ({'; '.join(refused)}); "
            f"choose another train.out, or continue with the new values: {keys}"
        )


def _refuse_foreign(out: Path) -> None:
    """Raise RefusedError if `out`, which has no configuration yet, has files that kumi did not write.

    Allowed are the data of `kumi data prepare`, and the files of a launch that was killed before it wrote its
    configuration.
    """
    names = {item.name for item in out.iterdir()} if out.exists() else set()
    names -= {_LOCK, _CONFIG_DRAFT, PLAN_FILE, _PLAN_DRAFT}
    if _CHECKPOINTS in names:
        raise RefusedError(
            f"train.out: {out} has checkpoints but no {CONFIG_FILE}, so their run is not known; restore the file "
            f"(`kumi describe RUN.toml --resolved` prints it), or name another folder"
        )
    if (out / DATA).is_dir():
        names = (names - {DATA}) | {f"{DATA}/{name}" for name in foreign_files(out / DATA)}
    if names:
        raise RefusedError(
            f"train.out: {out} has {len(names)} files that kumi did not write ({', '.join(sorted(names)[:3])}); "
            f"name an empty or new folder"
        )


def _check_names(keys: Sequence[str]) -> None:
    """Raise RefusedError unless each of the dotted `keys` is a key or a section of run files."""
    for key in keys:
        section, *inner = key.split(".")
        field = RunConfig.model_fields.get(section)
        within: Any = getattr(field and field.annotation, "model_fields", None)
        if field is None or (inner and within is not None and inner[0] not in within):
            raise RefusedError(f"--allow-change {key}: no key of a run file has this name; name a key such as optim.lr")


def _may_change(key: str, allow_change: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in (*_CHANGEABLE_KEYS, *allow_change))


@contextmanager
def _locked(out: Path, patience: float = 15.0) -> Iterator[None]:
    """Take an exclusive lock on `out`, waiting at most `patience` seconds for ranks of a killed run to end."""
    with open_append(out / _LOCK) as file:
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
