"""Remove plans of packed rows that no run uses any more; each row length and seed has made one in the store's folder.

Runs may share a store, and read their plans while they train. So a plan is removed only if several of the same units
have been used since, and it has not been read for a month: a run that needs it after all packs again when it starts.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

# Plans of the same units that stay whatever their age.
LAST_PLANS = 8
UNUSED_SECONDS = 30 * 86400


def remove_old_plans(prefix: Path) -> None:
    """Remove old plans of the units with this `prefix`, and what killed processes left of unfinished ones."""
    oldest = time.time() - UNUSED_SECONDS
    files = list(prefix.parent.glob(f"{prefix.name}.bins.*"))
    plans = sorted((path for path in files if path.suffix == ".i4"), key=_last_use, reverse=True)
    for path in [*plans[LAST_PLANS:], *(path for path in files if path.suffix == ".partial")]:
        if _last_use(path) < oldest:
            with suppress(OSError):  # removed by another start, or a store of someone else
                path.unlink()


def _last_use(path: Path) -> float:
    """Return when the file was last read, which most file systems note once a day, or written."""
    try:
        stat = path.stat()
    except OSError:
        return 0.0
    return max(stat.st_atime, stat.st_mtime)
