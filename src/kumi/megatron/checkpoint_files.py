"""The files of Megatron-Core's distributed checkpoints, and how to find one in a folder."""

from __future__ import annotations

import re
from pathlib import Path

from kumi.errors import ModelError, RefusedError
from kumi.files.untrusted import read_bytes

LATEST, METADATA = "latest_checkpointed_iteration.txt", ".metadata"
# Where Megatron-LM's arguments and other values without tensors are: in this file or, in newer versions, in the entry
# of the checkpoint whose name begins with this prefix.
COMMON, COMMON_ENTRY = "common.pt", "common_state/"
# Megatron-Bridge's configuration, in the folder of the tensors.
RUN_CONFIG = "run_config.yaml"


def is_checkpoint(folder: Path) -> bool:
    """True if `folder` is a distributed checkpoint of Megatron, or has the file that names the newest of several."""
    return (folder / METADATA).is_file() or (folder / LATEST).is_file()


def newest_checkpoint(folder: Path) -> Path:
    """Return the folder of the checkpoint in `folder`: `folder` itself, or the folder that its file `LATEST` names.

    Raise RefusedError if `LATEST` names no folder, ModelError if the checkpoint there has another format.
    """
    if (folder / METADATA).is_file():
        return folder
    text = read_bytes(folder, LATEST, RefusedError).decode(errors="replace").strip()
    if text != "release" and not re.fullmatch(r"[0-9]{1,12}", text):
        raise RefusedError(
            f"{folder / LATEST}: has {text!r:.40}, which is neither a number nor 'release'; give the path of one of "
            f"the folders iter_... instead"
        )
    inner = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
    if (inner / METADATA).is_file():
        return inner
    if any(inner.glob("mp_rank_*")):
        raise ModelError(
            f"{inner}: a checkpoint in Megatron's old format (mp_rank_..., pickled for one layout); load "
            f"it in Megatron-LM and save it with --ckpt-format torch_dist"
        )
    raise ModelError(
        f"{inner}: has no {METADATA}, so it is not a torch_dist checkpoint; save it with --ckpt-format torch_dist"
    )
