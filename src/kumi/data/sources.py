"""Data sources: expand a source's path to files, and determine the format of each file.

A source's path is a file, a folder, a glob, a URL of one of these (see `kumi.data.remote_sources`), a hub dataset (see
`kumi.hub.datasets`), problems of reasoning-gym (see `kumi.data.gym_source`) or (for `format="indexed"`) the prefix of a
.bin/.idx pair. A folder that `datasets` saved gives the Arrow files that its state.json lists. `{stdlib}` stands for
the standard library of the running interpreter, `~` for the home folder, `{a,b}` for alternatives."""

from __future__ import annotations

import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kumi.data.gym_source import gym_file
from kumi.data.path_patterns import glob_regex, is_skipped
from kumi.data.remote_sources import fetch_source
from kumi.errors import ConfigError
from kumi.files.untrusted import INDEX, brief, inside, read_object
from kumi.hub.datasets import fetch_dataset, is_dataset
from kumi.paths import shown_path
from kumi.remote.addresses import is_url
from kumi.spec.data_source import FORMATS, Source, is_gym

COMPRESSIONS = (".gz", ".zst")
# Files that `datasets` writes with save_to_disk.
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
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
    """A data path that matches no file, or a file of unknown format."""


def expand(source: Source) -> list[Path]:
    """Return the files of `source` as absolute paths, sorted by name; for indexed data the .idx files.

    In a folder, names that begin with a dot and `__pycache__` are skipped. Raise DataPathError when no file matches,
    or a file's suffix names no known format."""
    if is_gym(source.path):
        return [gym_file(source.path)]
    if is_hub_source(source):
        return _without_excluded(source, list(fetch_dataset(source.path, source.commits.get(source.path)).files))
    if is_url(source.path):
        return _without_excluded(source, _fetched(source))
    excluded_folders = [glob_regex(pattern) for pattern in source.exclude if pattern.endswith("/**")]
    matches: set[Path] = set()
    for pattern in _alternatives(source.path):
        matches.update(_matches(pattern, source.format == "indexed", excluded_folders))
    if not matches:
        raise DataPathError(f"data source {shown_path(source.path)} matches no file; correct the path")
    return _without_excluded(source, sorted(matches, key=lambda f: f.as_posix()))


def _fetched(source: Source) -> list[Path]:
    """Return the local copies of the files that the URL of `source` names."""
    files: set[Path] = set()
    for url in _choices(source.path):
        fetched = fetch_source(url, source.exclude, source.format == "indexed")
        saved = None if fetched.folder is None else saved_files(fetched.folder)
        files.update(fetched.files if saved is None else saved)
    return sorted(files, key=lambda file: file.as_posix())


def is_hub_source(source: Source) -> bool:
    """Return True if the path of `source` names a dataset of the hub."""
    return source.format != "indexed" and is_dataset(source.path)


def hub_commits(source: Source) -> dict[str, str]:
    """Return the commits at which the paths of `source` that name a dataset of the hub are read."""
    paths = [source.path, *([] if source.validation is None else [source.validation])]
    named = [path for path in paths if is_hub_source(replace(source, path=path))]
    return {path: fetch_dataset(path, source.commits.get(path)).snapshot.commit for path in named}


def _without_excluded(source: Source, matches: list[Path]) -> list[Path]:
    """Return the files that `exclude` leaves. Raise DataPathError if there are none, or one is of no known format."""
    excluded = [glob_regex(pattern) for pattern in source.exclude]
    files = [f for f in matches if not _is_excluded(f.as_posix(), excluded)]
    if not files:
        raise DataPathError(
            f"data source {source.path!r}: exclude={list(source.exclude)} removes all {len(matches)} files; correct "
            "exclude"
        )
    _refuse_unknown(source, files)
    _refuse_irregular(source, files)
    return files


def would_read(source: Source, path: Path) -> bool:
    """Return True if a file at the absolute `path` would belong to `source`; the file need not exist.

    Always False for indexed data, reasoning-gym, datasets of the hub and URLs.
    """
    if (
        source.format == "indexed"
        or is_gym(source.path)
        or is_dataset(source.path)
        or is_url(source.path)
        or any(glob_regex(pattern).fullmatch(path.as_posix()) for pattern in source.exclude)
    ):
        return False
    return any(_covers(pattern, path) for pattern in _alternatives(source.path))


def _covers(pattern: str, path: Path) -> bool:
    """Return True if `pattern`, a glob or an existing folder, includes `path`."""
    if not os.path.isdir(pattern):
        return glob_regex(pattern).fullmatch(path.as_posix()) is not None
    folder, real = Path(os.path.realpath(pattern)), Path(os.path.realpath(path))
    return real.is_relative_to(folder) and not any(is_skipped(part) for part in real.relative_to(folder).parts)


def file_format(path: Path, fmt: str = "auto") -> str | None:
    """Return the format of `path`: `fmt`, or for "auto" the format of its suffix; None for an unknown suffix."""
    if fmt != "auto":
        return fmt
    suffix = _inner_suffix(path)
    if suffix in _JSONL:
        return "jsonl"
    if suffix in (".parquet", ".json", ".arrow"):
        return suffix.removeprefix(".")
    return "text" if suffix in _TEXT else None


