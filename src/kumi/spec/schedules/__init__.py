"""Pipeline schedules: all that is known of each, one module each, listed here."""

from __future__ import annotations

from kumi.spec.schedules import dualpipe, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zb_v
from kumi.spec.schedules.schedule_record import Schedule

# Name -> its record. A planner's arrays hold the number of a schedule in this order.
SCHEDULES: dict[str, Schedule] = {
    "1f1b": one_f_one_b.SCHEDULE,
    "gpipe": gpipe.SCHEDULE,
    "interleaved": interleaved.SCHEDULE,
    "zb-h1": zb_h1.SCHEDULE,
    "zb-h2": zb_h2.SCHEDULE,
    "zb-v": zb_v.SCHEDULE,
    "dualpipe": dualpipe.SCHEDULE,
}
# The schedule where none is named. On one stage it accumulates gradients: each forward is followed by its backward.
DEFAULT = "1f1b"

V_SHAPED = tuple(name for name, one in SCHEDULES.items() if one.v_shaped)
FULL_BACKWARD = tuple(name for name, one in SCHEDULES.items() if not one.splits_backward)
FORWARDS_FIRST = tuple(name for name, one in SCHEDULES.items() if one.forwards_first)
IN_ROUNDS = tuple(name for name, one in SCHEDULES.items() if one.in_rounds)
