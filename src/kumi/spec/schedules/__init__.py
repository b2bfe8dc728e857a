"""Pipeline schedules, with one module for each."""

from __future__ import annotations

from kumi.spec.schedules import dualpipe, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zb_v
from kumi.spec.schedules.schedule_record import Schedule

# Name -> record. The planner's arrays store a schedule as its index in this order.
SCHEDULES: dict[str, Schedule] = {
    "1f1b": one_f_one_b.SCHEDULE,
    "gpipe": gpipe.SCHEDULE,
    "interleaved": interleaved.SCHEDULE,
    "zb-h1": zb_h1.SCHEDULE,
    "zb-h2": zb_h2.SCHEDULE,
    "zb-v": zb_v.SCHEDULE,
    "dualpipe": dualpipe.SCHEDULE,
}
# The default schedule. With one stage it is gradient accumulation: each forward is followed by its backward.
DEFAULT = "1f1b"

# The names of the schedules whose record has a property.
V_SHAPED = tuple(name for name, record in SCHEDULES.items() if record.v_shaped)
FULL_BACKWARD = tuple(name for name, record in SCHEDULES.items() if not record.splits_backward)
FORWARDS_FIRST = tuple(name for name, record in SCHEDULES.items() if record.forwards_first)
IN_ROUNDS = tuple(name for name, record in SCHEDULES.items() if record.in_rounds)
