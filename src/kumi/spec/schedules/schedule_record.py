"""What is known of a pipeline schedule: the record that every schedule fills in, and what its functions work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

# A step of a rank: what to do, and on which of its own stages.
Token = tuple[str, int]


class Action(NamedTuple):
    """`kind` is F (forward), B (full backward), I (input gradient) or W (weight gradient)."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Pattern:
    """What a rank does: `warm`, then `block` as often as `repeats` says, then `rest`.

    One more block's worth of microbatches adds one repetition on every rank and changes nothing else, unless all
    forwards come first (`Schedule.forwards_first`): such a schedule has no blocks.
    """

    warm: tuple[Token, ...]
    block: tuple[Token, ...]
    repeats: int
    rest: tuple[Token, ...]

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.warm + self.block * self.repeats + self.rest


def numbered(tokens: Sequence[Token], stages: Sequence[int]) -> Iterator[Action]:
    """Return `tokens` of a rank that holds `stages`, with the microbatch of each: how often the same was done on the
    same stage before."""
    forward, backward, weight = ([0] * len(stages) for _ in range(3))
    counters = {"F": forward, "B": backward, "I": backward, "W": weight}
    for kind, chunk in tokens:
        counter = counters[kind]
        yield Action(kind, stages[chunk], counter[chunk])
        counter[chunk] += 1
        if kind == "B":
            weight[chunk] += 1


class Arrays(Protocol):
    """The functions of an array namespace that formulas use; numpy is one (see docs/decisions/schedule-records.md)."""

    def minimum(self, x1: Any, x2: Any, /) -> Any: ...
    def maximum(self, x1: Any, x2: Any, /) -> Any: ...
    def where(self, condition: Any, x1: Any, x2: Any, /) -> Any: ...
    def ceil(self, x: Any, /) -> Any: ...
    def floor(self, x: Any, /) -> Any: ...


# A path through the start and the end of a pipeline: how many chunks' forwards, input gradients and weight gradients,
# and how many transfers it takes beside one rank's work.
Path = tuple[Any, Any, Any, Any]


@dataclass(frozen=True)
class Rows:
    """Pipelines of one schedule, an array of floats for each field: pp - 1, stages of a rank, microbatches - 1, and
    seconds.

    `ahead` and `work` are the busiest rank's forward and all it does in a microbatch; `forward`, `inputs` and `weights`
    one chunk's forward, input gradient and weight gradient, on average over the other ranks; `send` a transfer.
    """

    others: Any
    stages: Any
    after: Any
    ahead: Any
    work: Any
    forward: Any
    inputs: Any
    weights: Any
    send: Any

    @property
    def total(self) -> Any:
        """Seconds of a microbatch on one of the other ranks."""
        return self.stages * (self.forward + self.inputs + self.weights)

    def longest(self, xp: Arrays, paths: Sequence[Path]) -> Any:
        """Return the seconds of the longest of `paths`."""
        first, *others = (
            forward * self.forward + inputs * self.inputs + weights * self.weights + send * self.send
            for forward, inputs, weights, send in paths
        )
        for seconds in others:
            first = xp.maximum(first, seconds)
        return first


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: in which order each rank works, and what follows from it for time and memory.

    - `program(rank, pp, stages, microbatches)`: what `rank` does in a step.
    - `in_flight(xp, pp, stages, microbatches, rank)`: for how many microbatches times stages of a rank it keeps
      activations at the peak. They are alive from the start of their forward to the end of the action that needs them
      last: the full backward, or the weight gradient.
    - `bubble(xp, rows)`: seconds of a step beyond the busiest rank's work, in closed form (see
      `kumi.plan.pipeline.closed_forms`).
    - `stages`: how many stages each rank holds; with `more_stages` the smallest number of them.
    - `v_shaped`: the second half of the stages goes back over the ranks; else stages are dealt round after round.
    - `splits_backward`: weight gradients are actions of their own, which nobody waits for.
    - `forwards_first`: all forwards come before the first backward.
    - `in_rounds`: microbatches go through each stage in groups of pp, which must divide them.
    - `least_per_rank`: a step has at least so many microbatches for each rank.
    - `reach`: how many blocks back an action may need, at most.
    - `common`: most trainers with pipelines have it.

    The formulas take ints, or arrays of ints, and `xp`, the namespace of the arrays.
    """

    program: Callable[[int, int, int, int], Pattern]
    in_flight: Callable[[Arrays, Any, Any, Any, Any], Any]
    bubble: Callable[[Arrays, Rows], Any]
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
        """Return whether each rank may hold so many `stages`, an int or an array of ints."""
        return stages >= self.stages if self.more_stages else stages == self.stages

    def takes_microbatches(self, pp: Any, microbatches: Any) -> Any:
        """Return whether a step of `pp` ranks may have so many `microbatches`, ints or arrays of ints."""
        enough = microbatches >= self.least_per_rank * pp
        return enough & (microbatches % pp == 0) if self.in_rounds else enough
