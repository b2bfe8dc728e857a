"""The channels between pipeline ranks: sets of messages that are sent one after the other.

NCCL runs all sends and receives of a rank on one communicator in the order of their posts. A message that waits for its
peer would hold up those of other neighbours, so on GPUs each channel has a communicator of its own:

    rank       0 ---- 1 ---- 2 ---- 3 ---- 0        with interleaved stages, the last rank sends to the first
    color         0      1      0      1            no rank has two edges of one color

A channel is one kind of message in one direction on the edges of one color. A rank thus exchanges the messages of a
channel with one neighbour only. The order of the posts is the same on both ends (see `kumi.spec.sends_and_recvs`).
"""

from __future__ import annotations

from itertools import pairwise

from kumi.spec.schedule import stage_assignment
from kumi.spec.sends_and_recvs import ACTIVATION, GRADIENT


def channel_name(kind: str, source: int, target: int, pp: int) -> str:
    """Return the channel of the messages of `kind` from pipeline rank `source` to its neighbour `target`."""
    up = (target - source) % pp == 1
    edge = source if up else target
    # A ring of an odd number of ranks needs a third color.
    color = 2 if pp % 2 and edge == pp - 1 else edge % 2
    return f"{kind} {'up' if up else 'down'} {color}"


def pipeline_channels(schedule: str, pp: int, stages: int) -> tuple[str, ...]:
    """Return the channels of a pipeline of `pp` ranks with `stages` stages each, in a fixed order."""
    assignment = stage_assignment(schedule, pp, stages)
    home = {stage: rank for rank, own in enumerate(assignment) for stage in own}
    ends = [(home[first], home[second]) for first, second in pairwise(sorted(home))]
    names = {channel_name(ACTIVATION, source, target, pp) for source, target in ends if source != target}
    names |= {channel_name(GRADIENT, target, source, pp) for source, target in ends if source != target}
    return tuple(sorted(names))
