"""The examples of a source in numbers: lengths, trained share, samples a conversation, fill of the packed rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from kumi.data.binfile import Array
from kumi.data.packing import PackedRows, open_bins
from kumi.data.store import Store
from kumi.data.stored_source import StoredSource
from kumi.errors import RefusedError
from kumi.objectives import RowForm

# A preference is unequal if one side is at least this many times as long as the other: it teaches a model the length.
_UNEQUAL = 4


def summarise_units(store: Store, source: StoredSource, seq_len: int, seed: int, form: RowForm) -> dict[str, Any]:
    """Return the numbers of the training units of `source`, a source of examples of `store`, as plain data.

    lengths, trained_lengths: histograms of the units' tokens and of their trained tokens (`length_histogram`).
    trained_share: trained tokens / tokens.
    samples_a_row: units of a row of the files, on average over the rows that were used.
    unequal_pairs: preferences with one side at least 4 times as long as the other.
    packed: rows of `seq_len` positions, the share of them that is filled, and the units that are left out because they
        are longer than a row or have no label; None if the units are not packed for this length and seed.
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
