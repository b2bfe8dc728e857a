"""Merge the finished parts of a source of examples into the units of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data.binfile import Array, token_dtype
from kumi.data.chat.masked import ROLE_SHIFT
from kumi.data.formats import ROLES
from kumi.data.selection import Selection
from kumi.data.shards import SIDES
from kumi.data.unit_files import UnitFile, UnitTokens, open_units
from kumi.data.unit_writer import open_unit_writer

# The name of role "" in meta.json.
TEMPLATE_ROLE = "template"


def join_units(
    folder: Path,
    name: str,
    kind: str,
    parts: Sequence[Path],
    most: int | None,
    vocab_size: int,
    histogram_of: Callable[[Array], Array],
) -> tuple[dict[str, Any], Array]:
    """Write the units of one source from its finished `parts`; return its part of meta.json and the counts of ids.

    most: largest number of training units; None for all of them. histogram_of: returns how often each id occurs in an
    array of ids, (V,). The returned counts are (2, V): one row each for train and validation.
    """
    entry: dict[str, Any] = {}
    histogram = np.zeros((2, vocab_size), np.int64)
    roles = np.zeros(len(ROLES), np.int64)
    for number, side in enumerate(SIDES):
        files = [open_units(part / side, kind) for part in parts]
        choice = None if most is None or number else Selection((np.array(f.columns["digest"]) for f in files), most)
        # Files are made even for a side without units: the digest of the side is computed while they are written.
        prefix = folder / f"{name}_{side}_text_document"
        trained = 0
        with open_unit_writer(prefix, token_dtype(vocab_size), kind) as writer:
            for file in files:
                for tokens, columns, extras in _blocks(file, choice):
                    writer.append(tokens, columns, extras)
                    histogram[number] += histogram_of(tokens.ids)
                    roles += np.bincount(tokens.mask >> ROLE_SHIFT, minlength=len(ROLES))[: len(ROLES)]
                    trained += int(columns["trained"].sum(dtype=np.int64))
        entry[side] = prefix.name if writer.units else None
        entry |= {f"{side}_documents": writer.documents, f"{side}_tokens": writer.tokens}
        entry |= {f"{side}_units": writer.units, f"{side}_trained": trained, f"{side}_weighted": writer.weighted}
        entry[f"{side}_digest"] = writer.hexdigest()
    names = (role or TEMPLATE_ROLE for role in ROLES)
    entry["roles"] = {role: int(count) for role, count in zip(names, roles, strict=True)}
    return entry, histogram


def _blocks(file: UnitFile, choice: Selection | None) -> Iterator[tuple[UnitTokens, Array, list[bytes]]]:
    """Yield tokens, records and extras of the chosen units of `file`, in blocks."""
    for first, last in file.blocks():
        columns = np.array(file.columns[first:last])
        chosen = np.ones(len(columns), bool) if choice is None else choice.admits(columns["digest"])
        if not chosen.any():
            continue
        tokens = file.tokens_between(first, last)
        extras = (
            [] if file.extra is None else [file.extra.document(first + int(n)).tobytes() for n in chosen.nonzero()[0]]
        )
        if not chosen.all():
            tokens = _chosen_tokens(tokens, columns, chosen)
        yield tokens, columns[chosen], extras


def _chosen_tokens(tokens: UnitTokens, columns: Array, chosen: Array) -> UnitTokens:
    """Return the tokens of the units for which `chosen` (units,) is True."""
    per_token = np.repeat(chosen, columns["tokens"])
    weights = None if tokens.weights is None else tokens.weights[per_token]
    lengths = tokens.lengths[np.repeat(chosen, columns["documents"])]
    return UnitTokens(tokens.ids[per_token], tokens.mask[per_token], tokens.turns[per_token], weights, lengths)


def samples_of(total: Counter[str]) -> dict[str, int]:
    """Return the number of rows by their number of units, from the sums of counts of a source's parts."""
    counts = {int(name[8:]): count for name, count in total.items() if name.startswith("samples:")}
    return {str(number): counts[number] for number in sorted(counts)}
