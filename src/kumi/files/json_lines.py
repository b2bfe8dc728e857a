"""Read files of JSON lines that kumi itself appends to, which a killed process may have left with half a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kumi.errors import RefusedError
from kumi.files.untrusted import inside, json_record, open_stream


def json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line of `path`, leaving out broken lines; yield nothing if `path` does not exist.

    Raise RefusedError if `path` is a link out of its folder.
    """
    if not path.exists():
        return
    with open_stream(inside(path.parent, path.name, RefusedError)) as stream:
        for line in stream:
            try:
                record = json_record(line.decode(errors="replace"))
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record
