"""Rows of prompts with their replies: packed, and balanced over the data-parallel ranks.

A prompt and its reply are a document of their own in a row. A sequence of n tokens takes n - 1 positions: inputs are
its tokens except the last, labels its tokens except the first, and only the tokens of the reply are trained.

All ranks have equally many rows, and all rows equally many positions: those that the fullest row needs, rounded up to a
multiple that the layout needs. The number of rows and their length differ from update to update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kumi.data.binfile import Array
from kumi.data.packing.sequence_columns import write_sequences
from kumi.data.row_source import Batch, padding_rows
from kumi.objectives import IGNORED


@dataclass(frozen=True, eq=False)
class ReplySequence:
    """A prompt with a reply.

    prompt, reply: their tokens.
    first: the place of the reply's first token in arrays of all reply tokens of a rollout batch.
    """

    prompt: Sequence[int]
    reply: Array
    first: int

    @property
    def positions(self) -> int:
        """The positions of a row that the sequence takes."""
        return len(self.prompt) + len(self.reply) - 1


def fill_rows(
    sequences: Sequence[ReplySequence], rows: Sequence[Sequence[int]], length: int, columns: Mapping[str, Array]
) -> Batch:
    """Return the batch of `rows`, lists of indices in `sequences`, of `length` positions each.

    columns: by name, one number for each reply token of the rollout batch. In the batch they are (B, S), each number at
    the position whose label is the token, and 0 elsewhere.
    """
    shape = (len(rows), length)
    batch: dict[str, Array] = {
        **padding_rows(len(rows), length),
        "segments": np.zeros(shape, np.int64),
        "trained": np.zeros((len(rows), max(1, *map(len, rows))), np.int64),
        **{name: np.zeros(shape, values.dtype) for name, values in columns.items()},
    }
    for at, row in enumerate(rows):
        lengths, start = [], 0
        for number, sequence in enumerate(sequences[index] for index in row):
            stop, first_label = start + sequence.positions, start + len(sequence.prompt) - 1
            tokens = np.concatenate([np.asarray(sequence.prompt, np.int64), sequence.reply])
            batch["input_ids"][at, start:stop] = tokens[:-1]
            batch["labels"][at, first_label:stop] = sequence.reply
            batch["position_ids"][at, start:stop] = np.arange(stop - start)
            batch["document_ids"][at, start:stop] = number
            for name, values in columns.items():
                batch[name][at, first_label:stop] = values[sequence.first : sequence.first + len(sequence.reply)]
            lengths.append(stop - start)
            start = stop
        # Padding is one more document.
        batch["document_ids"][at, start:] = len(lengths)
        batch["position_ids"][at, start:] = np.arange(length - start)
        if lengths:
            write_sequences(batch, at, np.array(lengths), batch["labels"][at], IGNORED)
    return batch


def read_rows_back(
    sequences: Sequence[ReplySequence], rows: Sequence[Sequence[int]], values: Array, out: Array
) -> None:
    """Write the numbers that `values` (B, S) has at the reply tokens' labels in `rows` to the tokens' places in `out`
    (tokens,)."""
    for at, row in enumerate(rows):
        start = 0
        for sequence in (sequences[index] for index in row):
            stop, first_label = start + sequence.positions, start + len(sequence.prompt) - 1
            out[sequence.first : sequence.first + len(sequence.reply)] = values[at, first_label:stop]
            start = stop
