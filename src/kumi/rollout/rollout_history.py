"""rollouts.jsonl: a line for each group that a run has finished with, accepted for training or dropped.

Every prompt is in it once, even if a run was killed: entries of batches that a resumed run collects again are removed
first.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kumi.files.json_lines import json_objects
from kumi.files.output import open_append, replace_text
from kumi.rollout.group import Group
from kumi.rollout.prompt_sampler import Prompt

# In the run folder: the history, and the folder of replies of the batch in progress.
HISTORY, UNFINISHED = "rollouts.jsonl", "rollouts"


def truncate_history(folder: Path, batches: int) -> None:
    """Remove broken lines, and the entries of all but the first `batches` batches, from the history in the run folder
    `folder`."""
    path = folder / HISTORY
    if not path.exists():
        return
    remaining = [json.dumps(entry) + "\n" for entry in json_objects(path) if _batch_of(entry) < batches]
    replace_text(path, "".join(remaining))


def _batch_of(entry: dict[str, Any]) -> float:
    """Return the number of the batch of `entry`; infinity for an entry without one, which is then removed."""
    number = entry.get("batch")
    return number if isinstance(number, int) else math.inf


def append_history(
    folder: Path, batch: int, step: int, groups: Sequence[tuple[Group, Prompt]], *, accepted: bool
) -> None:
    """Append the `groups` of batch number `batch`, which was collected after `step` updates.

    accepted: True for groups that are trained on, False for dropped ones.
    """
    with open_append(folder / HISTORY) as file:
        for group, prompt in groups:
            entry = {
                "batch": batch,
                "step": step,
                "prompt": prompt.number,
                "source": prompt.source,
                "row": prompt.index,
                "accepted": accepted,
                "rewards": [None if math.isnan(reward) else reward for reward in group.rewards],
                "tokens": [len(reply.ids) for reply in group.replies],
                "finish": [reply.finish for reply in group.replies],
                "versions": [reply.version for reply in group.replies],
                "checksums": [zlib.crc32(reply.ids.tobytes()) for reply in group.replies],
            }
            file.write(json.dumps(entry) + "\n")
