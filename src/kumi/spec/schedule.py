"""Pipeline schedules as lists of actions per rank, which the planner simulates and the trainer runs.

Each (stage, microbatch) has a forward F and then either one full backward B, or an input gradient I, which the previous
stage waits for, and a weight gradient W, which no stage waits for. A rank runs its list in order. An action starts when
its input has arrived from the neighbouring stage. The microbatches of one kind on one stage are in ascending order, so
the list of a rank is a sequence of (kind, chunk), where chunk is the index of one of the rank's stages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kumi.errors import LayoutError
from kumi.spec.schedules import DEFAULT, SCHEDULES, V_SHAPED
from kumi.spec.schedules.schedule_record import Action, RankProgram, number_microbatches


def illegal_schedule(schedule: str, pp: int, stages: int, microbatches: int) -> str | None:
    """Return the reason why `schedule` cannot run `microbatches` on `pp` ranks with `stages` stages each, or None."""
    if schedule not in SCHEDULES:
        return f"schedule='{schedule}' is unknown; use one of {', '.join(SCHEDULES)}"
    record = SCHEDULES[schedule]
    if not record.takes_stages(stages):
        return _wrong_stages(schedule, stages)
    if not record.takes_microbatches(pp, microbatches):
        return _wrong_microbatches(schedule, pp, microbatches)
    return None


def is_pipelined(pp: int, schedule: str) -> bool:
    """Return True if other microbatches may be computed between the forward and the backward pass of a microbatch.

    Schedules other than the default may do so on a single rank, too.
    """
    return pp > 1 or schedule != DEFAULT


def _wrong_stages(schedule: str, stages: int) -> str:
    """Return the message for `schedule` with another number of stages per rank than it takes."""
    record = SCHEDULES[schedule]
    if record.more_stages:
        return (
            f"schedule='{schedule}' needs {record.stages} or more stages per rank, not stages={stages}; "
            f"set stages = {record.stages}, or schedule = '{DEFAULT}'"
        )
    remedy = f"set stages = {record.stages}" + (", or schedule = 'interleaved'" if record.stages == 1 else "")
    return (
        f"schedule='{schedule}' needs {record.stages} stage{'s' * (record.stages > 1)} per rank, not stages={stages}; "
        f"{remedy}"
    )


def _wrong_microbatches(schedule: str, pp: int, microbatches: int) -> str:
    """Return the message for `schedule` with too few microbatches, or with a number that `pp` does not divide."""
    minimum = SCHEDULES[schedule].least_per_rank
    if microbatches < minimum * pp:
        return (
            f"schedule='{schedule}' needs at least {minimum} x pp = {minimum * pp} microbatches per step, not "
            f"{microbatches}; use a smaller microbatch, more tokens_per_step, or schedule = '{_with_fewer(schedule)}'"
        )
    return (
        f"schedule='{schedule}' runs microbatches in groups of pp={pp}, which does not divide the {microbatches} "
        f"microbatches of a step; change microbatch or tokens_per_step, or set schedule = '{DEFAULT}'"
    )


def _with_fewer(schedule: str) -> str:
    """Return the first schedule of the same shape, V or not, that takes any number of microbatches; else DEFAULT."""
    shape = SCHEDULES[schedule].v_shaped
    return next((name for name, own in SCHEDULES.items() if own.v_shaped == shape and not own.least_per_rank), DEFAULT)


def stage_assignment(schedule: str, pp: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, in model order.

    Stages are assigned round-robin over the ranks, or, for V-shaped schedules, down the ranks and back.
    """
    v_shaped = schedule in V_SHAPED
    return tuple(tuple(stage_of(v_shaped, pp, rank, chunk) for chunk in range(stages)) for rank in range(pp))


def stage_of(v_shaped: Any, pp: Any, rank: Any, chunk: int) -> Any:
    """Return the stage that is chunk number `chunk` of `rank`: round-robin, or down and back if `v_shaped`.

    The arguments are bools and ints, or arrays of them.
    """
    round_robin = rank + chunk * pp
    return round_robin + v_shaped * (pp - 1 - 2 * rank) if chunk == 1 else round_robin


def rank_program(schedule: str, pp: int, stages: int, microbatches: int, rank: int) -> RankProgram:
    """Return the program of `rank` for a step. Raise LayoutError if `schedule` cannot run these numbers."""
    reason = illegal_schedule(schedule, pp, stages, microbatches)
    if reason:
        raise LayoutError(reason)
    return SCHEDULES[schedule].program(rank, pp, stages, microbatches)


@lru_cache(maxsize=32)
def actions(schedule: str, pp: int, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each of the `pp` ranks in a step, in order. Raise LayoutError as `rank_program` does."""
    lists = []
    for rank, own_stages in enumerate(stage_assignment(schedule, pp, stages)):
        program = rank_program(schedule, pp, stages, microbatches, rank)
        lists.append(tuple(number_microbatches(program.chunk_actions, own_stages)))
    return tuple(lists)
