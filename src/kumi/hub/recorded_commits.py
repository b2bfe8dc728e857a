"""Record the commits of a run's hub sources in its folder, so that a resumed run uses the same files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kumi.errors import RefusedError
from kumi.files.output import write_text
from kumi.files.untrusted import CONFIG, inside, read_regular, strict_json
from kumi.hub.fetch import Snapshot

FILE = "sources.json"


def write_record(out: Path, sources: Mapping[str, str], snapshots: Mapping[str, Snapshot]) -> None:
    """Write to the run folder `out`, for each run-file key, the requested source and the commit that was fetched."""
    if not snapshots:
        return
    record = {
        key: {"asked": sources[key], "repository": snapshot.name, "commit": snapshot.commit}
        for key, snapshot in snapshots.items()
    }
    part = out / f"{FILE}.part"
    write_text(part, json.dumps(record, indent=2) + "\n")
    part.replace(out / FILE)


def recorded_commit(out: Path, key: str, source: str) -> str | None:
    """Return the recorded commit for `key` of the run in `out`; None in a new run or for another `source`.

    Raise RefusedError if the record is damaged.
    """
    file = out / FILE
    if not file.exists():
        return None
    try:
        entry: Any = strict_json(read_regular(inside(out, FILE, RefusedError), CONFIG.size), CONFIG)[key]
        return str(entry["commit"]) if entry["asked"] == source else None
    except KeyError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise RefusedError(
            f"{file}: damaged ({error}), so the commit that the run started from is unknown; "
            f"restore the file, or delete it to continue from the newest commit"
        ) from None
