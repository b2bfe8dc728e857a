"""Rows of prompts, for runs that generate the replies themselves: one prompt in each row.

A `kumi.data.sampler.Mixture` of these rows makes prompt n of a run a pure function of (data, seed, n)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kumi.data.binfile import Array
from kumi.data.row_source import Batch
from kumi.data.unit_files import UnitFile
from kumi.errors import ConfigError
from kumi.objectives import RowForm


@dataclass(frozen=True, eq=False)
class PromptRows:
    """The prompts of `source` that have at most `seq_len` tokens, in its order.

    seq_len: the most tokens of a prompt, batch.seq_len minus rollout.max_new_tokens.
    form, weighted, referenced: as in `kumi.data.row_source.RowSource`.
    Raise ConfigError if no prompt is short enough.
    """

    source: UnitFile
    seq_len: int
    form: RowForm
    weighted: bool = False
    referenced: bool = False

    def __post_init__(self) -> None:
        if not len(self._row_units):
            raise ConfigError(
                f"{self.source.prefix}: none of its {self.source.unit_count} prompts has at most {self.seq_len} "
                f"tokens (batch.seq_len minus rollout.max_new_tokens); raise batch.seq_len"
            )

    @cached_property
    def _row_units(self) -> Array:
        """The number in `source` of each row's prompt, (rows,)."""
        return np.flatnonzero(np.array(self.source.columns["tokens"]) <= self.seq_len)

    @property
    def rows(self) -> int:
        return len(self._row_units)

    @property
    def units(self) -> int:
        return self.rows

    @property
    def too_long(self) -> int:
        """Return the number of prompts that are left out because they are longer than `seq_len`."""
        return self.source.unit_count - self.rows

    @cached_property
    def tokens(self) -> int:
        """Tokens of the prompts in all rows."""
        return int(np.array(self.source.columns["tokens"])[self._row_units].sum(dtype=np.int64))

    def prompt(self, row: int) -> tuple[list[int], Mapping[str, Any]]:
        """Return the token ids of the prompt in row `row`, and the columns of the record from which it was made."""
        unit = int(self._row_units[row])
        return self.source.tokens_of(unit).ids.astype(np.int64).tolist(), self.source.extra_of(unit)

    def mean_document_span(self) -> float:
        """Return the mean length of prompts, each weighted by its length: the mean over all tokens."""
        lengths = np.array(self.source.columns["tokens"], np.float64)[self._row_units]
        return float((lengths**2).sum() / lengths.sum())

    def most_sequences(self, rows: Array) -> int:
        """Return the number of sequences in the fullest of the rows `rows` (n,), which is 1."""
        return 1

    def fill(self, batch: Batch, at: Array, rows: Array) -> None:
        """Write the prompts of the rows `rows` to the rows `at` of `batch`; nothing in them is trained."""
        for place, row in zip(at.tolist(), rows.tolist(), strict=True):
            ids, _ = self.prompt(row)
            batch["input_ids"][place, : len(ids)] = ids
            batch["document_ids"][place] = np.arange(self.seq_len) >= len(ids)
            batch["position_ids"][place, len(ids) :] = np.arange(self.seq_len - len(ids))
