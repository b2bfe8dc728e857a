"""The traits of a planned run that decide how far its estimate may be off, and the regimes of similar errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params
from kumi.spec.model import MoE

# Kinds of a step's time (`Estimate.time`) that are communication which no computation hides.
_EXPOSED = ("tp", "cp", "ep", "dp", "pp", "offload")

# A step with at least this share of exposed communication is communication-bound: published step times of such runs
# were off by up to a factor of five, and repeats of a run differed as much (docs/accuracy.md).
COMMUNICATION_BOUND = 0.4


@dataclass(frozen=True)
class RunTraits:
    """What is compared between a planned run and published runs.

    `stack`: `Engine.stack`. `experts`: the model has experts. `communication`: share of the step's time in exposed
    communication. `techniques`: those of cp, offload and LoRA in use. `params`: parameters of the model.
    """

    stack: str
    experts: bool
    recompute: str
    device: str
    devices: int
    params: float
    seq_len: int
    communication: float
    techniques: tuple[str, ...] = ()

    @property
    def time_regime(self) -> str:
        """The regime of the error of step times."""
        if self.communication >= COMMUNICATION_BOUND:
            return "communication-bound"
        return "experts" if self.experts else "dense"

    @property
    def memory_regime(self) -> str:
        """The regime of the error of peak memory."""
        return self.stack


def run_traits(job: Job, layout: Layout, kinds: Mapping[str, float]) -> RunTraits:
    """Return the traits of `job` with `layout`; `kinds` are the seconds of a step by kind."""
    used = (("context parallelism", layout.cp > 1), ("offloading", layout.offload != "none"), ("LoRA", _lora(job)))
    return RunTraits(
        stack=job.engine.stack,
        experts=any(isinstance(layer.mlp, MoE) for layer in job.model.layers),
        recompute=layout.recompute,
        device=job.cluster.device.name,
        devices=layout.world_size,
        params=float(num_params(job.model)),
        seq_len=job.batch.seq_len,
        communication=sum(kinds.get(kind, 0.0) for kind in _EXPOSED) / sum(kinds.values()),
        techniques=tuple(name for name, is_used in used if is_used),
    )


def _lora(job: Job) -> bool:
    return job.model.lora is not None
