"""The files of Megatron-Core's distributed checkpoints, and which folders hold one; `kumi.convert` reads them."""

from __future__ import annotations

import re
from pathlib import Path

from kumi.errors import ModelError, RefusedError
from kumi.files.untrusted import read_bytes

LATEST, METADATA = "latest_checkpointed_iteration.txt", ".metadata"
# Megatron-LM's arguments and what else is no tensor: a file, or in a checkpoint of one format an entry.
COMMON, COMMON_ENTRY = "common.pt", "common_state/"
# Megatron-Bridge's configuration, beside the tensors.
RUN_CONFIG = "run_config.yaml"


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` looks like Megatron's: a distributed checkpoint, or a folder that names its newest one."""
    return (folder / METADATA).is_file() or (folder / LATEST).is_file()


def newest(folder: Path) -> Path:
    """The checkpoint in `folder`: itself, or the one that it names as its newest."""
    if (folder / METADATA).is_file():
        return folder
    text = read_bytes(folder, LATEST, RefusedError).decode(errors="replace").strip()
    if text != "release" and not re.fullmatch(r"[0-9]{1,12}", text):
        raise RefusedError(f"{folder / LATEST}: says {text!r:.40}, not a number or 'release'; name the folder iter_...")
    inner = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
    if (inner / METADATA).is_file():
        return inner
    if any(inner.glob("mp_rank_*")):
        raise ModelError(
            f"{inner}: a checkpoint in Megatron's old format (mp_rank_..., pickled for one layout); load "
            f"it in Megatron-LM and save it with --ckpt-format torch_dist"
        )
    raise ModelError(
        f"{inner}: has no {METADATA}; kumi reads Megatron's torch_dist checkpoints (--ckpt-format torch_dist)"
    )
