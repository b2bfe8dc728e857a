"""What a planning session found: the chosen layout, what was passed over, and what one might have expected."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kumi.plan.sizing import Training
from kumi.plan.timeline import Timeline
from kumi.plan.types import Estimate
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params


@dataclass(frozen=True)
class Expected:
    """A layout that one might have expected, by the name the field has for it.

    Either `problems` says why it is illegal, or `estimate` what it would be like, whether it fits or not; with both,
    it is legal, and `problems` says why the trainer that is asked for cannot carry it out.
    """

    title: str
    layout: Layout
    problems: tuple[str, ...] = ()
    estimate: Estimate | None = None

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.fits


@dataclass(frozen=True, repr=False)
class Report:
    """What is to be said of a plan.

    `others` are the runners-up, fastest first; `front` the layouts that none beats in time, memory and devices at
    once; `lacking` those faster than `best` that do not fit, fastest first. Of `searched` legal layouts `fitting` fit.
    `timeline` is that of `best`; `training` what the tokens take that were asked for.
    """

    job: Job
    best: Estimate
    others: tuple[Estimate, ...] = ()
    expected: tuple[Expected, ...] = ()
    searched: int = 0
    fitting: int = 0
    timeline: Timeline | None = None
    front: tuple[Estimate, ...] = ()
    lacking: tuple[Estimate, ...] = ()
    training: Training | None = None

    def __repr__(self) -> str:
        from kumi.report.words import layout_words

        return (
            f"Report({self.job.model.family} on {self.job.cluster.devices} x {self.job.cluster.device.name}: "
            f"{layout_words(self.best.layout)}; {self.best.step_seconds:.3g} s a step; {self.fitting} layouts fit)"
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it but the timeline as plain data, for --json; the model by what identifies it."""
        model, cluster = self.job.model, self.job.cluster
        return {
            "model": {
                "family": model.family,
                "parameters": num_params(model),
                "layers": model.num_hidden_layers,
                "hidden_size": model.hidden_size,
                "vocab_size": model.vocab_size,
            },
            "cluster": asdict(cluster) | {"devices": cluster.devices},
            "batch": asdict(self.job.batch),
            "precision": asdict(self.job.precision),
            "optim": asdict(self.job.optim),
            "engine": asdict(self.job.engine),
            "best": self.best.as_dict(),
            "others": [other.as_dict() for other in self.others],
            "expected": [_expected(item) for item in self.expected],
            "front": [other.as_dict() for other in self.front],
            "lacking": [other.as_dict() for other in self.lacking],
            "searched": self.searched,
            "fitting": self.fitting,
            "training": None if self.training is None else asdict(self.training),
        }


def _expected(item: Expected) -> dict[str, Any]:
    estimate = None if item.estimate is None else item.estimate.as_dict()
    return {"title": item.title, "layout": asdict(item.layout), "problems": item.problems, "estimate": estimate}
