"""The record of a submitted job, in the folder of the launcher's file: `kumi status`, `stop` and `logs` read it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from kumi.errors import ConfigError, RefusedError
from kumi.files.output import write_text
from kumi.files.untrusted import CONFIG, read_bytes, strict_json

_FILE = "launch.json"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class LaunchRecord:
    """A submitted job. `kind`: its launcher. `id`: how the launcher calls it. `folder`: the folder of the record."""

    kind: str
    id: str
    folder: Path
    submitted: str  # local time, ISO 8601
    output: str = ""  # folder of the job's output; "": `folder`

    @property
    def output_folder(self) -> Path:
        """The folder of the job's output."""
        return Path(self.output) if self.output else self.folder


@dataclass(frozen=True)
class JobState:
    """The state of a job. `word`: the launcher's own word for the state. `detail`: more about it."""

    word: str
    detail: str


def write_record(record: LaunchRecord) -> None:
    """Write `record` to its folder."""
    fields = {"kind": record.kind, "id": record.id, "submitted": record.submitted}
    fields |= {"output": record.output} if record.output else {}
    write_text(record.folder / _FILE, json.dumps(fields, indent=1) + "\n")


def has_record(folder: Path) -> bool:
    """Return True if `folder` has the record of a submitted job."""
    return (folder / _FILE).is_file()


def read_record(folder: Path) -> LaunchRecord:
    """Return the record in `folder`. Raise ConfigError if nothing was submitted, RefusedError if it is damaged."""
    if not has_record(folder):
        raise ConfigError(
            f"{folder / _FILE} does not exist, so kumi has submitted no job of this run; use kumi launch with --submit"
        )
    try:
        written = strict_json(read_bytes(folder, _FILE, RefusedError), CONFIG)
        record = LaunchRecord(folder=folder, **written)
        # The id becomes an argument of programs such as scancel, so that it must not look like an option.
        words = (record.kind, record.submitted, record.output)
        if not _ID.fullmatch(record.id) or not all(isinstance(word, str) for word in words):
            raise ValueError("it names no job")
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"{folder / _FILE} is damaged ({error}); remove it, and use the launcher's own commands"
        ) from None
    return record
