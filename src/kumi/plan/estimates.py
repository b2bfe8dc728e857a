"""What the planner says of one layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kumi.spec.layout import Layout


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank of a pipeline stage holds at its peak, by kind.

    `params`, `grads`, `optimizer` (masters included) stay from step to step. `gathered` is what dividing states costs
    in passing: whole units, their transfer buffers, whole gradients. `weights` are copies of parameters in the compute
    dtype; `activations` what all microbatches in flight keep, and what recomputation makes again; `head` the logits
    and the loss; `buffers` of communication and dispatch; `reserved` what the context, the communication library and
    the allocator's rounding take. All are those of the fullest moment, so that their sum is the peak.
    """

    params: int
    grads: int
    optimizer: int
    gathered: int
    weights: int
    activations: int
    head: int
    buffers: int = 0
    reserved: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Collective:
    """One kind of message that a rank sends in a step.

    `kind` is all_gather, reduce_scatter, all_reduce, all_to_all or send; `axis` the mesh axis of its group (or
    "dp_shard+cp" and the like), of `degree` ranks; `bytes` what one rank holds of the whole tensor (the full tensor
    for all_gather, reduce_scatter and all_reduce); `count` how many in a step; `when` is the phase: forward, backward,
    recompute, update. `link` is the slowest link it crosses. `seconds` is what all of them take, `exposed` the part
    that nothing hides.
    """

    kind: str
    axis: str
    degree: int
    bytes: float
    count: int
    when: str
    what: str = ""
    link: str = ""
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True)
class StageEstimate:
    """One pipeline stage: `rank` on the pp axis that holds it, its layers [first, last), seconds a microbatch."""

    rank: int
    first: int
    last: int
    forward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True)
class Estimate:
    """What a layout needs and how fast it is.

    `memory` has one entry for each rank of the pp axis; `usable` is what a device offers. `time` holds seconds of a
    step by kind, on the rank that decides its length, and its values add up to `step_seconds`: forward, backward,
    recompute, tp, cp, ep, pp, dp (each only what is exposed), bubble, optimizer, offload, host. `model_flops` counts
    attention in full and no recomputation; `uncertainty` is the model's mean error on published runs.
    """

    layout: Layout
    memory: tuple[MemoryEstimate, ...]
    usable: int
    step_seconds: float
    time: tuple[tuple[str, float], ...]
    stages: tuple[StageEstimate, ...]
    collectives: tuple[Collective, ...]
    tokens_per_step: int
    devices: int
    model_flops: float
    peak_flops: float
    uncertainty: float
    host_memory: int = 0

    @property
    def peak_memory(self) -> int:
        return max(stage.total for stage in self.memory)

    @property
    def fits(self) -> bool:
        return self.peak_memory <= self.usable

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al., 2022, appendix B): attention in full, no recomputation."""
        return self.model_flops / (self.step_seconds * self.devices * self.peak_flops)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, for --json."""
        found = asdict(self)
        found["time"] = dict(self.time)
        return found | {
            "fits": self.fits,
            "peak_memory": self.peak_memory,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
        }
