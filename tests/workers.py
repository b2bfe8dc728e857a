"""How the suite is split between workers: by files, and all that needs several ranks in one of them.

Ranks of two workers at a time would starve each other: a pool of eight has hundreds of threads. So every file that uses
them goes to the worker that gets the first of them, which starts there; the other files go to whoever is free.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

RANKS = "files that use ranks"


class Workers(LoadScopeScheduling):
    """Hands files to workers, those of most tests first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return RANKS if uses_ranks(self.config.rootpath / file) else file


@cache
def uses_ranks(file: Path) -> bool:
    """Whether a test of `file` asks for the ranks of `tests/ranks.py`."""
    return bool(re.search(r"\brun_ranks\b|^def test_\w+\(.*\branks\b", file.read_text(), re.M))
