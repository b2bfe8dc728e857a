"""Read files that others made: the only place that opens them.

A model folder, a data set or a run folder may come from anyone. Each file is a regular one (no pipe, no device), is
reached by no link out of its folder, and has no more bytes, values or levels than its kind needs. JSON is strict: no
key twice, no number that is infinite or longer than any that means something.

Run files and cluster files are named by the user, so a link may lead to them; all other bounds hold.
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

# A file in a hub's cache is a link snapshots/<revision>/<name> -> ../../blobs/<hash of its content>.
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_DIGITS = 40  # transformers writes 10**30, with 31 digits, for a tokenizer without a limit
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# A dotted TOML key of more than 32 words, which takes tomllib quadratic time.
_LONG_KEY = re.compile(
    r"""(?<![\w"'.-])(?:[\w-]+|"[^"\n]*"|'[^'\n]*')(?:[ \t]*\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')){32}"""
)


@dataclass(frozen=True)
class Bounds:
    """The most that a kind of file may hold: `size` bytes, `values` (counted generously), `depth` levels of nesting."""

    size: int
    values: int
    depth: int = 64


# The largest of each kind that is published: a config.json with the list of modules that are not quantised has 0.2 MB,
# an index 15 MB, a tokenizer.json 35 MB with 1.5 million values. safetensors itself allows a header of 100 MB.
CONFIG = Bounds(4 * 2**20, 200_000)
INDEX = Bounds(100_000_000, 8_000_000)
TOKENIZER = Bounds(256 * 2**20, 16_000_000)
RUN_FILE = Bounds(2**20, 100_000)


def inside(folder: Path, name: str, error: type[ConfigError] = ModelError) -> Path:
    """Return the file `name` of `folder` with links resolved; it need not exist.

    Raise `error` when the name is no plain file name, or is a link that leads out of the folder. Links within the
    folder are followed, and so are those of a hub's cache, whose snapshots link to the blobs beside them.
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


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Return a handle for reading the file `path`, which comes from `inside`; OSError when it is no regular file.

    A last link is followed only with `follow`. Opening never waits: a pipe without a writer would block for ever.
    """
    _check_regular(path, os.stat(path, follow_symlinks=follow).st_mode)  # opening a device may do something already
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
        raise kind(f"{path} is no regular file")


def open_stream(
    path: Path, *, follow: bool = False, buffering: int = io.DEFAULT_BUFFER_SIZE
) -> io.BufferedReader[io.FileIO]:
    """Open the regular file `path` for reading bytes; OSError when it is something else."""
    return io.BufferedReader(io.FileIO(open_regular(path, follow=follow), "rb"), buffering)


def read_regular(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """Return the bytes of the regular file `path`; ValueError when there are more than `limit`."""
    with open_stream(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(limit + 1) if size <= limit else b""
        if max(size, len(raw)) > limit:
            raise ValueError(f"its {max(size, len(raw))} bytes are more than the {limit} that such a file may have")
        return raw


def read_object(
    folder: Path, name: str, error: type[ConfigError] = ModelError, bounds: Bounds = CONFIG, *, infinity: bool = False
) -> dict[str, Any]:
    """Return the JSON object in the file `name` of `folder`; raise `error` unless it is one within `bounds`.

    Python writes an infinite number as Infinity, which is no JSON; it is accepted with `infinity`.
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
    """Return the bytes of the file `name` of `folder`; raise `error` when it cannot be read or has too many."""
    try:
        return read_regular(inside(folder, name, error), limit)
    except FileNotFoundError:
        raise error(f"{folder / name} does not exist; name a folder that has it") from None
    except (OSError, ValueError) as reason:
        raise error(f"{folder / name}: cannot be read ({explain(reason)}); fetch the file again") from None


def explain(error: Exception) -> str:
    """Return the reason of an OSError or ValueError without numbers of the operating system."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def strict_json(raw: bytes, bounds: Bounds = INDEX, *, infinity: bool = False) -> Any:
    """Return what the JSON text `raw` says; ValueError unless it is strict JSON within `bounds` of values and depth."""
    containers = raw.count(b"[") + raw.count(b"{")
    if raw.count(b",") + containers > bounds.values:
        raise ValueError(f"it has more than the {bounds.values} values that such a file may have")
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
            raise ValueError("a text has half a surrogate pair, which is no character") from None
    return value


def json_record(text: str) -> Any:
    """Return what `text`, one record of a data set, says; ValueError or RecursionError when it is no JSON.

    Only repeated keys are refused besides: a record may hold any numbers, of which training reads none.
    """
    return _RECORD.decode(text)


def _levels(value: Any) -> Iterator[int]:
    """Yield the level of every container in `value`."""
    waiting = [(value, 1)]
    while waiting:
        container, level = waiting.pop()
        yield level
        inner = container.values() if isinstance(container, dict) else container if isinstance(container, list) else ()
        waiting += [(item, level + 1) for item in inner if isinstance(item, dict | list)]


def read_toml(path: Path) -> dict[str, Any]:
    """Return what the TOML file `path` says; OSError or ValueError when it is none, or is beyond `RUN_FILE`."""
    return parse_toml(read_regular(path, RUN_FILE.size, follow=True))


def parse_toml(raw: bytes) -> dict[str, Any]:
    """Return what the TOML text `raw` says; ValueError when it is none, or is beyond `RUN_FILE`."""
    text = raw.decode("utf-8")
    if raw.count(b",") + raw.count(b"=") + raw.count(b"[") > RUN_FILE.values:
        raise ValueError(f"it has more than the {RUN_FILE.values} values that such a file may have")
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
    """Return `repr(value)`, cut where it is long: a sentence shows what is wrong, not all of a file."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {brief(twice)} is there twice")
    return items


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits is none that such a file needs")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is beyond the range of numbers")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _infinite(text: str) -> float:
    return _no_number(text) if text == "NaN" else float(text)


_STRICT, _LENIENT = (
    json.JSONDecoder(object_pairs_hook=_once, parse_int=_integer, parse_float=_finite, parse_constant=constant)
    for constant in (_no_number, _infinite)
)
_RECORD = json.JSONDecoder(object_pairs_hook=_once)