def compression(path: Path) -> str:
    """Return the compression of `path` by its suffix: ".gz", ".zst" or ""."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def _inner_suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if compression(path) else path.suffix.lower()


def _refuse_unknown(source: Source, files: list[Path]) -> None:
    """Raise DataPathError if a file has a suffix of no known format."""
    unknown = [f for f in files if file_format(f, source.format) is None]
    if unknown:
        shown = ", ".join(str(f) for f in unknown[:3]) + (" ..." if len(unknown) > 3 else "")
        raise DataPathError(
            f"data source {source.path!r}: {len(unknown)} of {len(files)} files have a suffix of no known format "
            f"({shown}); set format to one of {', '.join(FORMATS[1:])}, select files with a glob such as "
            "'**/*.jsonl', or leave these out with exclude"
        )


def _refuse_irregular(source: Source, files: list[Path]) -> None:
    """Raise DataPathError for a path that is no regular file, or whose name is not UTF-8."""
    irregular = next((f for f in files if not f.is_file()), None)
    if irregular is not None:
        raise DataPathError(
            f"data source {source.path!r}: {irregular} is a broken link, a pipe or a device, not a file; remove it, or "
            "leave it out with exclude"
        )
    undecodable = next((f for f in files if not str(f).isprintable() and not _is_unicode(str(f))), None)
    if undecodable is not None:
        raise DataPathError(f"data source {source.path!r}: the name {str(undecodable)!r} is not UTF-8; rename the file")


def _is_unicode(name: str) -> bool:
    """Return False if a file's name has undecodable bytes, which Python represents as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _alternatives(path: str) -> Iterator[str]:
    """Yield `path` with each choice of `{a,b}`, and with `~` and `{stdlib}` expanded."""
    for text in _choices(path):
        stdlib = sysconfig.get_paths()["stdlib"]
        text = text.replace("{stdlib}", glob.escape(stdlib) if glob.has_magic(text) else stdlib)
        yield os.path.abspath(os.path.expanduser(text))


def _choices(path: str) -> Iterator[str]:
    """Yield `path` with each choice of `{a,b}`."""
    pieces = re.split(r"\{([^{}]*,[^{}]*)\}", path)
    choices = [piece.split(",") if number % 2 else [piece] for number, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _matches(pattern: str, indexed: bool, excluded: Sequence[re.Pattern[str]]) -> Iterator[Path]:
    """Yield the files that `pattern` matches, without descending into folders that `excluded` removes entirely."""
    path = Path(pattern)
    if indexed:
        yield from _indexed_matches(pattern)
    elif path.is_dir():
        saved = saved_files(path)
        yield from _walk(path, excluded) if saved is None else saved
    elif path.is_file():
        yield path
    elif "**" in pattern and "[" not in pattern:
        plain = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        regex = glob_regex(pattern)
        yield from (file for file in _walk(Path(*plain), excluded) if regex.fullmatch(file.as_posix()))
    elif glob.has_magic(pattern):
        yield from (Path(name) for name in glob.iglob(pattern, recursive=True) if os.path.isfile(name))


def saved_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a folder that `datasets` saved; None for another folder.

    Raise DataPathError for a folder of several splits, or a damaged state.json."""
    if (folder / _SPLITS).is_file():
        splits = read_object(folder, _SPLITS, DataPathError).get("splits")
        shown = ", ".join(map(brief, splits[:8])) if isinstance(splits, list) else "none"
        raise DataPathError(f"data source {str(folder)!r} has several splits ({shown}); name the folder of one of them")
    if not (folder / _STATE).is_file() or not (folder / _INFO).is_file():
        return None
    state = read_object(folder, _STATE, DataPathError, INDEX)
    entries = state.get("_data_files")
    listed = entries if isinstance(entries, list) else []
    names = [str(entry["filename"]) for entry in listed if isinstance(entry, dict) and "filename" in entry]
    if not names or len(names) < len(listed):
        raise DataPathError(f"{folder / _STATE}: lists no data files; save the dataset again")
    if state.get("_indices_data_files"):
        raise DataPathError(
            f"{folder}: has a selection of rows that an older `datasets` saved; load it with `datasets` and save it "
            "again"
        )
    return [inside(folder, name, DataPathError) for name in names]


def _indexed_matches(pattern: str) -> Iterator[Path]:
    """Yield the .idx files that `pattern` names: all of a folder, or those of a prefix or glob."""
    if os.path.isdir(pattern):
        yield from sorted(Path(pattern).glob("*.idx"))
        return
    stem = pattern[:-4] if pattern.endswith((".bin", ".idx")) else pattern
    names = [stem + ".idx"] if os.path.isfile(stem + ".idx") else glob.iglob(stem + ".idx", recursive=True)
    yield from (Path(name) for name in names)


def _walk(folder: Path, excluded: Sequence[re.Pattern[str]]) -> Iterator[Path]:
    """Yield the files below `folder` that are neither hidden nor in an excluded folder.

    Links to folders are followed; each folder is read once.
    """
    visited = set()
    for root, folders, names in os.walk(folder, onerror=_refuse_unlistable, followlinks=True):
        real = os.path.realpath(root)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(f for f in folders if not is_skipped(f) and not _is_excluded(f"{root}/{f}/x", excluded))
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _is_excluded(path: str, excluded: Sequence[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(path) for pattern in excluded)


def _refuse_unlistable(error: OSError) -> None:
    raise DataPathError(f"{error.filename}: the folder cannot be listed ({error.strerror}); make it readable")
