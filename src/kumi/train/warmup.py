"""The warm-up of a resumed run keeps its original number of steps, even if the number of steps has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.config import ResolvedRun
from kumi.config.optim_section import choose_optim


def warmup_meta(run: ResolvedRun) -> dict[str, Any]:
    """Return the checkpoint's metadata on the warm-up: its length in steps, and the ratio that gave it."""
    return {"warmup_steps": run.optim.warmup_steps, "warmup_ratio": run.config.optim.warmup_ratio}


def with_stored_warmup(run: ResolvedRun, meta: Mapping[str, Any]) -> ResolvedRun:
    """Return `run` with the warm-up length of the checkpoint's `meta`, if both have the same warmup_ratio.

    Raise ConfigError if the run is shorter than that warm-up. Checkpoints of earlier versions have no warm-up length.
    """
    section, stored = run.config.optim, meta.get("warmup_steps")
    if stored is None or section.warmup_ratio is None or section.warmup_ratio != meta.get("warmup_ratio"):
        return run
    section = section.model_copy(update={"warmup_steps": stored, "warmup_ratio": None})
    return replace(run, job=replace(run.job, optim=choose_optim(section, run.steps)))
