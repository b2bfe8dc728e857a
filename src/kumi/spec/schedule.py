"""In which order the ranks of a pipeline work: lists of actions, which a planner simulates and a trainer runs.

Every (stage, microbatch) has a forward F and either one full backward B, or an input gradient I, which the previous
stage waits for, and a weight gradient W, which nobody waits for. A rank works through its list in order; an action
starts when what it needs has come from the neighbouring stages. Microbatches of one kind on one stage are in
ascending order, so that a rank's list is a sequence of (kind, chunk), the chunk being one of the rank's own stages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kumi.errors import LayoutError
from kumi.spec.schedules import DEFAULT, SCHEDULES, V_SHAPED
from kumi.spec.schedules.schedule_record import Action, Pattern, numbered


def refusal(schedule: str, pp: int, stages: int, microbatches: int) -> str | None:
    """Why `schedule` cannot order `microbatches` over `pp` ranks of `stages` stages; None when it can."""
    if schedule not in SCHEDULES:
        return f"schedule='{schedule}' is unknown; use {', '.join(SCHEDULES)}"
    record = SCHEDULES[schedule]
    if not record.takes_stages(stages):
        return _wrong_stages(schedule, stages)
    if not record.takes_microbatches(pp, microbatches):
        return _wrong_microbatches(schedule, pp, microbatches)
    return None


def _wrong_stages(schedule: str, stages: int) -> str:
    record = SCHEDULES[schedule]
    if record.more_stages:
        return (
            f"schedule='{schedule}' needs {record.stages} or more stages a rank, not stages={stages}; "
            f"set stages = {record.stages}, or {DEFAULT}"
        )
    remedy = f"set stages = {record.stages}" + (", or schedule = 'interleaved'" if record.stages == 1 else "")
    return (
        f"schedule='{schedule}' gives each rank {record.stages} stage{'s' * (record.stages > 1)}, not stages={stages}; "
        f"{remedy}"
    )


def _wrong_microbatches(schedule: str, pp: int, microbatches: int) -> str:
    least = SCHEDULES[schedule].least_per_rank
    if microbatches < least * pp:
        return (
            f"schedule='{schedule}' needs at least {least} x pp = {least * pp} microbatches a step, not "
            f"{microbatches}; use a smaller microbatch, more tokens_per_step, or {_with_fewer(schedule)}"
        )
    return (
        f"schedule='{schedule}' takes microbatches in groups of pp={pp}, which does not divide the "
        f"{microbatches} of a step; change microbatch or tokens_per_step, or use {DEFAULT}"
    )


def _with_fewer(schedule: str) -> str:
    """Return the first schedule of the same shape that takes any number of microbatches, else the default."""
    shape = SCHEDULES[schedule].v_shaped
    return next((name for name, one in SCHEDULES.items() if one.v_shaped == shape and not one.least_per_rank), DEFAULT)


def placement(schedule: str, pp: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, in model order: dealt round after round, or down and back for the V-shaped."""
    turns = schedule in V_SHAPED
    return tuple(tuple(stage_of(turns, pp, rank, chunk) for chunk in range(stages)) for rank in range(pp))


def stage_of(turns: Any, pp: Any, rank: Any, chunk: int) -> Any:
    """Return the stage that `rank` holds as number `chunk` of its own, where stages go back over the ranks if `turns`;
    bools and ints, or arrays of them."""
    dealt = rank + chunk * pp
    return dealt + turns * (pp - 1 - 2 * rank) if chunk == 1 else dealt


def pattern(schedule: str, pp: int, stages: int, microbatches: int, rank: int) -> Pattern:
    """What `rank` does in a step. Raises LayoutError where the schedule cannot do it."""
    reason = refusal(schedule, pp, stages, microbatches)
    if reason:
        raise LayoutError(reason)
    return SCHEDULES[schedule].program(rank, pp, stages, microbatches)


@lru_cache(maxsize=32)
def actions(schedule: str, pp: int, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What each of the `pp` ranks does in a step, in order. Raises LayoutError where the schedule cannot do it."""
    found = []
    for rank, held in enumerate(placement(schedule, pp, stages)):
        tokens = pattern(schedule, pp, stages, microbatches, rank).tokens
        found.append(tuple(numbered(tokens, held)))
    return tuple(found)
