"""Split the test suite between pytest-xdist workers by file, with all multi-rank files on one worker.

Ranks of two workers at a time would starve each other, because a pool of eight ranks has hundreds of threads. So the
worker that gets the first multi-rank file gets all of them. The other files go to any free worker.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

RANKS = "files that use ranks"


class Workers(LoadScopeScheduling):
    """Assigns files to workers, those with the most tests first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return RANKS if uses_ranks(self.config.rootpath / file) else file


@cache
def uses_ranks(file: Path) -> bool:
    """Return True if a test in `file` uses the ranks of `tests/ranks.py`."""
    return bool(re.search(r"\brun_ranks\b|^def test_\w+\(.*\branks\b", file.read_text(), re.M))
