"""The prompts of a run: prompt n is a pure function of (data, seed, n)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kumi.data import Mixture
from kumi.data.prompt_rows import PromptRows


@dataclass(frozen=True)
class Prompt:
    """A prompt of the run.

    number: its number in the run, from 0.
    ids: its tokens, up to the beginning of the reply.
    row: the columns of its row in the data: `prompt`, and others such as the answer; rewards read them.
    source: the name of its source, and index: the number of its row among those of the source.
    """

    number: int
    ids: Sequence[int]
    row: Mapping[str, Any]
    source: str
    index: int


class PromptSampler:
    """The prompts of `mixture`, whose sources are `PromptRows`. `names`: the names of the sources."""

    def __init__(self, mixture: Mixture, names: Sequence[str]) -> None:
        self._mixture, self._names = mixture, names
        rows = [source for source in mixture.sources if isinstance(source, PromptRows)]
        assert len(rows) == len(mixture.sources), "the data of a run with rollouts are prompts"
        self._rows = rows

    def prompts(self, first: int, count: int) -> Iterator[Prompt]:
        """Yield `count` prompts, with the numbers from `first` on."""
        sources, _, rows = self._mixture.locate(first, count)
        for number, (source, row) in enumerate(zip(sources.tolist(), rows.tolist(), strict=True), first):
            ids, columns = self._rows[source].prompt(row)
            yield Prompt(number, ids, columns, self._names[source], row)

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number`."""
        return next(self.prompts(number, 1))
