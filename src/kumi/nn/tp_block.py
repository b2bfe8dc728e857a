"""The column- and row-parallel projections of a layer, behind one interface that tensor parallelism replaces.

`column_linear` maps hidden states to local heads or columns; `row_linear` maps these back to hidden states. This module
is the version for one device, where no matrix is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kumi.nn.linear import Linear


class Projections:
    """The projections of a block on one device. `kumi.parallel.tensor_parallel` has the tensor-parallel version."""

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The tensor-parallel rank and the number of ranks that split the block's heads or columns."""
        return 0, 1

    def column_linear(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Return the output of each of `layers` for hidden states `x`."""
        return tuple(layer(x) for layer in layers)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return `x`, which every rank computes without a sharded matrix, for use by every rank of the block."""
        return x

    def row_linear(self, x: Tensor, layer: Linear) -> Tensor:
        """Return the output of `layer` for local heads or columns `x`, summed over ranks."""
        out: Tensor = layer(x)
        return out


UNSHARDED = Projections()
