"""The run folder: claim it for one run and one process, and check which keys a resume changes.

runs/<name>/
  config.toml        the resolved configuration, with every field of the layout
  plan.json          the layout's pinned fields, the cluster that the layout was planned for, and its estimate
  sources.json       the commits of models, tokenizers and datasets from a hub
  metrics.jsonl      one JSON object per step, and one per evaluation
  data/              tokenizer and tokenised data
  checkpoints/       step_000200/ ...
  .lock              owner of the run folder, see kumi.train.folder_lock
  .token             secret by which the nodes of the run recognise each other
  stop               asks the run to save and end, see kumi.launch.stop_file
  samples/           pages of sample texts, and of rollouts
  rollouts.jsonl     the groups of replies that the run has finished with, one group a line
  rollouts/          replies of the batch in progress
  logs/              output of the ranks
  launch/            the file, the record and the output of a job that kumi launch submitted
  hf/                the Hugging Face folder, at the end
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kumi.config import RunConfig, dump
from kumi.config.document_lengths import DATA
from kumi.config.run_plan import PLAN_FILE, RunPlan
from kumi.config.stored_config import changed_keys, load_stored_config
from kumi.data import foreign_files
from kumi.doctor.disk_checks import DOCTOR_FOLDER
from kumi.errors import RefusedError
from kumi.files.output import open_new, refuse_link
from kumi.files.run_names import CONFIG_FILE
from kumi.files.untrusted import explain, read_regular
from kumi.launch.launch_job import LAUNCH_FOLDER
from kumi.launch.stop_file import STOP_FILE, obey_stop_file, process_age
from kumi.rollout.rollout_history import HISTORY, UNFINISHED
from kumi.storage.folders import CHECKPOINTS
from kumi.train.folder_lock import LOCK, lock_folder

# A file gets its name when it is complete; until then it is a draft.
_TOKEN, _TOKEN_DRAFT = ".token", ".token.part"
_TOKEN_DIGITS = 64
_TOKEN_SECONDS = 600.0  # for which a node waits for the token
_NOTE_SECONDS = 20.0  # after which it prints that it waits
_TOKEN_LATE_SECONDS = 20.0  # by which a network file system may show the token later than node 0 has written it
_CONFIG_DRAFT, _PLAN_DRAFT = "config.part", "plan.part"
# Names that a run writes in its folder. Users may add files and links with other names once the run has begun.
RUN_FILES = (
    LOCK,
    _TOKEN,
    _TOKEN_DRAFT,
    STOP_FILE,
    CONFIG_FILE,
    _CONFIG_DRAFT,
    PLAN_FILE,
    _PLAN_DRAFT,
    CHECKPOINTS,
    DATA,
    "sources.json",
    "metrics.jsonl",
    "logs",
    LAUNCH_FOLDER,
    "samples",
    HISTORY,
    UNFINISHED,
    "hf",
    "hf.unverified",
    "adapter",
    "adapter.unverified",
    "offload",
    "probe.safetensors",
    "tensorboard",
    "wandb",
    DOCTOR_FOLDER,
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
    "rollout.slots",
    "rollout.samples_every",
    "rollout.stop_after",
    "recover",
    "launch",
    "batch.mean_document_tokens",
    "rollout.prompt_tokens",
    "rollout.reply_tokens",
    "data.workers",
    "data.cache",
    "data.on_error",
    "train.out",
    "train.compile",
    "train.trace_step",
    "train.timeout_s",
    "train.doctor",
    "train.offload_dir",
    "comm.bucket_mb",
    "comm.prefetch",
    "precision.numerics",
    "precision.kernels",
)


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
    is locked, and let its errors through. Nothing is written before all checks have passed. Within the block, the run
    obeys its stop file.
    """
    _check_names(allow_change)
    _refuse_links(out)
    _check_config(out, config, allow_change)
    out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out), obey_stop_file(out, process_age()):
        _check_config(out, config, allow_change)  # another process may have claimed the folder in the meantime
        check()
        resumed = (out / CONFIG_FILE).exists()
        if plan is not None:  # first, so that a configuration with a layout always has a plan
            _write_atomically(out / PLAN_FILE, out / _PLAN_DRAFT, plan.text())
        _write_atomically(out / CONFIG_FILE, out / _CONFIG_DRAFT, dump(config))
        yield resumed


