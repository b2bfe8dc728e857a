"""Data sources on object stores: the files that a URL names, fetched into the cache and read there.

A URL is a file, a folder, a glob, or (for indexed data) the prefix of a .bin/.idx pair. A process asks the store once.
"""

from __future__ import annotations

import functools
import glob
from dataclasses import dataclass
from pathlib import Path

from kumi.data.path_patterns import glob_regex, is_skipped
from kumi.errors import ConfigError
from kumi.remote.addresses import check_url
from kumi.remote.fetched_files import fetch_files
from kumi.remote.remote_store import open_store

_KEY = "data source"


@dataclass(frozen=True)
class FetchedSource:
    """Local copies of the `files` that a URL names. folder: the copies' folder if the URL is a folder, else None."""

    files: tuple[Path, ...]
    folder: Path | None


@functools.cache
def fetch_source(url: str, exclude: tuple[str, ...], indexed: bool) -> FetchedSource:
    """Fetch the files that `url` names, without those that the globs `exclude` match.

    `indexed`: `url` may be a prefix, and only the .idx files are returned. Raise ConfigError if there are no files.
    """
    check_url(url, _KEY)
    root, pattern = split_glob(url.rstrip("/"))
    is_folder = not pattern and _is_folder(root)
    if not pattern and not is_folder:
        root, _, pattern = root.rpartition("/")
        pattern = glob.escape(pattern)
    if indexed and pattern:
        stem = pattern.removesuffix(".bin").removesuffix(".idx")
        patterns = [stem + ".bin", stem + ".idx"]
    else:
        patterns = [pattern or "**"]
    chosen = [glob_regex(f"/{glob_pattern}") for glob_pattern in patterns]
    excluded = [glob_regex(glob_pattern) for glob_pattern in exclude]

    def select(name: str) -> bool:
        path = f"/{name}"
        hidden = any(is_skipped(part) for part in name.split("/"))
        return (
            not hidden
            and any(regex.fullmatch(path) for regex in chosen)
            and not any(regex.fullmatch(path) for regex in excluded)
        )

    folder, names = fetch_files(root, _KEY, select)
    files = [folder / name for name in names if not indexed or name.endswith(".idx")]
    return FetchedSource(tuple(files), folder if is_folder else None)


def split_glob(url: str) -> tuple[str, str]:
    """Return the folder of `url` before its first part with a wildcard, and the rest; "" without wildcards."""
    scheme, _, path = url.partition("://")
    parts = path.split("/")
    plain = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    if plain == 0:
        raise ConfigError(f"data source {url!r}: the bucket must have a name without wildcards; correct the URL")
    return f"{scheme}://{'/'.join(parts[:plain])}", "/".join(parts[plain:])


def covers(url: str, other: str) -> bool:
    """Return True if the source `url` would read the file `other` of a store, which need not exist."""
    root, pattern = split_glob(url.rstrip("/"))
    if not other.startswith(f"{root}/"):
        return False
    name = other.removeprefix(f"{root}/")
    return not pattern or glob_regex(f"/{pattern}").fullmatch(f"/{name}") is not None


def _is_folder(url: str) -> bool:
    with open_store(url, _KEY) as store:
        return store.info() is None and bool(store.list_folder())
