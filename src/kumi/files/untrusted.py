"""Read untrusted files; no other module opens them.

A model folder, a data set or a run folder may come from anyone. kumi reads only regular files (no pipe, no device), and
follows no link out of their folder. Bytes, values and levels of nesting are limited for each kind of file. JSON is
strict: no repeated key, no infinite number, no number of more than 40 digits.

Run files and cluster files are named by the user, so these files may be links; all other limits apply to them, too.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kumi.errors import ConfigError, ModelError

# A file in the hub client's cache is a link snapshots/<revision>/<name> -> ../../blobs/<hash of its content>.
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_DIGITS = 40  # transformers writes 10**30, a number of 31 digits, for a tokenizer without a maximum length
# JSON's escape of half a surrogate pair, such as \ud83d: valid only beside the other half.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# A dotted TOML key of more than 32 parts; tomllib needs quadratic time for it.
_LONG_KEY = re.compile(
    r"""(?<![\w"'.-])(?:[\w-]+|"[^"\n]*"|'[^'\n]*')(?:[ \t]*\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')){32}"""
)


@dataclass(frozen=True)
class Bounds:
    """Limits of a kind of file.

    size: bytes.
    values: number of values, estimated from above by the number of commas and opening brackets.
    depth: levels of nesting.
    """

    size: int
    values: int
    depth: int = 64


# The largest published files: a config.json that lists unquantized modules has 0.2 MB, an index 15 MB, a tokenizer.json
# 35 MB with 1.5 million values. safetensors itself allows a header of 100 MB.
CONFIG = Bounds(4 * 2**20, 200_000)
INDEX = Bounds(100_000_000, 8_000_000)
TOKENIZER = Bounds(256 * 2**20, 16_000_000)
RUN_FILE = Bounds(2**20, 100_000)


def inside(folder: Path, name: str, error: type[ConfigError] = ModelError) -> Path:
    """Return the path of the file `name` in `folder` with links resolved; it need not exist.

    Raise `error` when `name` is not a plain file name, or is a link out of the folder. Links within the folder are
    followed, and so are links from a snapshot in the hub client's cache to its blobs.
    """
    plain = name.isprintable() and len(name.encode()) <= 255 and "/" not in name and "\\" not in name
    if not plain or name in ("", ".", ".."):
        raise error(f"{folder}: {name!r} is not a plain file name; kumi opens only files inside this folder")
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(home / name))
    if real.is_relative_to(home):
        return real
    cached = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if cached and _BLOB.fullmatch(real.name):
        return real
    raise error(f"{folder}: {name!r} is a link to {real}, out of the folder; copy the file there, or name its folder")


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Return a file descriptor for reading `path`, which `inside` checked. Raise OSError unless it is a regular file.

    If `path` itself is a link, it is followed only with `follow`. Opening does not block, not even on a pipe without a
    writer.
    """
    # Checked before opening as well: to open a device may have effects.
    _check_regular(path, os.stat(path, follow_symlinks=follow).st_mode)
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags if follow else flags | getattr(os, "O_NOFOLLOW", 0))
    try:
        _check_regular(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = IsADirectoryError if stat.S_ISDIR(mode) else OSError
        raise kind(f"{path} is not a regular file")


def open_stream(
    path: Path, *, follow: bool = False, buffering: int = io.DEFAULT_BUFFER_SIZE
) -> io.BufferedReader[io.FileIO]:
    """Open the file `path` for reading bytes. Raise OSError unless it is a regular file."""
    return io.BufferedReader(io.FileIO(open_regular(path, follow=follow), "rb"), buffering)


def read_regular(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """Return the bytes of the regular file `path`. Raise ValueError when there are more than `limit`."""
    with open_stream(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(limit + 1) if size <= limit else b""
        if max(size, len(raw)) > limit:
            raise ValueError(f"it has {max(size, len(raw))} bytes, more than the limit of {limit}")
        return raw


def read_object(
    folder: Path, name: str, error: type[ConfigError] = ModelError, bounds: Bounds = CONFIG, *, infinity: bool = False
) -> dict[str, Any]:
    """Return the JSON object in the file `name` of `folder`; raise `error` unless it is valid and within `bounds`.

    With `infinity`, `Infinity` is accepted: Python writes it, although JSON does not define it.
    """
    raw = read_bytes(folder, name, error, bounds.size)
    try:
        value = strict_json(raw, bounds, infinity=infinity)
    except ValueError as reason:
        raise error(f"{folder / name}: not valid JSON: {reason}; fetch the file again") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise error(f"{folder / name}: holds a {kind}, not an object; fetch the file again")
    return value


def read_bytes(folder: Path, name: str, error: type[ConfigError] = ModelError, limit: int = CONFIG.size) -> bytes:
    """Return the bytes of the file `name` of `folder`; raise `error` when it is unreadable or larger than `limit`."""
    try:
        return read_regular(inside(folder, name, error), limit)
    except FileNotFoundError:
        raise error(f"{folder / name} does not exist; name a folder that has it") from None
    except (OSError, ValueError) as reason:
        raise error(f"{folder / name}: cannot be read ({explain(reason)}); fetch the file again") from None


def explain(error: Exception) -> str:
    """Return the reason of an OSError or ValueError, without error numbers."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def strict_json(raw: bytes, bounds: Bounds = INDEX, *, infinity: bool = False) -> Any:
    """Return the value of the JSON text `raw`. Raise ValueError unless it is strict JSON within `bounds`."""
    containers = raw.count(b"[") + raw.count(b"{")
    if raw.count(b",") + containers > bounds.values:
        raise ValueError(f"it has more than the limit of {bounds.values} values")
    try:
        value = (_LENIENT if infinity else _STRICT).decode(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if containers > bounds.depth and any(level > bounds.depth for level in _levels(value)):
        raise ValueError(f"it is nested too deeply: more than {bounds.depth} levels")
    if _SURROGATE.search(raw):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a string has half a surrogate pair, which is not a character") from None
    return value


def json_record(text: str) -> Any:
    """Return the value of `text`, one JSON record of a data set. Raise ValueError or RecursionError if it is invalid.

    Repeated keys are refused. Numbers are not limited, because training does not read them.
    """
    return _RECORD.decode(text)


def json_prefix(text: str, start: int) -> tuple[Any, int]:
    """Return the value of the JSON record that begins at `start` of `text`, and the position behind it.

    Raise ValueError or RecursionError as `json_record` does.
    """
    return _RECORD.raw_decode(text, start)


def _levels(value: Any) -> Iterator[int]:
    """Yield the level of every container in `value`."""
    pending = [(value, 1)]
    while pending:
        container, level = pending.pop()
        yield level
        inner = container.values() if isinstance(container, dict) else container if isinstance(container, list) else ()
        pending += [(item, level + 1) for item in inner if isinstance(item, dict | list)]


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of the TOML file `path`. Raise OSError or ValueError if it is invalid or beyond `RUN_FILE`."""
    return parse_toml(read_regular(path, RUN_FILE.size, follow=True))


def parse_toml(raw: bytes) -> dict[str, Any]:
    """Return the content of the TOML text `raw`. Raise ValueError if it is invalid or beyond `RUN_FILE`."""
    text = raw.decode("utf-8")
    if raw.count(b",") + raw.count(b"=") + raw.count(b"[") > RUN_FILE.values:
        raise ValueError(f"it has more than the limit of {RUN_FILE.values} values")
    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 32 parts")
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if any(level > RUN_FILE.depth for level in _levels(value)):
        raise ValueError(f"it is nested too deeply: more than {RUN_FILE.depth} levels")
    return value


def brief(value: Any, limit: int = 120) -> str:
    """Return `repr(value)` for an error message, truncated to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the items of a JSON object as a dict. Raise ValueError for a repeated key."""
    items = dict(pairs)
    if len(items) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {brief(repeated)} is repeated")
    return items


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits, more than the limit of {_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is beyond the range of a float")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _infinite(text: str) -> float:
    return _refuse_constant(text) if text == "NaN" else float(text)


_STRICT, _LENIENT = (
    json.JSONDecoder(object_pairs_hook=_unique_keys, parse_int=_integer, parse_float=_finite, parse_constant=constant)
    for constant in (_refuse_constant, _infinite)
)
# For records of data, whose numbers are not limited.
_RECORD = json.JSONDecoder(object_pairs_hook=_unique_keys)
