"""Figures about the units of a source: their lengths, the share of trained tokens, how full the packed rows are.

A unit is what packing puts into a row of a batch as a whole: one sequence, or both sides of a preference. A row of the
source's files, such as a conversation, gives one unit or several."""

from __future__ import annotations

from typing import Any

import numpy as np

from kumi.data.binfile import Array
from kumi.data.packing import PackedRows, open_bins
from kumi.data.store import Store
from kumi.data.stored_source import StoredSource
from kumi.errors import RefusedError
from kumi.objectives import RowForm

# A preference is unequal if one side is at least this many times as long as the other: a model learns length from it.
_UNEQUAL = 4


def summarise_units(store: Store, source: StoredSource, seq_len: int, seed: int, form: RowForm) -> dict[str, Any]:
    """Return figures about the training units of `source`, a source of examples in `store`, as plain data.

    rows_used: rows of the files that became units, also if they are held out or the source's `max` leaves them out.
    samples_a_row: units / rows_used.
    trained_share: trained tokens / tokens.
    lengths, trained_lengths: histograms of the units' tokens and of their trained tokens (`length_histogram`).
    unequal_pairs: preferences with one side at least 4 times as long as the other.
    packed: figures about the packed rows of `seq_len` positions; None if they are not made for this length and seed.
        rows: their number. filled: the share of positions that have a token.
        too_long: units that are left out because they are longer than a row.
        empty: units that are left out because each sequence is a single token, so that none is predicted.
    """
    used = sum(source.samples.values())
    units = sum(int(number) * count for number, count in source.samples.items())
    summary: dict[str, Any] = {
        "rows_used": used,
        "samples_a_row": units / used if used else 0.0,
        "trained_share": source.train_trained / source.train_tokens if source.train_tokens else 0.0,
        "lengths": [],
        "trained_lengths": [],
        "unequal_pairs": 0,
        "packed": None,
    }
    if source.train is None:
        return summary
    file = store.open_units(source, "train")
    tokens, trained = np.array(file.columns["tokens"]), np.array(file.columns["trained"])
    summary["lengths"], summary["trained_lengths"] = length_histogram(tokens), length_histogram(trained)
    if source.kind == "preference":
        sides = np.array(file.file.lengths).reshape(-1, 2)
        summary["unequal_pairs"] = int((sides.max(1) >= _UNEQUAL * np.maximum(sides.min(1), 1)).sum())
    try:
        packed = PackedRows(file, open_bins(file, source.train_digest, seq_len, seed, form), seq_len, form)
    except RefusedError:
        return summary
    summary["packed"] = {
        "rows": packed.rows,
        "filled": packed.filled,
        "too_long": packed.bins.too_long,
        "empty": packed.bins.empty,
    }
    return summary


def length_histogram(lengths: Array) -> list[dict[str, int]]:
    """Return how many of `lengths` lie in each range between powers of two: {"from", "to", "count"}, "to" included.

    Ranges before the first and after the last with a count above 0 are left out; 0 is a range of its own.
    """
    exponents = np.where(lengths > 0, np.floor(np.log2(np.maximum(lengths, 1))) + 1, 0).astype(np.int64)
    counts = np.bincount(exponents)
    first = int(np.flatnonzero(counts)[0]) if len(lengths) else 0
    return [
        {"from": 2 ** (number - 1) if number else 0, "to": 2**number - 1, "count": int(count)}
        for number, count in enumerate(counts)
        if number >= first
    ]
