"""Remove plans of packed rows that no run uses any more.

A plan is a file that says which units each packed row has; the folder of a store has one for each row length and seed
of a run. Runs may share a store, and read their plans while they train. So a plan is removed only if it has not been
read for a month, and `LAST_PLANS` other plans of the same units were used later. A run that needs it after all packs
again when it starts.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

# Plans of the same units, those used last, that stay whatever their age.
LAST_PLANS = 8
UNUSED_SECONDS = 30 * 86400


def remove_old_plans(prefix: Path) -> None:
    """Remove old plans of the units with this `prefix`, and old unfinished plans of processes that were killed."""
    oldest = time.time() - UNUSED_SECONDS
    files = list(prefix.parent.glob(f"{prefix.name}.bins.*"))
    plans = sorted((path for path in files if path.suffix == ".i4"), key=_last_use, reverse=True)
    for path in [*plans[LAST_PLANS:], *(path for path in files if path.suffix == ".partial")]:
        if _last_use(path) < oldest:
            with suppress(OSError):  # removed by another start, or a store of someone else
                path.unlink()


def _last_use(path: Path) -> float:
    """Return the time at which the file was last read or written; most file systems note reads once a day only."""
    try:
        stat = path.stat()
    except OSError:
        return 0.0
    return max(stat.st_atime, stat.st_mtime)
