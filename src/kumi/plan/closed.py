"""How long a pipeline takes, written out for every schedule: what a search asks of millions of layouts.

With equal stages and transfers that are short beside the work, the length of a step is the work of one rank,
m (F + I + W), plus the longest of a few ways through the pipeline's start and end, each a whole number of forwards,
input gradients, weight gradients and transfers. They were read off the lists of `kumi.spec.schedule`, carried out with
many random durations; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kumi.plan.columns import Floats, Ints
from kumi.spec.layout import SCHEDULES

# How many chunks' forwards, input gradients, weight gradients, and how many transfers a way takes beside one rank's
# work, for every row.
Way = tuple[Any, Any, Any, Any]


@dataclass(frozen=True)
class _Rows:
    """Rows of one schedule: pp - 1, stages of a rank, microbatches - 1, and seconds.

    `ahead` and `work` are the busiest rank's forward and all it does in a microbatch; `forward`, `inputs`, `weights`
    one chunk's of the other ranks on average, `total` their work in a microbatch; `send` a transfer.
    """

    others: Floats
    stages: Floats
    after: Floats
    ahead: Floats
    work: Floats
    forward: Floats
    inputs: Floats
    weights: Floats
    send: Floats

    @property
    def total(self) -> Floats:
        return self.stages * (self.forward + self.inputs + self.weights)

    def longest(self, ways: Sequence[Way]) -> Floats:
        """Seconds of the longest of `ways`."""
        found: Floats = np.full(len(self.work), -np.inf)
        for forward, inputs, weights, send in ways:
            seconds = forward * self.forward + inputs * self.inputs + weights * self.weights + send * self.send
            found = np.maximum(found, seconds)
        return found


def closed_form(
    schedule: Ints,
    pp: Ints,
    stages: Ints,
    microbatches: Ints,
    sums: Sequence[Floats],
    most: Sequence[Floats],
    transfer: Floats | float = 0.0,
    *,
    blocking: bool = False,
) -> Floats:
    """Seconds from the first action to the last of `kumi.plan.timeline.simulate`, (rows,), in closed form.

    `schedule` holds indices into `kumi.spec.layout.SCHEDULES`. `sums` are the seconds of a microbatch's forward, input
    gradient and weight gradient over all ranks, `most` those of the busiest rank, over all its stages. `transfer` is
    from a stage to the next; `blocking` as in `simulate`.

    Exact for equal stages and transfers of at most a third of the shortest action, where zero-bubble schedules have 2
    pp microbatches or more. Otherwise near (tests/plan/test_closed.py says how near): unequal stages enter by their sum
    and the busiest alone, longer transfers by the round trip that they delay most.
    """
    sums, most, transfer = _with_sends(pp, stages, sums, most, transfer) if blocking else (sums, most, transfer)
    send = np.broadcast_to(np.where(pp > 1, transfer, 0.0), len(pp))
    chunks = np.maximum(1, (pp - 1) * stages)
    mean = [(total - own) / chunks for total, own in zip(sums, most, strict=True)]
    found = np.zeros(len(pp))
    for code in np.unique(schedule):
        rows = schedule == code
        given = (pp - 1, stages, microbatches - 1, most[0], sum(most), *mean, send)
        part = _Rows(*(np.asarray(column[rows], np.float64) for column in given))
        bubble = _BUBBLES[SCHEDULES[int(code)]](part)
        found[rows] = (part.after + 1) * part.work + np.where(part.others > 0, bubble, 0.0)
    return found


def _with_sends(
    pp: Ints, stages: Ints, sums: Sequence[Floats], most: Sequence[Floats], transfer: Floats | float
) -> tuple[Sequence[Floats], Sequence[Floats], float]:
    """`sums` and `most` with the transfers that ranks do nothing else during: each belongs to what it follows."""
    boundaries, apart = pp * stages - 1, pp > 1
    # With two ranks each sends one way only, and back where there are more stages.
    forward = np.where(apart, stages * transfer, 0.0)
    back = np.where(pp > 2, stages, stages - 1) * np.where(apart, transfer, 0.0)
    over = np.where(apart, boundaries * transfer, 0.0)
    return (sums[0] + over, sums[1] + over, sums[2]), (most[0] + forward, most[1] + back, most[2]), 0.0


def _gpipe(x: _Rows) -> Floats:
    """A link that takes longer than a stage delays every microbatch."""
    q, backward = x.others, x.work - x.ahead
    slow = np.maximum(0.0, x.send - x.ahead) + np.maximum(0.0, x.send - backward)
    found: Floats = x.longest([(q, q, q, 2 * q)]) + x.after * slow
    return found


def _one_forward_one_backward(x: _Rows) -> Floats:
    """A rank keeps no more microbatches than it takes to cover the others' work: transfers come on top of it, once for
    each microbatch but the first and one in every pp."""
    q = x.others
    late = np.maximum(0.0, x.total + 2 * x.send - x.work)
    found: Floats = x.longest([(q, q, q, 2 * q)]) + (x.after - np.ceil(x.after / (q + 1))) * late
    return found


def _interleaved(x: _Rows) -> Floats:
    q, v = x.others, x.stages
    own, other = x.work / v, x.total / v
    trip = (own + q * other + 2 * q * x.send) / (2 * q + 1)
    turn = np.maximum(x.forward, x.inputs + x.weights) + x.send
    link = x.send * np.where(q == 1, 2 - 1 / v, 1)
    slow = np.maximum(0.0, np.max([trip, turn, link], axis=0) - own)
    found: Floats = x.longest([(q, q, q, 2 * ((q + 1) * v - 1))]) + (x.after - q) * v * slow
    return found


def _zb_h1(x: _Rows) -> Floats:
    q, k = x.others, np.minimum(x.after, x.others)
    short = x.longest([(q, q - k, 0, 2 * q + k), (q - k, q, 0, 2 * q), (q, q, -k, 2 * q + 2 * k)])
    late = x.forward + x.inputs + 2 * x.send - x.work
    slow = x.longest([(q, q, 0, 2 * q)]) + (x.after - np.ceil(x.after / (q + 1))) * late
    found: Floats = np.where(late > 0, np.maximum(short, slow), short)
    return found


def _zb_h2(x: _Rows) -> Floats:
    q, k = x.others, np.minimum(x.after, 2 * x.others)
    up, down = q - np.ceil(k / 2), q - np.floor(k / 2)
    odd = k % 2
    ways = [
        (q, up, 0, q + up),
        (q - k, q, 0, 2 * q),
        (q, q, -k, 2 * q),
        (q - odd, down, 0, q + up),
        (q, down, -odd, q + up),
    ]
    trip = ((q + 1) * (x.forward + x.inputs) + x.weights + 2 * q * x.send) / (2 * q + 1)
    return x.longest(ways) + x.after * np.maximum(0.0, np.maximum(trip, x.send) - x.work)


def _zb_v(x: _Rows) -> Floats:
    q, k = x.others, np.minimum(x.after, 2 * x.others)
    less = 2 * q - k
    few = [
        (less, less, 0, 4 * q),
        (np.maximum(0, less - k), 2 * q, -2 * np.maximum(0, k - q), 4 * q + k),
        (2 * q, np.maximum(0, less - k), -2 * np.minimum(k, q), 4 * q),
    ]
    many = [
        (0, q, 0, 5 * q - 2),
        (1, 0, q - 1, 3 * q - 2),
        (0, 1, q - 1, 3 * q),
        (0, 2 * q, -2 * q, 6 * q - 2),
        (2 * q, -q, -1, 3 * q),
        (2 * q - 1, 1 - q, 0, 3 * q - 2),
        (q - 1, 1, 0, 5 * q - 2),
        (2 * q, 0, -2 * q - 1, 4 * q),
        (2 * q - 1, 1, -2 * q, 4 * q - 2),
        (q, 0, -1, 5 * q),
        (q - 1, q + 1, -2 * q, 6 * q - 2),
        (q, q, -2 * q - 1, 6 * q),
    ]
    found: Floats = np.where(less > 0, x.longest(few), x.longest(many)) + _slow_v(x)
    return found


def _dualpipe(x: _Rows) -> Floats:
    q = x.others
    ways = [
        (q, 0, 0, 3 * q),
        (q, q, -q, 4 * q),
        (-1, 2 * q, -q, 6 * q),
        (-1, q, 0, 5 * q),
        (2 * q, -q, -q, 3 * q),
        (2 * q, 0, -2 * q, 4 * q),
    ]
    return x.longest(ways) + _slow_v(x)


def _slow_v(x: _Rows) -> Floats:
    """What transfers delay every microbatch but the first by, where they are longer than the chunks that a rank keeps
    can cover, or than its work, as the chunks of both directions of the V share a link."""
    trip = x.forward + x.inputs + (x.forward + x.inputs + 2 * x.weights + 4 * x.others * x.send) / (2 * x.others + 1)
    return x.after * np.maximum(0.0, np.maximum(trip, 2 * x.send) - x.work)


_BUBBLES: dict[str, Callable[[_Rows], Floats]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-v": _zb_v,
    "dualpipe": _dualpipe,
}
