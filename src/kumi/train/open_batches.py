"""Open the source of a run's batches at its beginning, or at the position that a checkpoint stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kumi.config import ResolvedRun
from kumi.data import BatchSource, Mixture, MixtureSource

# (run, mixture of its data, the rank's dp index, metadata of the last checkpoint or None) -> the rank's batches
OpenSource = Callable[[ResolvedRun, Mixture, int, Mapping[str, Any] | None], BatchSource]


def mixture_source(run: ResolvedRun, mixture: Mixture, index: int, saved: Mapping[str, Any] | None) -> MixtureSource:
    """Return a source of consecutive sequences of `mixture`, from the first one, or from the one after the checkpoint.

    `index`: the rank's index among the data-parallel ranks. `saved`: the checkpoint's metadata. The number of sequences
    per step may have changed since that checkpoint.
    """
    step, sequence = (0, 0) if saved is None else (saved["step"], saved["sequences"])
    return MixtureSource(mixture, run.batch.sequences, index, run.layout.dp, step, sequence)
