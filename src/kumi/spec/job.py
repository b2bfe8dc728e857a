"""What is to be trained on what: everything that decides an estimate but the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.engine import KUMI, Engine
from kumi.spec.model import ModelSpec
from kumi.spec.numerics import Numerics
from kumi.spec.optim import Optim
from kumi.spec.precision import ITEMSIZE, Precision


@dataclass(frozen=True)
class Job:
    """A model, the machines, the batch and the arithmetic, carried out by `engine`.

    `numerics` is how a CPU computes; None where that is still to be measured. `of_nodes` makes the machines of another
    number of nodes; None where nobody said what would join them.
    """

    model: ModelSpec
    cluster: ClusterSpec
    batch: BatchSpec
    precision: Precision
    optim: Optim
    engine: Engine = KUMI
    numerics: Numerics | None = None
    of_nodes: Callable[[int], ClusterSpec] | None = field(default=None, compare=False, repr=False)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of what is computed with: activations, and weights on their way to their use."""
        return ITEMSIZE[self.precision.compute]

    def on_nodes(self, nodes: int) -> Job:
        """Return this job on `nodes` nodes."""
        assert self.of_nodes is not None, "nobody said what joins more nodes"
        return replace(self, cluster=self.of_nodes(nodes))
