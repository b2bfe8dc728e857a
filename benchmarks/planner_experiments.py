"""The experiments that runs belong to: rows of one measuring campaign err alike, and are left out together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from planner_defaults import EXPERIMENT_OF, first
from planner_rows import Run

# Experiments with fewer rows say little alone, and are pooled.
LEAST_ROWS = 20
POOL = "pool"


def campaign_of(run: Run) -> str:
    """The campaign that measured `run`: its group, trainer and kind of machine, failures with the runs beside them."""
    source = run.source.removesuffix("-oom").removesuffix("-fail")
    return first(EXPERIMENT_OF, f"{source}: {run.text} {run.gpu.lower()}") or source


def experiments_of(runs: Sequence[Run]) -> Mapping[str, str]:
    """The experiment of every run by its id: its campaign, or `POOL` where it has fewer than `LEAST_ROWS` `runs`."""
    campaigns = {run.id: campaign_of(run) for run in runs}
    rows = Counter(campaign_of(run) for run in runs)
    return {name: campaign if rows[campaign] >= LEAST_ROWS else POOL for name, campaign in campaigns.items()}
