"""The benchmark scripts are no package: their folder goes on the path, as when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
