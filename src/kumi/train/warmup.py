"""The warm-up of a resumed run: as many steps as when the run began, though a share of the run may be more by now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.config import ResolvedRun
from kumi.config.optim_section import choose_optim


def warmup_meta(run: ResolvedRun) -> dict[str, Any]:
    """Return what a checkpoint says of the warm-up: its length in steps, and the ratio that it was derived from."""
    return {"warmup_steps": run.optim.warmup_steps, "warmup_ratio": run.config.optim.warmup_ratio}


def with_stored_warmup(run: ResolvedRun, meta: Mapping[str, Any]) -> ResolvedRun:
    """Return `run` with the warm-up of a checkpoint with `meta` where both were derived from the same ratio.

    Raise ConfigError where the run has become too short for it. A checkpoint from before the key says nothing.
    """
    section, stored = run.config.optim, meta.get("warmup_steps")
    if stored is None or section.warmup_ratio is None or section.warmup_ratio != meta.get("warmup_ratio"):
        return run
    section = section.model_copy(update={"warmup_steps": stored, "warmup_ratio": None})
    return replace(run, job=replace(run.job, optim=choose_optim(section, run.config.train.steps)))
