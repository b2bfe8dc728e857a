"""Every layout trains as one process does: loss, gradient norm, gradients, and parameters after three AdamW steps.

In float64, because Adam turns float32's rounding of a gradient near zero into a difference of the size of the step.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle, product

import numpy as np
import pytest

from grids import pairwise
from kumi.spec.layout import RECOMPUTE, Layout
from ranks import run_ranks
from steps import Part, Trace, train

TOLERANCE = 1e-10

ON_2 = [Layout(dp_replicate=2), *(Layout(dp_shard=2, zero=zero) for zero in (1, 2, 3))]
ON_4 = [
    Layout(dp_replicate=4),
    *(Layout(dp_shard=4, zero=zero) for zero in (1, 2, 3)),
    *(Layout(dp_replicate=2, dp_shard=2, zero=zero) for zero in (1, 2, 3)),
]


def _name(layout: Layout) -> str:
    kind = f"zero{layout.zero}" if layout.zero else "ddp"
    return f"hsdp-{kind}" if layout.zero and layout.dp_replicate > 1 else kind


# Others are the same to ranks that share only data; they have their cases in test_model_layouts.
FAMILIES = ("llama", "qwen", "moe")
CASES_2 = [(*case, how) for case in product(ON_2, FAMILIES, (1, 3)) for how in RECOMPUTE]
CASES_4 = [(*case, how) for case, how in zip(product(ON_4, FAMILIES, (1, 3)), cycle(RECOMPUTE))]
CASES = pairwise(
    [*CASES_2, *CASES_4],
    lambda layout, family, count, how: f"{layout.world_size}-{_name(layout)}-{family}-{count}-{how}",
)


@cache
def alone(family: str, kind: str = "fp64") -> Trace:
    """What one process sees."""
    return run_ranks(1, train, Layout(), family, 1, kind)[0]


def close(part: Part, whole: Part) -> bool:
    """Whether a rank's part equals that of the single process's tensor, to TOLERANCE of its largest element."""
    sizes = zip(part.start, part.values.shape, strict=True)
    wanted = whole.values[tuple(slice(first, first + size) for first, size in sizes)]
    scale = np.abs(whole.values).max()
    return part.values.shape == wanted.shape and bool(np.all(np.abs(part.values - wanted) <= TOLERANCE * scale))


def equal(trace: Trace, wanted: Trace) -> None:
    """Asserts that a rank saw what one process saw, to TOLERANCE, in all of its steps."""
    assert trace.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
    assert trace.norms == pytest.approx(wanted.norms, rel=TOLERANCE)
    for mine, whole in zip([*trace.grads, trace.params], [*wanted.grads, wanted.params]):
        known = {part.name: part for part in whole}
        assert [part.name for part in mine if not close(part, known[part.name])] == []
    assert trace.counters == {3.0}


@pytest.mark.parametrize(("layout", "family", "microbatches", "recompute"), CASES)
def test_layout_equals_one_process(ranks, layout, family, microbatches, recompute):
    wanted = alone(family)
    layout = Layout(**{**vars(layout), "recompute": recompute})
    for trace in ranks(layout.world_size, train, layout, family, microbatches):
        equal(trace, wanted)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", [Layout(), ON_2[0], ON_2[1], ON_2[3]], ids=["one", "ddp", "zero1", "zero3"])
def test_half_precision_follows_float32(ranks, layout, kind):
    wide, half = alone("qwen", "fp32"), alone("qwen", kind)
    for trace in ranks(layout.world_size, train, layout, "qwen", 3, kind):
        assert trace.losses == pytest.approx(wide.losses, rel=5e-3)
        assert trace.norms == pytest.approx(wide.norms, rel=5e-2)
        # The forward pass is the same one in every layout: weights are rounded once, wherever that happens.
        assert trace.losses[0] == pytest.approx(half.losses[0], rel=1e-6)
        assert {part.values.dtype for part in trace.params} == {np.dtype("float32")}
