"""Where text comes from: a source names files, and each file has a format.

A source's path is a file, a folder, a glob or (for `format="indexed"`) the prefix of a .bin/.idx pair. `{stdlib}`
stands for the standard library of the running interpreter, `~` for the home folder, `{a,b}` for alternatives."""

from __future__ import annotations

import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from kumi.errors import ConfigError
from kumi.paths import looked_for
from kumi.spec.source import FORMATS, Source

COMPRESSIONS = (".gz", ".zst")
_JSONL = frozenset({".jsonl", ".ndjson"})
_PROSE = (".txt", ".md", ".rst", ".tex", ".org", ".html", ".xml")
_CODE = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".java",
    ".js",
    ".ts",
    ".go",
    ".rs",
    ".rb",
    ".sh",
    ".sql",
)
_SETTINGS = (".css", ".toml", ".yaml", ".yml", ".ini", ".cfg")
_TEXT = frozenset({*_PROSE, *_CODE, *_SETTINGS})


class DataPathError(ConfigError):
    """A data path that names nothing, or something whose format is not known."""


def expand(source: Source) -> list[Path]:
    """The files of `source`, absolute and sorted by name; for indexed data the .idx files.

    In a folder, names that begin with a dot and `__pycache__` are left out. Raises DataPathError when nothing is
    left, or when a file's suffix does not say what it is."""
    whole = [_glob_regex(pattern) for pattern in source.exclude if pattern.endswith("/**")]
    found: set[Path] = set()
    for pattern in _alternatives(source.path):
        found.update(_matches(pattern, source.format == "indexed", whole))
    if not found:
        raise DataPathError(f"data source {looked_for(source.path)} matches no file; correct the path")
    excluded = [_glob_regex(pattern) for pattern in source.exclude]
    files = sorted((f for f in found if not _is_excluded(f.as_posix(), excluded)), key=lambda f: f.as_posix())
    if not files:
        raise DataPathError(
            f"data source {source.path!r}: exclude={list(source.exclude)} removes all {len(found)} files"
        )
    _refuse_unknown(source, files)
    _refuse_irregular(source, files)
    return files


def would_read(source: Source, path: Path) -> bool:
    """Whether a file at the absolute `path`, which need not be there, would be one of `source`."""
    if source.format == "indexed" or any(_glob_regex(pattern).fullmatch(path.as_posix()) for pattern in source.exclude):
        return False
    return any(_covers(pattern, path) for pattern in _alternatives(source.path))


def _covers(pattern: str, path: Path) -> bool:
    if not os.path.isdir(pattern):
        return _glob_regex(pattern).fullmatch(path.as_posix()) is not None
    folder, real = Path(os.path.realpath(pattern)), Path(os.path.realpath(path))
    return real.is_relative_to(folder) and not any(_left_out(part) for part in real.relative_to(folder).parts)


def file_format(path: Path, fmt: str = "auto") -> str | None:
    """The format of `path`: `fmt` itself, or, for "auto", what the suffix says; None when it says nothing."""
    if fmt != "auto":
        return fmt
    suffix = _inner_suffix(path)
    if suffix in _JSONL:
        return "jsonl"
    if suffix == ".parquet":
        return "parquet"
    return "text" if suffix in _TEXT else None


def compression(path: Path) -> str:
    """The compression that the name of `path` tells: ".gz", ".zst" or ""."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def _inner_suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if compression(path) else path.suffix.lower()


def _refuse_unknown(source: Source, files: list[Path]) -> None:
    unknown = [f for f in files if file_format(f, source.format) is None]
    if unknown:
        shown = ", ".join(str(f) for f in unknown[:3]) + (" ..." if len(unknown) > 3 else "")
        raise DataPathError(
            f"data source {source.path!r}: {len(unknown)} of {len(files)} files have a suffix that does not say how to "
            f"read them ({shown}); set format to one of {', '.join(FORMATS[1:])}, name the wanted files with a glob "
            "such as '**/*.jsonl', or leave these out with exclude"
        )


def _refuse_irregular(source: Source, files: list[Path]) -> None:
    wrong = next((f for f in files if not f.is_file()), None)
    if wrong is not None:
        raise DataPathError(
            f"data source {source.path!r}: {wrong} is a link to nothing, a pipe or a device, not a file; remove it, or "
            "leave it out with exclude"
        )
    unnamed = next((f for f in files if not str(f).isprintable() and not _is_unicode(str(f))), None)
    if unnamed is not None:
        raise DataPathError(f"data source {source.path!r}: the name {str(unnamed)!r} is not UTF-8; rename the file")


def _is_unicode(name: str) -> bool:
    """Whether all of a file's name could be decoded: what could not is half a surrogate pair in Python."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _alternatives(path: str) -> Iterator[str]:
    """`path` with `{a,b}` written out and `~` and `{stdlib}` filled in."""
    pieces = re.split(r"\{([^{}]*,[^{}]*)\}", path)
    choices = [piece.split(",") if number % 2 else [piece] for number, piece in enumerate(pieces)]
    for combination in itertools.product(*choices):
        text = "".join(combination)
        stdlib = sysconfig.get_paths()["stdlib"]
        text = text.replace("{stdlib}", glob.escape(stdlib) if glob.has_magic(text) else stdlib)
        yield os.path.abspath(os.path.expanduser(text))


def _matches(pattern: str, indexed: bool, excluded: Sequence[re.Pattern[str]]) -> Iterator[Path]:
    """What `pattern` names; folders of which `excluded` leaves nothing are not entered."""
    path = Path(pattern)
    if indexed:
        yield from _indexed_matches(pattern)
    elif path.is_dir():
        yield from _walk(path, excluded)
    elif path.is_file():
        yield path
    elif "**" in pattern and "[" not in pattern:
        plain = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        wanted = _glob_regex(pattern)
        yield from (file for file in _walk(Path(*plain), excluded) if wanted.fullmatch(file.as_posix()))
    elif glob.has_magic(pattern):
        yield from (Path(name) for name in glob.iglob(pattern, recursive=True) if os.path.isfile(name))


def _indexed_matches(pattern: str) -> Iterator[Path]:
    if os.path.isdir(pattern):
        yield from sorted(Path(pattern).glob("*.idx"))
        return
    stem = pattern[:-4] if pattern.endswith((".bin", ".idx")) else pattern
    names = [stem + ".idx"] if os.path.isfile(stem + ".idx") else glob.iglob(stem + ".idx", recursive=True)
    yield from (Path(name) for name in names)


def _walk(folder: Path, excluded: Sequence[re.Pattern[str]]) -> Iterator[Path]:
    """The files below `folder`, through links to folders as well; a folder that is reached again is read once."""
    seen = set()
    for root, folders, names in os.walk(folder, onerror=_unlisted, followlinks=True):
        place = os.path.realpath(root)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(f for f in folders if not _left_out(f) and not _is_excluded(f"{root}/{f}/x", excluded))
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _is_excluded(path: str, excluded: Sequence[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(path) for pattern in excluded)


def _left_out(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _unlisted(error: OSError) -> None:
    raise DataPathError(f"{error.filename}: the folder cannot be listed ({error.strerror}); make it readable")


def _glob_regex(pattern: str) -> re.Pattern[str]:
    """A regex for whole absolute paths; a relative pattern may match from any folder on."""
    text = os.path.expanduser(pattern).replace("{stdlib}", sysconfig.get_paths()["stdlib"])
    if not text.startswith(("/", "**")):
        text = "**/" + text
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\*\*/|\*\*|\*|\?)", text)
    return re.compile("".join(parts.get(token, re.escape(token)) for token in tokens))
