"""Numbers of eight bits: dynamic maps and blocks of 8-bit optimizers (Dettmers et al., 2022, arXiv:2110.02861).

A block of elements has a scale, its largest absolute value; an element is the nearest of 256 values between -1 and 1,
or 0 and 1, times that. The values are those of bitsandbytes' `create_dynamic_map`: over seven decades below 1, each has
half as many of them, evenly spread, as the one above it.

Blocks begin anew in every row, at multiples of their size in the whole row, so that they are the same in every layout.
Where a row's length is a multiple of the block's, as it mostly is, they are the blocks of bitsandbytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kumi.spec.optim_states import QUANTIZED_BLOCK

DECADES = 7


@dataclass(frozen=True)
class Code:
    """What codes stand for: `values` (256,), ascending, and the `midpoints` (255,) between them, float32.

    `zero` is the code of 0 where there are negative values, None elsewhere.
    """

    values: Tensor
    midpoints: Tensor
    zero: int | None


def dynamic_code(device: torch.device, *, signed: bool) -> Code:
    """Return the dynamic map on `device`: for numbers of either sign where `signed`, else from 0 on."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade + (not signed))
        centres = [10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (place + 0.5) / count) for place in range(count)]
        values += centres + ([-value for value in centres] if signed else [])
    values.sort()
    made = torch.tensor(values, dtype=torch.float32, device=device)
    return Code(made, (made[1:] + made[:-1]) / 2, values.index(0.0) if signed else None)


@dataclass(frozen=True)
class Blocks:
    """The blocks of consecutive elements `start` to `start` + `size` of rows of `BLOCK` * `count` elements at most."""

    start: int
    size: int
    count: int

    def cut(self, rows: Tensor) -> Tensor:
        """Return `rows` (rows, size) as (rows, blocks that the elements lie in, BLOCK), zero where no element is."""
        before = self.start % QUANTIZED_BLOCK
        after = -(before + self.size) % QUANTIZED_BLOCK
        padded = pad(rows, (before, after)) if before or after else rows
        return padded.reshape(len(rows), -1, QUANTIZED_BLOCK)

    def join(self, blocks: Tensor) -> Tensor:
        """Return the rows that `cut` made `blocks` of."""
        before = self.start % QUANTIZED_BLOCK
        return blocks.flatten(-2)[:, before : before + self.size]

    @property
    def touched(self) -> slice:
        """Which blocks of a row the elements lie in."""
        return slice(self.start // QUANTIZED_BLOCK, -(-(self.start + self.size) // QUANTIZED_BLOCK))

    def largest(self, rows: Tensor) -> Tensor:
        """Return the largest absolute value in each block of whole rows, (rows, count) float32, 0 in other ranks'."""
        maxima = rows.new_zeros(rows.shape[0], self.count, dtype=torch.float32)
        maxima[:, self.touched] = self.cut(rows).abs().amax(-1).float()
        return maxima

    def decoded(self, codes: Tensor, scales: Tensor, code: Code, dtype: torch.dtype) -> Tensor:
        """Return the values (rows, size) of uint8 `codes` (rows, size) with `scales` (rows, count)."""
        values = code.values[codes.int()].to(dtype)
        return self.join(self.cut(values) * scales[:, self.touched, None].to(dtype))

    def encoded(self, rows: Tensor, scales: Tensor, code: Code) -> Tensor:
        """Return the codes (rows, size) of the values nearest to `rows` divided by their `scales` (rows, count).

        As in bitsandbytes, a negative number does not become 0.
        """
        divisors = scales[:, self.touched, None].to(rows.dtype).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = self.join(self.cut(rows) / divisors)
        codes = torch.bucketize(scaled.float().contiguous(), code.midpoints, out_int32=True)
        if code.zero is not None:
            codes -= ((scaled < 0) & (codes == code.zero)).to(codes.dtype)
        return codes.to(torch.uint8)
