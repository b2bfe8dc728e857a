"""In which order the ranks of a pipeline work: lists of actions, which a planner simulates and a trainer runs.

Every (stage, microbatch) has a forward F and either one full backward B, or an input gradient I, which the previous
stage waits for, and a weight gradient W, which nobody waits for. A rank works through its list in order; an action
starts when what it needs has come from the neighbouring stages. Microbatches of one kind on one stage are in
ascending order, so that a rank's list is a sequence of (kind, chunk), the chunk being one of the rank's own stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kumi.errors import LayoutError

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

    One more block's worth of microbatches adds one repetition on every rank and changes nothing else, but for "gpipe",
    which has no blocks.
    """

    warm: tuple[Token, ...]
    block: tuple[Token, ...]
    repeats: int
    rest: tuple[Token, ...]

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.warm + self.block * self.repeats + self.rest


def gpipe(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""
    return Pattern((("F", 0),) * microbatches, (), 0, (("B", 0),) * microbatches)


def one_forward_one_backward(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    """A backward as soon as there is one, which frees what its forward kept (Narayanan et al., 2019, PipeDream)."""
    warm = min(microbatches, pp - 1 - rank)
    return Pattern((("F", 0),) * warm, (("F", 0), ("B", 0)), microbatches - warm, (("B", 0),) * warm)


def interleaved(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    """1F1B over several stages a rank, `pp` microbatches at a time through each (Narayanan et al., 2021,
    arXiv:2104.04473)."""
    total, one_round = stages * microbatches, stages * pp
    forwards = [("F", chunk) for chunk in range(stages) for _ in range(pp)]
    backwards = [("B", chunk) for chunk in reversed(range(stages)) for _ in range(pp)]
    warm = min(total, (stages - 1) * pp + 2 * (pp - 1 - rank))
    ahead = [forwards[(warm + index) % one_round] for index in range(one_round)]
    block = tuple(token for pair in zip(ahead, backwards, strict=True) for token in pair)
    repeats, odd = divmod(total - warm, one_round)
    left = [backwards[index % one_round] for index in range(odd, odd + warm)]
    return Pattern(
        tuple(forwards[index % one_round] for index in range(warm)), block, repeats, (*block[: 2 * odd], *left)
    )


def zb_h1(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    """1F1B with weight gradients put off by as many microbatches as the rank's number (Qi et al., 2024,
    arXiv:2401.10241, section 2.1): no rank keeps more than the first rank of 1F1B."""
    warm = min(microbatches, pp - 1 - rank)
    early = min(microbatches - warm, rank)
    late = min(microbatches, rank) - early
    repeats = microbatches - warm - early
    rest = (*(("I", 0),) * late, *(("I", 0), ("W", 0)) * (warm - late), *(("W", 0),) * (early + late))
    return Pattern((*(("F", 0),) * warm, *(("F", 0), ("I", 0)) * early), (("F", 0), ("I", 0), ("W", 0)), repeats, rest)


def zb_h2(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    """As zb-h1 with twice the forwards ahead (Qi et al., 2024, arXiv:2401.10241, section 2.2): the bubble at the
    start is filled with forwards and the one at the end with weight gradients."""
    warm = min(microbatches, 2 * (pp - rank) - 1)
    early = min(microbatches - warm, 2 * rank)
    late = min(microbatches, 2 * rank) - early
    repeats = microbatches - warm - early
    rest = (*(("I", 0),) * late, *(("I", 0), ("W", 0)) * (warm - late), *(("W", 0),) * (early + late))
    return Pattern((*(("F", 0),) * warm, *(("I", 0), ("F", 0)) * early), (("I", 0), ("W", 0), ("F", 0)), repeats, rest)


def zb_v(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    """Two stages a rank, the second half of the model going back over the ranks (Qi et al., 2024, arXiv:2405.15362):
    every rank keeps as much as the first one of 1F1B."""
    down, up, far, enough = 0, 1, pp - rank, 2 * pp - 1
    if microbatches < enough:
        whole = _numbered(zb_v(rank, pp, stages, enough).tokens, (down, up))
        return Pattern(tuple((kind, chunk) for kind, chunk, number in whole if number < microbatches), (), 0, ())
    triple = (("F", up), ("I", up), ("W", up))
    warm = (*(("F", down),) * (2 * far - 1), *(("F", up), ("F", down)) * rank, *triple * far)
    block = (("F", down), ("I", down), ("W", down), *triple)
    cool = (
        *block[1:] * (far - 1),
        *(("I", down), ("I", up)) * rank,
        *(("I", down), ("W", down)) * far,
        *(("W", up),) * rank,
        *(("W", down),) * rank,
    )
    return Pattern(warm, block, microbatches - enough + rank, cool)


def dualpipe(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    """DualPipe (DeepSeek-V3, 2024, arXiv:2412.19437) folded into a V, so that no weights are kept twice: in the
    block a forward and a full backward of the other direction stand together, whose messages can hide each other."""
    down, up, far = 0, 1, pp - 1 - rank
    pair = rank + 1
    warm = (*(("F", down),) * (2 * far), *(("F", down), ("F", up)) * pair, *(("I", up), ("W", up), ("F", up)) * far)
    block = (("F", down), ("B", up), ("F", up), ("B", down))
    alternate = tuple(("B" if index < pair else "I", (up, down)[index % 2]) for index in range(2 * pair))
    late = [*(chunk for kind, chunk in alternate if kind == "I"), *[down] * far]
    between = tuple(token for chunk in late[:far] for token in (("W", chunk), ("I", down)))
    cool = (*block[1:] * far, *alternate, *between, *(("W", chunk) for chunk in late[far:]))
    return Pattern(warm, block, microbatches - 2 * pp + pair, cool)


SCHEDULES: dict[str, Callable[[int, int, int, int], Pattern]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
}
V_SHAPED = ("zb-v", "dualpipe")
# Whose backwards are all full ones: no weight gradient is put off.
WHOLE = ("1f1b", "gpipe", "interleaved")


def refusal(schedule: str, pp: int, stages: int, microbatches: int) -> str | None:
    """Why `schedule` cannot order `microbatches` over `pp` ranks of `stages` stages; None when it can."""
    if schedule not in SCHEDULES:
        return f"schedule='{schedule}' is unknown; use {', '.join(SCHEDULES)}"
    if schedule in V_SHAPED and stages != 2:
        return f"schedule='{schedule}' gives each rank 2 stages, not stages={stages}; set stages = 2"
    if schedule == "interleaved" and stages < 2:
        return f"schedule='interleaved' needs 2 or more stages a rank, not stages={stages}; set stages = 2, or 1f1b"
    if schedule not in (*V_SHAPED, "interleaved") and stages != 1:
        return (
            f"schedule='{schedule}' gives each rank 1 stage, not stages={stages}; "
            f"set stages = 1, or schedule = 'interleaved'"
        )
    if schedule == "interleaved" and microbatches % pp:
        return (
            f"schedule='interleaved' takes microbatches in groups of pp={pp}, which does not divide the "
            f"{microbatches} of a step; change microbatch or tokens_per_step, or use 1f1b"
        )
    if schedule == "dualpipe" and microbatches < 2 * pp:
        return (
            f"schedule='dualpipe' needs at least 2 x pp = {2 * pp} microbatches a step, not {microbatches}; "
            f"use a smaller microbatch, more tokens_per_step, or zb-v"
        )
    return None


def placement(schedule: str, pp: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, in model order: dealt round after round, or down and back for the V-shaped."""
    if schedule in V_SHAPED:
        return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))
    return tuple(tuple(range(rank, pp * stages, pp)) for rank in range(pp))


def pattern(schedule: str, pp: int, stages: int, microbatches: int, rank: int) -> Pattern:
    """What `rank` does in a step. Raises LayoutError where the schedule cannot do it."""
    reason = refusal(schedule, pp, stages, microbatches)
    if reason:
        raise LayoutError(reason)
    return SCHEDULES[schedule](rank, pp, stages, microbatches)


@lru_cache(maxsize=32)
def actions(schedule: str, pp: int, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What each of the `pp` ranks does in a step, in order. Raises LayoutError where the schedule cannot do it."""
    found = []
    for rank, held in enumerate(placement(schedule, pp, stages)):
        tokens = pattern(schedule, pp, stages, microbatches, rank).tokens
        found.append(tuple(_numbered(tokens, held)))
    return tuple(found)


def _numbered(tokens: tuple[Token, ...], held: tuple[int, ...]) -> Iterator[Action]:
    """`tokens` with the microbatch of each: how often the same was done on the same stage before."""
    forward, backward, weight = ([0] * len(held) for _ in range(3))
    counters = {"F": forward, "B": backward, "I": backward, "W": weight}
    for kind, chunk in tokens:
        counter = counters[kind]
        yield Action(kind, held[chunk], counter[chunk])
        counter[chunk] += 1
        if kind == "B":
            weight[chunk] += 1
