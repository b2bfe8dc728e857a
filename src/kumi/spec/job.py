"""The job: everything that decides an estimate, except the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kumi.spec import ledger
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.engine import KUMI, Engine
from kumi.spec.loss_passes import ONE_PASS, LossPasses
from kumi.spec.model import ModelSpec
from kumi.spec.numerics import Numerics
from kumi.spec.optim import Optim
from kumi.spec.precision import ITEMSIZE, Precision
from kumi.spec.rollout import RolloutSpec


@dataclass(frozen=True)
class Job:
    """A model, a cluster, a batch and the precision, trained by `engine`.

    - `passes`: the passes of the loss beside one forward and one backward.
    - `rollout`: the replies that a run of reinforcement learning generates; None for other runs.
    - `critic`: the model that is trained beside a policy, on the same layout and with the same optimizer; None without.
    - `numerics`: the choice among the kernels of a CPU (`kumi.spec.numerics`); None before they are measured.
    - `margin`: share of device memory that a plan must leave free; None for the default (`plan.uncertainty.margin`).
    - `model_name`: the name that the user gave the model; "" if it has none.
    - `cluster_of_nodes`: returns the cluster with another number of nodes; None if the links between nodes are unknown.
    """

    model: ModelSpec
    cluster: ClusterSpec
    batch: BatchSpec
    precision: Precision
    optim: Optim
    engine: Engine = KUMI
    passes: LossPasses = ONE_PASS
    rollout: RolloutSpec | None = None
    critic: ModelSpec | None = None
    numerics: Numerics | None = None
    margin: float | None = None
    model_name: str = field(default="", compare=False)
    cluster_of_nodes: Callable[[int], ClusterSpec] | None = field(default=None, compare=False, repr=False)

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models that are trained: the model, and its critic."""
        return (self.model,) if self.critic is None else (self.model, self.critic)

    @property
    def of_critic(self) -> Job:
        """The training of the critic alone, with the pass that computes the values before the updates."""
        assert self.critic is not None, "the run trains no critic"
        return replace(self, model=self.critic, critic=None, rollout=None, passes=LossPasses(forwards=1))

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the compute dtype: of activations, and of weights as matmuls read them."""
        return ITEMSIZE[self.precision.compute]

    @property
    def attention_len(self) -> float:
        """`BatchSpec.attention_len`, or the full row if the engine's attention crosses documents."""
        return self.batch.seq_len if self.engine.whole_rows else self.batch.attention_len

    def step_flops(self, head_tokens: int | None = None) -> int:
        """Return the model FLOPs of a step with `head_tokens` log-probs (see `kumi.spec.ledger.train_flops`)."""
        batch = self.batch
        return ledger.train_flops(self.model, batch.tokens_per_step, batch.seq_len, self.attention_len, head_tokens)

    def on_nodes(self, nodes: int) -> Job:
        """Return this job on `nodes` nodes."""
        assert self.cluster_of_nodes is not None, "the links between more nodes are unknown"
        return replace(self, cluster=self.cluster_of_nodes(nodes))
