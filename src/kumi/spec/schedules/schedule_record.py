"""The record of a pipeline schedule, and the types that its functions use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

# (kind, chunk): an action on the stage number `chunk` of a rank's stages, without the microbatch.
ChunkAction = tuple[str, int]


class Action(NamedTuple):
    """`kind` is F (forward), B (full backward), I (input gradient) or W (weight gradient)."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class RankProgram:
    """The actions of a rank: `warmup`, then `steady` `repeats` times, then `cooldown`.

    A step with the microbatches of one more steady phase has one more repetition on each rank, and no other difference.
    A schedule with all forwards first (`Schedule.forwards_first`) has an empty steady phase.
    """

    warmup: tuple[ChunkAction, ...]
    steady: tuple[ChunkAction, ...]
    repeats: int
    cooldown: tuple[ChunkAction, ...]

    @property
    def chunk_actions(self) -> tuple[ChunkAction, ...]:
        """All actions of the rank in order."""
        return self.warmup + self.steady * self.repeats + self.cooldown


def number_microbatches(chunk_actions: Sequence[ChunkAction], stages: Sequence[int]) -> Iterator[Action]:
    """Yield the actions of a rank with `stages`: each gets the microbatch number that equals the count of earlier
    actions of its kind on its stage."""
    forward, backward, weight = ([0] * len(stages) for _ in range(3))
    counters = {"F": forward, "B": backward, "I": backward, "W": weight}
    for kind, chunk in chunk_actions:
        counter = counters[kind]
        yield Action(kind, stages[chunk], counter[chunk])
        counter[chunk] += 1
        if kind == "B":
            weight[chunk] += 1


class ArrayNamespace(Protocol):
    """The functions of an array namespace that formulas use; numpy is one (see docs/decisions/schedule-records.md)."""

    def minimum(self, x1: Any, x2: Any, /) -> Any: ...
    def maximum(self, x1: Any, x2: Any, /) -> Any: ...
    def where(self, condition: Any, x1: Any, x2: Any, /) -> Any: ...
    def ceil(self, x: Any, /) -> Any: ...
    def floor(self, x: Any, /) -> Any: ...


# A path through the warmup and the cooldown of a pipeline: how many forwards, input gradients and weight gradients of
# chunks, and how many transfers, it has in addition to the work of one rank.
PipelinePath = tuple[Any, Any, Any, Any]


@dataclass(frozen=True)
class PipelineTimes:
    """Times of pipelines with one schedule: each field is an array of floats with an element per pipeline.

    - `other_ranks`: pp - 1.
    - `stages`: stages of a rank.
    - `later`: microbatches after the first.
    - `busiest_forward`, `busiest_work`: seconds of a microbatch on the busiest rank: forward, and forward and backward.
    - `forward`, `input_grad`, `weight_grad`: seconds of one chunk, on average over the other ranks.
    - `send`: seconds of a transfer.
    """

    other_ranks: Any
    stages: Any
    later: Any
    busiest_forward: Any
    busiest_work: Any
    forward: Any
    input_grad: Any
    weight_grad: Any
    send: Any

    @property
    def other_work(self) -> Any:
        """Seconds of a microbatch on one of the other ranks, forward and backward."""
        return self.stages * (self.forward + self.input_grad + self.weight_grad)

    def critical_path(self, xp: ArrayNamespace, paths: Sequence[PipelinePath]) -> Any:
        """Return the seconds of the longest of `paths`."""
        longest, *others = (
            forward * self.forward + input_grad * self.input_grad + weight_grad * self.weight_grad + send * self.send
            for forward, input_grad, weight_grad, send in paths
        )
        for seconds in others:
            longest = xp.maximum(longest, seconds)
        return longest


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the order of each rank's actions, and its effects on time and memory.

    - `program(rank, pp, stages, microbatches)`: the actions of `rank` in a step.
    - `in_flight(xp, pp, stages, microbatches, rank)`: peak number of (microbatch, stage) pairs with live activations on
      a rank. They live from the start of the forward to the end of the last action that reads them: the full backward,
      or the weight gradient.
    - `bubble(xp, times)`: seconds of a step beyond the work of the busiest rank, in closed form (see
      `kumi.plan.pipeline.closed_forms`).
    - `stages`: stages of each rank; with `more_stages`, the minimum.
    - `v_shaped`: the second half of the stages is in reverse order of ranks; else stages are assigned round-robin.
    - `splits_backward`: weight gradients are separate actions.
    - `forwards_first`: all forwards come before the first backward.
    - `in_rounds`: microbatches go through each stage in groups of pp, which must divide their number.
    - `least_per_rank`: minimum number of microbatches in a step, divided by pp.
    - `reach`: maximum distance between an action and the action that it depends on, in repetitions of the steady phase.
    - `common`: most trainers with pipeline parallelism implement it.

    The formulas take ints, or arrays of ints, and `xp`, the namespace of the arrays.
    """

    program: Callable[[int, int, int, int], RankProgram]
    in_flight: Callable[[ArrayNamespace, Any, Any, Any, Any], Any]
    bubble: Callable[[ArrayNamespace, PipelineTimes], Any]
    stages: int = 1
    more_stages: bool = False
    v_shaped: bool = False
    splits_backward: bool = False
    forwards_first: bool = False
    in_rounds: bool = False
    least_per_rank: int = 0
    reach: int = 1
    common: bool = False

    def takes_stages(self, stages: Any) -> Any:
        """Return whether each rank may have `stages` stages, an int or an array of ints."""
        return stages >= self.stages if self.more_stages else stages == self.stages

    def takes_microbatches(self, pp: Any, microbatches: Any) -> Any:
        """Return whether a step on `pp` ranks may have `microbatches` microbatches, ints or arrays of ints."""
        enough = microbatches >= self.least_per_rank * pp
        return enough & (microbatches % pp == 0) if self.in_rounds else enough
