"""The source of a run's batches: where it begins, and where a checkpoint left it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kumi.config import ResolvedRun
from kumi.data import BatchSource, Mixture, MixtureSource

# (run, its tokens, the rank's index along dp, the last checkpoint's metadata or None) -> the rank's batches
OpenSource = Callable[[ResolvedRun, Mixture, int, Mapping[str, Any] | None], BatchSource]


def mixture_source(run: ResolvedRun, mixture: Mixture, index: int, saved: Mapping[str, Any] | None) -> MixtureSource:
    """Return consecutive sequences of `mixture`, from its first one or from where the checkpoint with metadata `saved`
    left it: the number of sequences a step may have changed since."""
    step, sequence = (0, 0) if saved is None else (saved["step"], saved["sequences"])
    return MixtureSource(mixture, run.batch.sequences, index, run.layout.dp, step, sequence)
