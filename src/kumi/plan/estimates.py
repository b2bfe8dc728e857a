"""The planner's estimate of one layout: memory, step time, stages and collectives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kumi.spec.cluster import Device
from kumi.spec.layout import Layout


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of device memory that one rank of a pipeline stage uses, by kind, at the moment of its peak.

    All kinds are taken at the same moment, so that their sum is the peak.

    `params`, `grads`: resident parameters and gradients.
    `optimizer`: optimizer states, master weights included.
    `gathered`: transient memory of sharded states: unsharded FSDP units, communication buffers, unsharded gradients.
    `weights`: copies of parameters in the compute dtype.
    `activations`: saved activations of all microbatches in flight, and recomputed activations.
    `head`: logits and loss.
    `buffers`: communication and token-dispatch buffers.
    `reserved`: device context, communication library and allocator overhead.
    `reference`: the reference of a run with rollouts, if it is a second model.
    `reward_models`: weights of the reward models of a run with rollouts.
    `critic`: the states of a critic that is trained beside the model.
    `cache`: keys, values and states of the replies that a run with rollouts generates; 0 unless the peak is in
        generation.
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
    reference: int = 0
    critic: int = 0
    cache: int = 0
    reward_models: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def bytes_as_measured(memory: MemoryEstimate, device: Device) -> int:
    """Return the part of `memory` that a run on `device` measures as its peak.

    On a GPU it is the allocated memory; on a CPU all that the process adds to what it had before the model was built.
    """
    return memory.total - (memory.reserved if device.is_gpu else device.reserved)


@dataclass(frozen=True)
class Collective:
    """A collective that a rank takes part in, with the number of times that it runs in a step.

    `kind`: all_gather, reduce_scatter, all_reduce, all_to_all or send.
    `axis`: the mesh axis of its process group ("tp", "dp_shard", "world", ...).
    `degree`: ranks of the group.
    `bytes`: size of the unsharded tensor; for all_to_all and send, the bytes that one rank sends.
    `count`: occurrences in a step.
    `when`: the phase: forward, backward, recompute or update.
    `what`: the tensor that is communicated.
    `link`: name of the slowest link that the group crosses.
    `seconds`: time of all occurrences.
    `exposed`: the seconds that no computation hides.
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
    """One pipeline stage: its pp `rank`, its layers [first, last), and its seconds per microbatch.

    `backward_input`, `backward_weight`: the backward pass in two parts, the gradients of inputs and those of weights.
    """

    rank: int
    first: int
    last: int
    forward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True)
class Estimate:
    """Memory and step time of one layout.

    `memory`: one entry per pp rank.
    `usable`: bytes of a device that an estimate may fill.
    `step_seconds`: seconds of a step.
    `time`: seconds of a step by kind, on the slowest pp rank; they add up to `step_seconds`. Kinds: forward, backward,
        recompute, tp, cp, ep, pp, dp (exposed communication only), bubble, optimizer, offload, host, and passes: the
        forward passes of `Job.passes`, which have no gradient. Runs with rollouts also have rollout (generation) and
        scoring (by reward models), and runs with a critic have critic.
    `stages`: the pipeline stages in model order.
    `collectives`: all communication of one rank in a step, on the pp rank with the most work.
    `model_flops`: FLOPs of a step, with attention counted in full within documents (`Job.attention_len`), and
        recomputation not at all.
    `peak_flops`: FLOP/s of a device on its data sheet.
    `uncertainty`: mean relative error of the planner on published runs.
    `host_memory`: bytes of host memory that a rank uses for offloading.
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
        """Bytes of the pp rank that needs the most memory."""
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
        """Model FLOPs utilisation (Chowdhery et al., 2022, appendix B): attention as in `model_flops`."""
        return self.model_flops / (self.step_seconds * self.devices * self.peak_flops)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and derived figures as plain data, for --json."""
        data = asdict(self)
        data["time"] = dict(self.time)
        return data | {
            "fits": self.fits,
            "peak_memory": self.peak_memory,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
        }
