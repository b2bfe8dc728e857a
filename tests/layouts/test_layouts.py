"""Every layout has the results of one process: loss, gradient norm, gradients, and parameters after two AdamW steps.

In float64, because Adam turns float32's rounding of a gradient near zero into a difference of the size of the step; of
float64's rounding it makes something, too, which `updates_apart` bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import cycle, product

import numpy as np
import pytest

from grids import pairwise, sampled
from kumi.spec.layout import RECOMPUTE, Layout
from ranks import run_ranks
from steps import OPTIM, Part, Trace, train

TOLERANCE = 1e-10
# How far rounding in float64 brings two computations of a gradient apart, of its largest element: a thousand units.
ROUNDING = 1000 * 2.0**-53

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
# By default only layouts of four ranks with replicas, and with ranks that get no shard: one case each.
OFTEN = [
    (Layout(dp_shard=4, zero=3), "qwen", 1, "full"),
    (Layout(dp_replicate=2, dp_shard=2, zero=1), "llama", 3, "selective"),
    (Layout(dp_replicate=2, dp_shard=2, zero=2), "qwen", 1, "full"),
    (Layout(dp_replicate=2, dp_shard=2, zero=3), "moe", 3, "full"),
]


def _case(layout: Layout, family: str, count: int, how: str) -> str:
    return f"{layout.world_size}-{_name(layout)}-{family}-{count}-{how}"


CASES = [*pairwise(CASES_2, _case), *sampled(CASES_4, lambda place: CASES_4[place] in OFTEN, _case)]


@cache
def alone(family: str, kind: str = "fp64") -> Trace:
    """Return the results of one process."""
    return run_ranks(1, train, Layout(), family, 1, kind)[0]


def close(part: Part, whole: Part, more: float | np.ndarray = 0.0) -> bool:
    """Return True if a rank's part equals that of one process, to TOLERANCE of the largest element plus `more`.

    `more`: a number, or an array of the tensor's shape.
    """
    sizes = zip(part.start, part.values.shape, strict=True)
    here = tuple(slice(first, first + size) for first, size in sizes)
    expected, scale = whole.values[here], np.abs(whole.values).max()
    allowed = TOLERANCE * scale + (more[here] if isinstance(more, np.ndarray) else more)
    return part.values.shape == expected.shape and bool(np.all(np.abs(part.values - expected) <= allowed))


def updates_apart(grads: Sequence[Sequence[Part]]) -> Mapping[str, np.ndarray]:
    """Return for each parameter how far its AdamW updates may be apart, given its gradients `grads` in all steps.

    An update is about lr * g / (|g| + eps): where |g| is far below the largest element, whose rounding it shares, the
    rounding is a larger part of it.
    """
    apart: dict[str, np.ndarray] = {}
    for part in (part for step in grads for part in step):
        size = np.abs(part.values)
        apart[part.name] = apart.get(part.name, 0.0) + OPTIM.lr * ROUNDING * size.max() / (size + OPTIM.eps)
    return apart


def equal(trace: Trace, expected: Trace) -> None:
    """Assert that all steps of a rank equal those of one process, to TOLERANCE."""
    assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert trace.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    for mine, whole in zip(trace.grads, expected.grads):
        by_name = {part.name: part for part in whole}
        assert [part.name for part in mine if not close(part, by_name[part.name])] == []
    by_name, apart = {part.name: part for part in expected.params}, updates_apart(expected.grads)
    assert [part.name for part in trace.params if not close(part, by_name[part.name], apart.get(part.name, 0.0))] == []
    assert trace.counters == {2.0}


@pytest.mark.parametrize(("layout", "family", "microbatches", "recompute"), CASES)
def test_layout_equals_one_process(ranks, layout, family, microbatches, recompute):
    expected = alone(family)
    layout = Layout(**{**vars(layout), "recompute": recompute})
    for trace in ranks(layout.world_size, train, layout, family, microbatches):
        equal(trace, expected)


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
