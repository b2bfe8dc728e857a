"""How much of each source a run reads: sequences, tokens, documents or examples, share and epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kumi.data.sampler import Mixture


@dataclass(frozen=True)
class SourceReading:
    """What a run reads of one source.

    rows: rows of batches that come from it. tokens, units: estimates of the tokens in these rows, without padding, and
        of the documents or examples, by the means over all rows of the source. share: part of the run's tokens, or of
        its units if weights are shares of sequences. epochs: passes over the source.
    """

    name: str
    rows: int
    tokens: int
    units: int
    share: float
    epochs: float


def source_readings(mixture: Mixture, names: Sequence[str], sequences: int) -> Iterator[SourceReading]:
    """Yield what the first `sequences` sequences of `mixture` read of each part, in its order."""
    drawn = mixture.interleaving.drawn(sequences)
    epochs = [rows / source.rows for rows, source in zip(drawn, mixture.sources, strict=True)]
    tokens = [round(passes * source.tokens) for passes, source in zip(epochs, mixture.sources, strict=True)]
    units = [round(passes * source.units) for passes, source in zip(epochs, mixture.sources, strict=True)]
    amounts = tokens if mixture.by == "tokens" else units
    for name, rows, token_count, unit_count, amount, passes in zip(
        names, drawn, tokens, units, amounts, epochs, strict=True
    ):
        yield SourceReading(name, rows, token_count, unit_count, amount / max(sum(amounts), 1), passes)
