"""The rows of new tokens in the embeddings and the head, and both tables with them in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kumi.convert.source import Source
from kumi.convert.stream import Reader
from kumi.spec.ledger import tensors

# The tensors that have a row for every token.
TABLES = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")
# Elements of a table that are read at a time.
_BLOCK = 1 << 24

Shares = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Place:
    """Where rows go: new tokens from `first` on, `count` of them, in a table of `old` rows that gets `new`."""

    first: int
    count: int
    old: int
    new: int


def tables(source: Source) -> dict[str, tuple[int, ...]]:
    """The tensors of the model in `source` that have a row for every token, and their shapes."""
    return {param.name: param.shape for param in tensors(source.spec) if param.name in TABLES}


def extended_reader(source: Source, place: Place, shares: Sequence[Shares]) -> Reader:
    """The tensors of `source`, its tables with the rows of new tokens: new token n is the sum of old rows (id, share)
    in `shares[n]`, the mean of all rows of tokens where that is empty. Rows added beyond that are that mean, too."""
    fresh = {name: _fresh(source, name, shape, place, shares) for name, shape in tables(source).items()}

    def read_into(name: str, start: tuple[int, ...], out: Tensor) -> None:
        if name in fresh:
            _read_rows(source.reader, name, start, out, place, *fresh[name])
        else:
            source.reader.read_into(name, start, out)

    def cut(name: str, row: int) -> int:
        return (
            min(row + max(1, _BLOCK // fresh[name][1].numel()), place.new)
            if name in fresh
            else (source.reader.cut(name, row))
        )

    return Reader(source.reader.dtypes, read_into, cut)


def _fresh(
    source: Source, name: str, shape: tuple[int, ...], place: Place, shares: Sequence[Shares]
) -> tuple[Tensor, Tensor]:
    """The rows of new tokens (K, ...) and the mean row (...), from one pass over the old tokens' rows."""
    wanted = sorted((old, number, share) for number, one in enumerate(shares) for old, share in one)
    total = torch.zeros(shape[1:], dtype=torch.float64)
    wide = torch.float64 if source.dtypes[name] == "float64" else torch.float32
    rows = torch.zeros((place.count, *shape[1:]), dtype=wide)
    step, used = max(1, _BLOCK // max(1, total.numel())), 0
    for begin in range(0, place.first, step):
        count = min(step, place.first - begin)
        block = source.reader.read(name, (begin, *(0,) * total.ndim), (count, *shape[1:]))
        total += block.sum(0, dtype=torch.float64)
        while used < len(wanted) and wanted[used][0] < begin + count:
            old, number, share = wanted[used]
            rows[number] += block[old - begin].to(wide) * share
            used += 1
    mean = total / place.first
    for number, one in enumerate(shares):
        if not one:
            rows[number] = mean
    return rows, mean


def _read_rows(
    reader: Reader, name: str, start: tuple[int, ...], out: Tensor, place: Place, rows: Tensor, mean: Tensor
) -> None:
    """Fill `out`, rows from `start` on: new ones where they are, the old table's elsewhere, the mean beyond it."""
    columns = tuple(slice(a, a + n) for a, n in zip(start[1:], out.shape[1:]))
    row, end = start[0], start[0] + out.shape[0]
    last = place.first + place.count
    while row < end:
        if place.first <= row < last:
            stop = min(end, last)
            out[row - start[0] : stop - start[0]] = rows[row - place.first : stop - place.first][
                (slice(None), *columns)
            ]
        elif row < place.old:
            stop = min(end, place.old, place.first if row < place.first else place.old)
            reader.read_into(name, (row, *start[1:]), out[row - start[0] : stop - start[0]])
        else:
            stop = end
            out[row - start[0] :] = mean[columns]
        row = stop


def check_rows(source: Source, written: Source, place: Place) -> str | None:
    """The first tensor of `written` that is not, bit for bit, what `source` has of it; None where all are."""
    wide = tables(source)
    for param in tensors(source.spec):
        spans = (
            [(0, param.shape[0])]
            if param.name not in wide
            else [(0, place.first), (place.first + place.count, place.old)]
        )
        for begin, end in spans:
            if begin < end and not _same(source.reader, written.reader, param.name, param.shape, begin, end):
                return param.name
    return None


def _same(one: Reader, other: Reader, name: str, shape: tuple[int, ...], begin: int, end: int) -> bool:
    width = max(1, torch.Size(shape[1:]).numel())
    for row in range(begin, end, max(1, _BLOCK // width)):
        count = min(max(1, _BLOCK // width), end - row)
        at, size = (row, *(0,) * (len(shape) - 1)), (count, *shape[1:])
        bits = (reader.read(name, at, size).view(torch.uint8) for reader in (one, other))
        if one.dtypes[name] != other.dtypes[name] or not torch.equal(*bits):
            return False
    return True
