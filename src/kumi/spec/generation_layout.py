"""The layouts on which a model can generate."""

from __future__ import annotations

from math import prod

from kumi.errors import LayoutError
from kumi.spec.layout import Layout
from kumi.spec.ledger import params
from kumi.spec.model import ModelSpec
from kumi.spec.precision import ITEMSIZE, Precision
from kumi.spec.sharding import local_shape

# The axes over which generation cannot be split, with the only degree that it takes.
GENERATION_PINS = {"pp": 1, "cp": 1}


def check_generation_layout(layout: Layout, run_key: str | None = None) -> None:
    """Raise LayoutError unless replies can be generated on `layout`: with dp, ZeRO, tp and ep.

    A pipeline would idle in all stages but one, and a token has no sequence to split over cp. `run_key`: the key of the
    run file that asks for replies during training; None if a finished checkpoint generates them.
    """
    elsewhere = ", or convert the checkpoint and generate on one machine" if run_key is None else ""
    for axis in GENERATION_PINS:
        degree = getattr(layout, axis)
        if degree > 1:
            raise LayoutError(
                f"{run_key or 'generation'} needs layout.{axis} = 1, but it is {degree}: use dp, ZeRO, tp and ep"
                f"{elsewhere}"
            )


def gathered_bytes(model: ModelSpec, layout: Layout, precision: Precision) -> int:
    """Return the bytes of the weights of one tp and ep rank, all-gathered over ZeRO's ranks in the compute dtype."""
    numel = sum(prod(local_shape(param, layout, 0, sharded=False)) for param in params(model))
    return numel * ITEMSIZE[precision.compute]
