"""8-bit quantisation of optimizer states by dynamic maps and blocks (Dettmers et al., 2022, arXiv:2110.02861).

A block of elements has a scale, its largest absolute value. An element is stored as the nearest of 256 values between
-1 and 1, or 0 and 1, times the scale. The values are those of bitsandbytes' `create_dynamic_map`: in seven decades
below 1, each decade has half as many evenly spaced values as the decade above it.

Blocks start at multiples of their size in every unsharded row, so blocks are the same in every layout. If the row
length is a multiple of the block size, as usual, they are the blocks of bitsandbytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kumi.spec.optim_states import QUANTIZED_BLOCK

_DECADES = 7


@dataclass(frozen=True)
class Codebook:
    """The values of the 256 codes.

    `values` (256,): ascending, float32.
    `midpoints` (255,): between the values, float32.
    `zero`: the code of 0 if there are negative values, else None.
    """

    values: Tensor
    midpoints: Tensor
    zero: int | None


def dynamic_codebook(device: torch.device, *, signed: bool) -> Codebook:
    """Return the dynamic map on `device`: from -1 to 1 if `signed`, else from 0 to 1."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade + (not signed))
        centres = [10.0 ** (decade + 1 - _DECADES) * (0.1 + 0.9 * (place + 0.5) / count) for place in range(count)]
        values += centres + ([-value for value in centres] if signed else [])
    values.sort()
    table = torch.tensor(values, dtype=torch.float32, device=device)
    return Codebook(table, (table[1:] + table[:-1]) / 2, values.index(0.0) if signed else None)


@dataclass(frozen=True)
class RowBlocks:
    """The blocks of this rank's part of each row: the elements `start` to `start` + `size`.

    `count`: the blocks of a complete row, of at most `QUANTIZED_BLOCK` elements each.
    """

    start: int
    size: int
    count: int

    def split(self, rows: Tensor) -> Tensor:
        """Return `rows` (rows, size) as (rows, touched blocks, BLOCK), padded with zeros."""
        before = self.start % QUANTIZED_BLOCK
        after = -(before + self.size) % QUANTIZED_BLOCK
        padded = pad(rows, (before, after)) if before or after else rows
        return padded.reshape(len(rows), -1, QUANTIZED_BLOCK)

    def join(self, blocks: Tensor) -> Tensor:
        """Return the rows (rows, size) of `blocks`: the inverse of `split`."""
        before = self.start % QUANTIZED_BLOCK
        return blocks.flatten(-2)[:, before : before + self.size]

    @property
    def touched(self) -> slice:
        """The indices in the row of the blocks that contain the elements."""
        return slice(self.start // QUANTIZED_BLOCK, -(-(self.start + self.size) // QUANTIZED_BLOCK))

    def largest(self, rows: Tensor) -> Tensor:
        """Return the largest absolute value in each block (rows, count), float32; 0 in blocks of other ranks."""
        maxima = rows.new_zeros(rows.shape[0], self.count, dtype=torch.float32)
        maxima[:, self.touched] = self.split(rows).abs().amax(-1).float()
        return maxima

    def decode(self, codes: Tensor, scales: Tensor, code: Codebook, dtype: torch.dtype) -> Tensor:
        """Return the values (rows, size) of uint8 `codes` (rows, size) with `scales` (rows, count)."""
        values = code.values[codes.int()].to(dtype)
        return self.join(self.split(values) * scales[:, self.touched, None].to(dtype))

    def encode(self, rows: Tensor, scales: Tensor, code: Codebook) -> Tensor:
        """Return the codes (rows, size) of the values nearest to `rows` divided by their `scales` (rows, count).

        As in bitsandbytes, a negative number is not encoded as 0.
        """
        divisors = scales[:, self.touched, None].to(rows.dtype).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = self.join(self.split(rows) / divisors)
        codes = torch.bucketize(scaled.float().contiguous(), code.midpoints, out_int32=True)
        if code.zero is not None:
            codes -= ((scaled < 0) & (codes == code.zero)).to(codes.dtype)
        return codes.to(torch.uint8)
