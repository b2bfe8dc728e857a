"""What is believed of files from elsewhere: names stay in their folder, JSON says everything once.

A folder may come from anyone. Whatever a file in it names is opened only by way of `inside`, and whatever it says in
JSON is parsed by `strict_json` only.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from kumi.errors import ConfigError, ModelError

# A file in a hub's cache is a link snapshots/<revision>/<name> -> ../../blobs/<hash of its content>.
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

# More JSON than this belongs to no model: transformers' largest index is 15 MB, and safetensors allows 100 MB.
MAX_JSON_BYTES = 100_000_000


def inside(folder: Path, name: str, error: type[ConfigError] = ModelError) -> Path:
    """The file `name` of `folder`, links resolved, whether it exists or not.

    `error` where the name is no plain file name, or is a link that leads out of the folder. Allowed are links within
    the folder, and those of a hub's cache, whose snapshots link to the blobs beside them.
    """
    plain = name.isprintable() and len(name.encode()) <= 255 and "/" not in name and "\\" not in name
    if not plain or name in ("", ".", ".."):
        raise error(f"{folder}: {name!r} is no plain file name; a file that leads out of its folder is not opened")
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(home / name))
    if real.is_relative_to(home):
        return real
    cached = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if cached and _BLOB.fullmatch(real.name):
        return real
    raise error(f"{folder}: {name!r} is a link to {real}, out of the folder; copy the file there, or name its folder")


def open_regular(path: Path) -> int:
    """A handle on the file `path`, from `inside`, for reading; OSError where it is none, or no regular file.

    Links are not followed any more, and nothing waits: a pipe or a device could otherwise keep the reader for ever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no regular file")
    return handle


def read_regular(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """All bytes of the file `path`; ValueError when there are more than `limit`."""
    handle = open_regular(path)
    with os.fdopen(handle, "rb") as file:
        size = os.fstat(handle).st_size
        if size > limit:
            raise ValueError(f"its {size} bytes are more than the {limit} that such a file may have")
        return file.read()


def strict_json(raw: bytes) -> Any:
    """What the JSON text `raw` says; ValueError where it is none, has a key twice, or numbers that are none."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
