"""Which commits a run began from, kept in its folder, so that a run that goes on does so from the same files."""

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
    """Write into the run folder `out` what every run-file key asked for (`sources`), and the commit that it got."""
    if not snapshots:
        return
    found = {
        key: {"asked": sources[key], "repository": one.name, "commit": one.commit} for key, one in snapshots.items()
    }
    part = out / f"{FILE}.part"
    write_text(part, json.dumps(found, indent=2) + "\n")
    part.replace(out / FILE)


def recorded(out: Path, key: str, source: str) -> str | None:
    """The commit that the run in `out` began from for `key`, where that asked for `source`; None in a new run."""
    file = out / FILE
    if not file.exists():
        return None
    try:
        found: Any = strict_json(read_regular(inside(out, FILE, RefusedError), CONFIG.size), CONFIG)[key]
        return str(found["commit"]) if found["asked"] == source else None
    except KeyError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise RefusedError(
            f"{file}: damaged ({error}), so that it is not known which commit the run began from; "
            f"restore it, or delete it to go on from the newest"
        ) from None
