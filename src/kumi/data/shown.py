"""Units of a store for people to read: decoded text, in runs of tokens that are trained and runs that are not.

A unit is what packing puts into a row as a whole: a sequence, or both sides of a preference. A bin is a packed row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from kumi.data import binfile
from kumi.data.binfile import Array
from kumi.data.chat.masked import ROLE_SHIFT, TRAINED
from kumi.data.feistel import key, permute
from kumi.data.formats.example import ROLES
from kumi.data.packing import PackedRows, open_bins
from kumi.data.store import Store
from kumi.data.stored_source import StoredSource
from kumi.data.tokenizer import Tokenizer
from kumi.data.unit_files import UnitFile
from kumi.errors import ConfigError, RefusedError
from kumi.objectives import RowForm

# Names of the sequences of a unit with two of them.
_SIDES_OF_PAIR = ("chosen", "rejected")

Decode = Callable[[Sequence[int]], str]

# (trained, role, turn, control token, weight): consecutive tokens that agree are one run.
_Key = tuple[bool, int, int, bool, float]


def show_units(
    store: Store, tokens: Tokenizer, count: int, *, first: int = 0, source: str | None = None, side: str = "train"
) -> list[dict[str, Any]]:
    """Return the units or documents [first, first + count) of each source of `store`, or of the source named `source`.

    side: "train" or "validation". Each unit is plain data: its source, kind, side, number, label, margin, extra
    columns, the digest of its row, and its sequences as `shown_sequence` returns them; a document has only source,
    kind, side, number and sequences. Raise ConfigError for an unknown source.
    """
    names = [entry.name for entry in store.sources]
    if source is not None and source not in names:
        raise ConfigError(f"data show: no source has the name {source!r}; use {', '.join(names)}")
    control = frozenset(tokens.backend.get_added_tokens_decoder())
    units: list[dict[str, Any]] = []
    for entry in store.sources:
        if (source is None or entry.name == source) and getattr(entry, side) is not None:
            show = _documents if entry.kind == "text" else _units
            units += show(store, entry, side, range(first, first + count), tokens, control)
    return units


def add_rows(units: Sequence[dict[str, Any]], store: Store, seq_len: int, seed: int, form: RowForm) -> None:
    """Add to each training unit of `units` its bin, and the place of this bin in the source's first epoch ("row").

    Units without a bin get None: the data is not packed for rows of `seq_len` yet, or the unit is longer than a row.
    """
    for number, entry in enumerate(store.sources):
        chosen = [unit for unit in units if unit["source"] == entry.name and unit["side"] == "train"]
        if not chosen or entry.kind == "text":
            continue
        file = store.open_units(entry, "train")
        try:
            packed = PackedRows(file, open_bins(file, entry.train_digest, seq_len, seed, form), seq_len, form)
        except RefusedError:
            packed = None
        for unit in chosen:
            unit["bin"], unit["row"] = (None, None) if packed is None else _row_of(packed, unit["unit"], number, seed)


def _row_of(packed: PackedRows, unit: int, source: int, seed: int) -> tuple[int | None, int | None]:
    """Return the bin of `unit`, and its place in the first epoch of the source; (None, None) if no bin has the unit."""
    places = np.flatnonzero(packed.bins.units == unit)
    if not len(places):
        return None, None
    bin_number = int(np.searchsorted(np.array(packed.bins.bounds), places[0], side="right")) - 1
    order = permute(np.arange(packed.rows), packed.rows, key(seed, 1, source, 0))
    return bin_number, int(np.flatnonzero(order == bin_number)[0])


def _units(
    store: Store, entry: StoredSource, side: str, numbers: range, tokens: Tokenizer, control: frozenset[int]
) -> Iterator[dict[str, Any]]:
    """Yield the units `numbers` of one side of the source `entry`."""
    file = store.open_units(entry, side)
    for number in numbers[: max(0, file.unit_count - numbers.start)]:
        yield _shown_unit(file, entry.name, side, number, tokens, control)


def _shown_unit(
    file: UnitFile, source: str, side: str, number: int, tokens: Tokenizer, control: frozenset[int]
) -> dict[str, Any]:
    """Return unit `number` of `file` as plain data, see `show_units`."""
    unit, record = file.tokens_of(number), file.columns[number]
    ends = np.cumsum(unit.lengths)
    sequences = []
    for position, (start, stop) in enumerate(zip(ends - unit.lengths, ends, strict=True)):
        part = slice(int(start), int(stop))
        weights = None if unit.weights is None else unit.weights[part].tolist()
        sequence = shown_sequence(
            unit.ids[part].tolist(),
            unit.mask[part].tolist(),
            unit.turns[part].tolist(),
            weights,
            tokens.decode,
            control,
        )
        sequences.append({"name": _SIDES_OF_PAIR[position] if len(ends) == len(_SIDES_OF_PAIR) else "", **sequence})
    label, margin = int(record["label"]), float(record["margin"])
    return {
        "source": source,
        "kind": file.kind,
        "side": side,
        "unit": number,
        "label": None if label < 0 else bool(label),
        "margin": None if np.isnan(margin) else margin,
        "digest": f"{int(record['digest']):016x}",
        "extra": file.extra_of(number),
        "sequences": sequences,
    }


def _documents(
    store: Store, entry: StoredSource, side: str, numbers: range, tokens: Tokenizer, control: frozenset[int]
) -> Iterator[dict[str, Any]]:
    """Yield documents of text, in which every token but the first is trained."""
    file = binfile.open_file(getattr(entry, side), getattr(entry, f"{side}_checksums"), store.vocab_size)
    for number in numbers[: max(0, file.document_count - numbers.start)]:
        ids: Array = file.document(number)
        mask = [0, *[TRAINED] * (len(ids) - 1)][: len(ids)]
        sequence = shown_sequence(ids.tolist(), mask, [0] * len(ids), None, tokens.decode, control)
        yield {
            "source": entry.name,
            "kind": "text",
            "side": side,
            "unit": number,
            "sequences": [{"name": "", **sequence}],
        }


def shown_sequence(
    ids: Sequence[int],
    mask: Sequence[int],
    turns: Sequence[int],
    weights: Sequence[float] | None,
    decode: Decode,
    control: frozenset[int],
) -> dict[str, Any]:
    """Return one sequence as plain data: its counts, and its messages with their runs of tokens.

    ids, mask, turns, weights: as in `kumi.data.chat.MaskedSequence`.
    decode: returns the text of ids, control tokens included.
    control: ids of added tokens, which share no run with other tokens. If the last trained run of a message has such
        ids, the run has the key "stop".
    """
    rows = list(zip(ids, mask, turns, [1.0] * len(ids) if weights is None else weights, strict=True))
    messages = []
    for turn, group in groupby(rows, key=lambda row: row[2]):
        tokens = list(group)
        runs = list(_runs(tokens, decode, control))
        trained = [run for run in runs if run["trained"]]
        if trained and trained[-1]["control"]:
            trained[-1]["stop"] = True
        messages.append(
            {
                "turn": int(turn),
                "role": _role(tokens),
                "tokens": len(tokens),
                "trained": sum(bool(value & TRAINED) for _, value, _, _ in tokens),
                "runs": runs,
            }
        )
    return {
        "tokens": len(ids),
        "trained": sum(message["trained"] for message in messages),
        "first_ids": [int(token) for token in ids[:5]],
        "last_ids": [int(token) for token in ids[-5:]],
        "messages": messages,
    }


def _role(tokens: Sequence[tuple[int, int, int, float]]) -> str:
    """Return the role of a message's tokens; "" if all of them are text of the template."""
    return ROLES[max((mask >> ROLE_SHIFT for _, mask, _, _ in tokens), default=0)]


def _runs(
    tokens: Sequence[tuple[int, int, int, float]], decode: Decode, control: frozenset[int]
) -> Iterator[dict[str, Any]]:
    """Yield the runs of consecutive `tokens`, each (id, mask, turn, weight), that agree in `_Key`."""

    def key(token: tuple[int, int, int, float]) -> _Key:
        return bool(token[1] & TRAINED), token[1] >> ROLE_SHIFT, token[2], token[0] in control, float(token[3])

    for (trained, _, _, is_control, weight), group in groupby(tokens, key=key):
        ids = [int(token[0]) for token in group]
        run: dict[str, Any] = {"text": decode(ids), "tokens": len(ids), "trained": trained, "control": is_control}
        yield run if weight == 1 or not trained else {**run, "weight": weight}
