"""The result of planning: the chosen layout, the runners-up, and the layouts that the field usually tries first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kumi.plan.estimates import Estimate
from kumi.plan.node_counts import NodeCount
from kumi.plan.pipeline.timeline import Timeline
from kumi.plan.search.sizing import TrainingCost
from kumi.plan.uncertainty.intervals import Uncertainty
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params


@dataclass(frozen=True)
class StandardLayout:
    """A standard layout (DDP, FSDP, Megatron-LM, ...) under its usual name, `title`.

    An illegal layout has `problems` and no estimate. A legal one has an `estimate`, whether it fits or not; its
    `problems` are the reasons why the requested trainer does not support it.
    """

    title: str
    layout: Layout
    problems: tuple[str, ...] = ()
    estimate: Estimate | None = None

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.fits


@dataclass(frozen=True)
class Report:
    """A plan with everything that explains it.

    `best`: the estimate of the chosen layout.
    `others`: the runners-up, fastest first.
    `expected`: the standard layouts.
    `searched`, `fitting`: the number of legal layouts, and the number of legal layouts that fit.
    `timeline`: the pipeline timeline of `best`, if it has a pipeline.
    `front`: layouts of the Pareto front over step time and memory, as in `SearchResult.pareto`.
    `lacking`: layouts faster than `best` that do not fit, fastest first.
    `training`: time and cost of training on the requested number of tokens.
    `uncertainty`: how far the estimate of `best` may be off.
    `node_counts`: the fastest layouts like `best` on other numbers of nodes.
    `pinned`: the fields of the layout that the user has fixed, with their values.
    """

    job: Job
    best: Estimate
    others: tuple[Estimate, ...] = ()
    expected: tuple[StandardLayout, ...] = ()
    searched: int = 0
    fitting: int = 0
    timeline: Timeline | None = None
    front: tuple[Estimate, ...] = ()
    lacking: tuple[Estimate, ...] = ()
    training: TrainingCost | None = None
    uncertainty: Uncertainty | None = None
    node_counts: tuple[NodeCount, ...] = ()
    pinned: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the report without `timeline` and `pinned` as plain data, for --json; the model as a summary."""
        model, cluster = self.job.model, self.job.cluster
        return {
            "model": {
                "name": self.job.model_name,
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
            "expected": [_standard_as_dict(item) for item in self.expected],
            "front": [other.as_dict() for other in self.front],
            "lacking": [other.as_dict() for other in self.lacking],
            "searched": self.searched,
            "fitting": self.fitting,
            "uncertainty": None if self.uncertainty is None else asdict(self.uncertainty),
            "node_counts": [count.as_dict() for count in self.node_counts],
            "training": None if self.training is None else asdict(self.training),
        }


def _standard_as_dict(item: StandardLayout) -> dict[str, Any]:
    """Return a standard layout as plain data."""
    estimate = None if item.estimate is None else item.estimate.as_dict()
    return {"title": item.title, "layout": asdict(item.layout), "problems": item.problems, "estimate": estimate}
