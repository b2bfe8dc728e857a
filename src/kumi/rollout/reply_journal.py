"""The file of the replies and outcomes of the batch that is being collected, so that a killed run does not lose them.

    rollouts/batch-<version>-<settings>.jsonl   a line for the replies of a chunk, and one for the outcomes of a round

A chunk is the replies that are generated together, a round the groups that are scored together. A reply belongs to the
weights that generated it. Another version or other settings begin a new file, and older files are removed: their groups
are in a checkpoint, or will be generated again. The replies of a chunk are one line, so that a killed run leaves all of
them or none: the last digits of log-probs depend on the replies that are decoded together. The outcomes of a round are
one line, because the last digits of a reward model's scores depend on the replies that are scored together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from kumi.files.json_lines import json_objects
from kumi.files.output import make_folder, open_append
from kumi.parallel.mesh import Mesh, broadcast_object
from kumi.rollout.group import GeneratedReply, Outcome, plain_outcomes, read_outcomes, read_reply

# (number of the prompt, number of the reply in its group) -> the reply
Replies = dict[tuple[int, int], GeneratedReply]
# number of the prompt -> outcomes of its replies
Outcomes = dict[int, tuple[Outcome, ...]]


class ReplyJournal:
    """The file of one batch: what earlier attempts at the batch have finished, and what this attempt finishes.

    folder: `rollouts` of the run folder. version: number of updates before the batch. digest: a digest of the settings
    on which replies and outcomes depend. Every rank makes a journal at the same time; rank 0 reads and writes the file.
    """

    def __init__(self, folder: Path, version: int, digest: str, mesh: Mesh) -> None:
        self.replies: Replies = {}
        self.outcomes: Outcomes = {}
        self._file: IO[str] | None = None
        if mesh.rank == 0:
            make_folder(folder)
            path = folder / f"batch-{version}-{digest}.jsonl"
            for other in folder.glob("batch-*.jsonl"):
                if other != path:
                    other.unlink()
            self._read(path)
            self._file = open_append(path)
            self._file.write("\n")  # a killed process may have left half a line
        self.replies, self.outcomes = broadcast_object((self.replies, self.outcomes), mesh)

    def add_replies(self, replies: Replies) -> None:
        """Add the replies of a chunk, the same on all ranks."""
        self.replies |= replies
        plain = [{"prompt": prompt, "sample": sample, **reply.plain()} for (prompt, sample), reply in replies.items()]
        self._append({"replies": plain})

    def add_outcomes(self, outcomes: Outcomes) -> None:
        """Add the outcomes of the groups of a round, the same on all ranks."""
        self.outcomes |= outcomes
        plain = [{"prompt": prompt, **plain_outcomes(of_group)} for prompt, of_group in outcomes.items()]
        self._append({"scored": plain})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def _read(self, path: Path) -> None:
        for record in json_objects(path):
            try:
                if "replies" in record:
                    self.replies |= {
                        (int(plain["prompt"]), int(plain["sample"])): read_reply(plain) for plain in record["replies"]
                    }
                else:
                    self.outcomes |= {int(plain["prompt"]): read_outcomes(plain) for plain in record["scored"]}
            except (KeyError, TypeError, ValueError):
                continue  # damaged: generated or scored again
