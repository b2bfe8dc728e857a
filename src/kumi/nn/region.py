"""Where the matrices of a layer begin and end: the seam along which tensor parallelism cuts a layer.

A region takes hidden states in with matrices whose outputs are cut (`enter`), works on its own heads or columns, and
gives hidden states back with a matrix whose inputs are cut (`leave`). On one device nothing is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kumi.nn.linear import Linear


class Region:
    """A region that is whole on this device; `kumi.parallel.tensor` has the one that several ranks share."""

    @property
    def place(self) -> tuple[int, int]:
        """Which part of the region's heads or columns this device has, and of how many parts."""
        return 0, 1

    def enter(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        """What each of `layers` makes of the hidden states `x`."""
        return tuple(layer(x) for layer in layers)

    def share(self, x: Tensor) -> Tensor:
        """`x`, as every rank of the region needs it: what the region reads without a matrix of its own."""
        return x

    def leave(self, x: Tensor, layer: Linear) -> Tensor:
        """What `layer` makes of what the region has worked out, summed over its ranks."""
        out: Tensor = layer(x)
        return out


WHOLE = Region()
