"""Whether published runs cover a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kumi.plan.uncertainty.error_table import PublishedRun
from kumi.plan.uncertainty.traits import RunTraits
from kumi.units import format_count

# A size is covered up to this factor times the largest published one. Small sizes are always covered.
_COVERED_FACTOR = 2.0


def extrapolation(traits: RunTraits, runs: Sequence[PublishedRun], *, on_measured_machines: bool = False) -> str:
    """Return why no published run is like `traits`, as a phrase; "" if `runs` cover it.

    `on_measured_machines`: runs on these machines were measured, so that their device needs no published run.
    """
    return "; ".join(_reasons(traits, [run.traits for run in runs], on_measured_machines))


def _reasons(traits: RunTraits, published: Sequence[RunTraits], on_measured_machines: bool) -> Iterator[str]:
    """Yield each way in which a run with `traits` is outside of the `published` runs."""
    if not on_measured_machines and not any(other.device == traits.device for other in published):
        yield f"no published run is on {traits.device}"
    for technique in traits.techniques:
        if not any(technique in other.techniques for other in published):
            yield f"no published run uses {technique}"
    similar = [other for other in published if other.experts == traits.experts]
    kind = "with experts" if traits.experts else "without experts"
    for name, noun in (("devices", "devices"), ("params", "parameters"), ("seq_len", "tokens in a row")):
        value, most = getattr(traits, name), max((getattr(other, name) for other in similar), default=0)
        if value > _COVERED_FACTOR * most:
            yield f"no published run {kind} has more than {format_count(most)} {noun}"