def run_token(out: Path, *, node: int, remedy: str, has_head: Callable[[], bool]) -> str:
    """Return the secret that the nodes of the run in `out` share. Node 0 makes it, in a file that others cannot read.

    On other nodes, wait for the file. Raise RefusedError if the folder belongs to something else, or if the file does
    not appear, because the nodes do not share the folder. `remedy`: what to do then. `has_head`: returns True once node
    0 has written the file.
    """
    _refuse_links(out)
    if out.exists() and not out.is_dir():
        raise RefusedError(f"train.out: {out} is a file; name a folder for the run")
    if not (out / CONFIG_FILE).exists():
        try:
            _refuse_foreign(out)
        except RefusedError:
            if not (out / CONFIG_FILE).exists():  # node 0 may just have begun the run
                raise
    if node == 0 and not (out / _TOKEN).exists():
        out.mkdir(parents=True, exist_ok=True)
        _write_atomically(out / _TOKEN, out / _TOKEN_DRAFT, secrets.token_hex(_TOKEN_DIGITS // 2), mode=0o600)
    began, noted = time.monotonic(), False
    written_at: float | None = None
    while not (out / _TOKEN).exists():
        seconds = time.monotonic() - began
        if written_at is None and has_head():
            written_at = seconds
        if written_at is not None and seconds - written_at > _TOKEN_LATE_SECONDS:
            raise RefusedError(
                f"train.out: {out} on node {node} is not the folder of node 0, which has written the file {_TOKEN} "
                f"there; {remedy}"
            )
        if seconds > _TOKEN_SECONDS:
            raise RefusedError(
                f"train.out: {out} has no file {_TOKEN} on node {node} after {seconds:.0f} s: start node 0, and "
                f"{remedy}"
            )
        if not noted and seconds > _NOTE_SECONDS:
            noted = True
            print(f"node {node}     waits for {out / _TOKEN} of node 0", file=sys.stderr, flush=True)
        time.sleep(0.2)
    return _read_token(out / _TOKEN)


def _read_token(file: Path) -> str:
    """Return the secret in `file`. Raise RefusedError if `file` cannot be read or is damaged."""
    try:
        token = read_regular(file, _TOKEN_DIGITS).decode()
    except (OSError, ValueError) as error:
        raise RefusedError(f"{file}: cannot be read ({explain(error)}); delete it, and start all nodes anew") from None
    if len(token) != _TOKEN_DIGITS:
        raise RefusedError(
            f"{file}: has {len(token)} characters instead of {_TOKEN_DIGITS}; delete it, and start all nodes anew"
        )
    return token


def _refuse_links(out: Path) -> None:
    """Raise RefusedError if `out` has a link with the name of a file or folder that a run writes."""
    for name in RUN_FILES:
        refuse_link(out / name, "; to keep the run on another disk, let train.out be a folder there, or a link to one")


def _check_config(out: Path, config: RunConfig, allow_change: Sequence[str]) -> None:
    """Raise RefusedError unless the folder `out` is free, or has a run that `config` may continue."""
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

    Allowed are the data of `kumi data prepare`, the files of `kumi launch`, and those of a launch that was killed
    before it wrote its configuration.
    """
    names = {item.name for item in out.iterdir()} if out.exists() else set()
    names -= {LOCK, _TOKEN, _TOKEN_DRAFT, STOP_FILE, _CONFIG_DRAFT, PLAN_FILE, _PLAN_DRAFT}
    names -= {DOCTOR_FOLDER, LAUNCH_FOLDER}
    if CHECKPOINTS in names:
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
    """Return True if `_CHANGEABLE_KEYS` or `allow_change` name `key` or a section that has it."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in (*_CHANGEABLE_KEYS, *allow_change))


def _write_atomically(file: Path, part: Path, text: str, mode: int | None = None) -> None:
    """Write `text` to the draft `part`, and give it the name `file` once it is on the disk."""
    with open_new(part) as handle:
        if mode is not None:
            os.fchmod(handle.fileno(), mode)
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(part, file)
