"""Rows of new tokens in the embeddings and the head, and a reader of the tables that include them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kumi.convert.files.stream import Reader
from kumi.convert.open_model import Source
from kumi.spec.ledger import tensors

# The tensors with a row per token.
TABLES = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")
# Elements of a table per read.
_BLOCK = 1 << 24

# Old rows (id, weight) whose weighted sum is a new row.
Shares = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Place:
    """The position of new rows in a table.

    first   row of the first new token
    count   number of new tokens
    old     rows of the table before
    new     rows of the table after
    """

    first: int
    count: int
    old: int
    new: int


def tables(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in `source` with a row per token, by name."""
    return {param.name: param.shape for param in tensors(source.spec) if param.name in TABLES}


def extended_reader(source: Source, place: Place, shares: Sequence[Shares]) -> Reader:
    """Return a reader of `source` whose tables include the rows of new tokens.

    New row n is the weighted sum of the old rows (id, weight) in `shares[n]`, or the mean of the rows of all tokens if
    `shares[n]` is empty. Padding rows that the new tokens leave keep their values; rows added as padding are the mean.
    """
    new_rows = {name: _new_rows(source, name, shape, place, shares) for name, shape in tables(source).items()}

    def read_into(name: str, start: tuple[int, ...], out: Tensor) -> None:
        if name in new_rows:
            _read_rows(source.reader, name, start, out, place, *new_rows[name])
        else:
            source.reader.read_into(name, start, out)

    def block_end(name: str, row: int) -> int:
        return (
            min(row + max(1, _BLOCK // new_rows[name][1].numel()), place.new)
            if name in new_rows
            else (source.reader.block_end(name, row))
        )

    return Reader(source.reader.dtypes, read_into, block_end)


def _new_rows(
    source: Source, name: str, shape: tuple[int, ...], place: Place, shares: Sequence[Shares]
) -> tuple[Tensor, Tensor]:
    """Return the rows of new tokens (K, ...) and the mean row (...), from one pass over the old rows."""
    terms = sorted((old, index, share) for index, row_shares in enumerate(shares) for old, share in row_shares)
    total = torch.zeros(shape[1:], dtype=torch.float64)
    accumulate_dtype = torch.float64 if source.dtypes[name] == "float64" else torch.float32
    rows = torch.zeros((place.count, *shape[1:]), dtype=accumulate_dtype)
    step, next_term = max(1, _BLOCK // max(1, total.numel())), 0
    for begin in range(0, place.first, step):
        count = min(step, place.first - begin)
        block = source.reader.read(name, (begin, *(0,) * total.ndim), (count, *shape[1:]))
        total += block.sum(0, dtype=torch.float64)
        while next_term < len(terms) and terms[next_term][0] < begin + count:
            old, index, share = terms[next_term]
            rows[index] += block[old - begin].to(accumulate_dtype) * share
            next_term += 1
    mean = total / place.first
    for index, row_shares in enumerate(shares):
        if not row_shares:
            rows[index] = mean
    return rows, mean


def _read_rows(
    reader: Reader, name: str, start: tuple[int, ...], out: Tensor, place: Place, rows: Tensor, mean: Tensor
) -> None:
    """Fill `out` from row `start` on: new rows at their place, old rows elsewhere, the mean after both."""
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


def first_different_tensor(source: Source, written: Source, place: Place) -> str | None:
    """Return the name of the first tensor whose old rows differ in a bit between `source` and `written`, or None."""
    table_shapes = tables(source)
    for param in tensors(source.spec):
        ranges = (
            [(0, param.shape[0])]
            if param.name not in table_shapes
            else [(0, place.first), (place.first + place.count, place.old)]
        )
        for begin, end in ranges:
            if begin < end and not _rows_equal(source.reader, written.reader, param.name, param.shape, begin, end):
                return param.name
    return None


def _rows_equal(a: Reader, b: Reader, name: str, shape: tuple[int, ...], begin: int, end: int) -> bool:
    """True if rows [begin, end) of a tensor have the same dtype and bits in both readers."""
    width = max(1, torch.Size(shape[1:]).numel())
    for row in range(begin, end, max(1, _BLOCK // width)):
        count = min(max(1, _BLOCK // width), end - row)
        at, size = (row, *(0,) * (len(shape) - 1)), (count, *shape[1:])
        bits = (reader.read(name, at, size).view(torch.uint8) for reader in (a, b))
        if a.dtypes[name] != b.dtypes[name] or not torch.equal(*bits):
            return False
    return True
