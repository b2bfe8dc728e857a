"""Files of prompts, and the file of replies, to which each reply is appended, so that a killed job can go on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.data.record_files import Fault, open_bytes
from kumi.data.row_files import read_rows
from kumi.data.sources import file_format
from kumi.errors import ConfigError, DataError, RefusedError
from kumi.files.output import open_append
from kumi.files.untrusted import strict_json
from kumi.inference.prompt_encoder import Prompt
from kumi.inference.text_generator import TextReply
from kumi.paths import shown_path

# The largest file of prompts in plain text.
_MAX_TEXT = 1 << 30


@dataclass(frozen=True)
class PromptRow:
    """A prompt of a file. `columns`: the row's other columns, such as "tools" and "id"; `line` counts from 1."""

    line: int
    prompt: Prompt
    columns: Mapping[str, Any]


def read_prompts(path: Path, key: str = "--prompts") -> list[PromptRow]:
    """Return the prompts of a file: each line of a .txt that is not blank, or each row of .jsonl, .json or .parquet.

    A row has "prompt", a text or messages, or "messages". Raise ConfigError for another file; its message begins with
    `key`, the flag or key that names the file. Raise DataError for a row that cannot be read.
    """
    if not path.is_file():
        raise ConfigError(f"{key} {shown_path(path)}: is no file; name a .txt or .jsonl file")
    kind = file_format(path)
    if kind == "text":
        rows = list(_text_prompts(path, key))
    elif kind is not None:
        rows = [_prompt_row(item, path) for item in read_rows(path, kind)]
    else:
        raise ConfigError(f"{key} {path}: its suffix is none of .txt, .jsonl, .json, .parquet, .arrow; rename it")
    if not rows:
        raise ConfigError(f"{key} {path}: has no prompts; write one on each line")
    return rows


def _text_prompts(path: Path, key: str) -> Iterator[PromptRow]:
    """Yield a prompt for each line of a text file that is not blank."""
    with open_bytes(path) as file:
        raw = file.read(_MAX_TEXT + 1)
    if len(raw) > _MAX_TEXT:
        raise ConfigError(f"{key} {path}: is larger than 1 GiB; write the prompts as .jsonl, or split the file")
    for line, text in enumerate(raw.split(b"\n"), 1):
        try:
            prompt = text.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{line}: is not UTF-8 at byte {error.start} of the line; save it as UTF-8"
            ) from None
        if prompt.strip():
            yield PromptRow(line, prompt, {})


def _prompt_row(item: tuple[int, dict[str, Any]] | Fault, path: Path) -> PromptRow:
    """Return the prompt of `item`, a row with the number of its line. Raise DataError for a row without a prompt."""
    if isinstance(item, Fault):
        raise DataError(f"{path}:{item.line}: {item.reason}; correct the row, or remove it")
    line, row = item
    columns = dict(row)
    prompt = columns.pop("prompt", None)
    if prompt is None:
        prompt = columns.pop("messages", None)
    is_messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not prompt or not (isinstance(prompt, str) or is_messages):
        raise DataError(
            f"{path}:{line}: has neither a text nor messages in prompt (or messages); add one, or remove the row"
        )
    return PromptRow(line, prompt, columns)


def prompt_digest(ids: Sequence[int]) -> str:
    """Return a hash of the ids of a prompt."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


class ReplyFile:
    """An open file of replies, as JSON lines of `reply_record`.

    done: (line of the prompt, sample) of each reply in the file -> the digest of its prompt.
    """

    def __init__(self, path: Path, handle: int, settings: str) -> None:
        self._path, self._handle, self._settings = path, handle, settings
        self.done: dict[tuple[int, int], str] = {}
        self._read()

    def _read(self) -> None:
        """Read the replies of an earlier job, and cut off a last line that it did not finish."""
        os.lseek(self._handle, 0, os.SEEK_SET)  # a file that is open for appending begins at its end
        content = b"".join(iter(lambda: os.read(self._handle, 1 << 24), b""))
        complete, _, rest = content.rpartition(b"\n")
        for file_line, raw in enumerate(complete.split(b"\n") if complete else [], 1):
            self._add(file_line, raw)
        if rest and not complete and not self._begins_a_record(rest):
            raise self._not_a_reply(1)
        if rest:
            os.ftruncate(self._handle, len(content) - len(rest))

    def _begins_a_record(self, rest: bytes) -> bool:
        """Return True if `rest` can be the beginning of a line that kumi wrote."""
        start = b'{"line": '
        return rest.startswith(start) or start.startswith(rest)

    def _add(self, file_line: int, raw: bytes) -> None:
        """Note the reply in a line of the file. Raise RefusedError for a line that this job would not write."""
        try:
            record = strict_json(raw)
            line, sample = int(record["line"]), int(record["sample"])
            digest, settings = str(record["prompt_digest"]), str(record["settings_digest"])
        except (ValueError, KeyError, TypeError):
            raise self._not_a_reply(file_line) from None
        if settings != self._settings:
            raise RefusedError(
                f"--out {self._path}: its line {file_line} was written with other settings or another model; give the "
                "settings and the model of that line, or name another file"
            )
        self.done[line, sample] = digest

    def _not_a_reply(self, file_line: int) -> RefusedError:
        return RefusedError(
            f"--out {self._path}: line {file_line} is no reply of kumi generate, and nothing is overwritten; name "
            "another file"
        )

    def has(self, line: int, sample: int, digest: str) -> bool:
        """Return whether the file has reply `sample` to the prompt on `line`, whose digest is `digest`.

        Raise RefusedError if that reply answers another prompt.
        """
        stored = self.done.get((line, sample))
        if stored not in (None, digest):
            raise RefusedError(
                f"--out {self._path}: has a reply to another prompt on line {line}, because --prompts has changed; "
                "name another file"
            )
        return stored is not None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line, in one write if the system takes it whole, so that no reader sees half of it."""
        line = (json.dumps({**record, "settings_digest": self._settings}) + "\n").encode()
        while line:
            line = line[os.write(self._handle, line) :]


@contextmanager
def open_replies(path: Path, settings: str) -> Iterator[ReplyFile]:
    """Open the file of replies `path` for appending. `settings`: the digest of model and settings.

    Raise RefusedError if another process writes it, or if it has anything but replies of these settings.
    """
    with open_append(path) as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(f"--out {path}: another process writes it; wait for it, or name another file") from None
        yield ReplyFile(path, file.fileno(), settings)
        os.fsync(file.fileno())


def reply_record(row: PromptRow, ids: Sequence[int], reply: TextReply) -> dict[str, Any]:
    """Return the line for a reply to `row`, the prompt `ids`: the prompt, the text, and why the reply ended.

    A column "id" of the prompt's row is in the line, too.
    """
    extra = {"id": row.columns["id"]} if "id" in row.columns else {}
    return {
        "line": row.line,
        "sample": reply.sample,
        **extra,
        "prompt": row.prompt,
        "reply": reply.text,
        "finish": reply.finish,
        "prompt_tokens": len(ids),
        "tokens": len(reply.ids),
        "mean_log_prob": reply.mean_log_prob,
        "prompt_digest": prompt_digest(ids),
    }
