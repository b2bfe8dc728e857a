"""Seconds to answer many prompts: passes over the prompts, and decode steps of a replica with slots.

A replica generates as many replies at once as it has slots. A slot that is free takes the next prompt, so that replies
of different lengths do not wait for each other. Without refilling, replies begin in waves, with one reply for each
slot, and all replies of a wave wait for its longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

from kumi.plan.inference.decode_step import decode_step
from kumi.plan.inference.inference_job import PROMPT_TOKENS, InferenceJob
from kumi.plan.layout_batch import Floats, batch_layouts
from kumi.plan.time.layer_costs import cost_table
from kumi.plan.time.op_costs import MicrobatchCost
from kumi.spec.batch import BatchSpec
from kumi.spec.comm import DEFAULT_COMM, engine_for
from kumi.spec.engine import Engine
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.optim import Optim
from kumi.spec.precision import Precision

# The traits of serving engines in passes over prompts.
_FUSED = Engine(name="serving", kernels="fused", half_weights=True)


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of a replica that answers prompts.

    - `prefill`, `decode`: seconds of the passes over prompts, and of the decode steps.
    - `steps`: number of decode steps.
    - `tokens`: number of tokens of all replies.
    """

    prefill: float
    decode: float
    steps: int
    tokens: int

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def rollout_time(
    job: InferenceJob,
    layout: Layout,
    slots: int,
    prompts: Sequence[int],
    replies: Sequence[int],
    *,
    refill: bool = True,
) -> RolloutTime:
    """Return the time in which a replica with `slots` answers prompts of these lengths with replies of these lengths.

    `refill`: a free slot takes the next prompt at once; else the next `slots` prompts begin when all have ended.
    The first token of a reply comes from the pass over its prompt, so that a reply of n tokens takes n - 1 steps.
    kumi's own engine reads the cache of every slot up to the length of the longest sequence; serving engines read each
    cache only up to its own sequence's length.
    """
    spans = _refilled_spans(slots, prompts, replies) if refill else _wave_spans(slots, prompts, replies)
    active, mean, longest, steps = np.array(spans, np.float64).reshape(-1, 4).T
    seconds = decode_step(job, layout, np.maximum(active, 1), mean if job.graphs else longest).seconds
    prefill = sum(prefill_seconds(job, layout, length) for length in prompts)
    return RolloutTime(prefill, float((steps * seconds).sum()), int(steps.sum()), sum(replies))


# Consecutive steps with the same active sequences: (number of sequences, their mean and their largest length halfway
# through these steps, number of steps).
_Span = tuple[int, float, float, int]


def _refilled_spans(slots: int, prompts: Sequence[int], replies: Sequence[int]) -> list[_Span]:
    """Return the spans between the ends of replies, if a free slot is filled at once."""
    spans: list[_Span] = []
    active: list[tuple[int, int]] = []  # (step at which it has ended, length minus step)
    now, started, offsets = 0, 0, 0  # `offsets`: sum of the second entries
    while active or started < len(prompts):
        while len(active) < slots and started < len(prompts):
            offset = prompts[started] + 1 - now
            heappush(active, (now + replies[started] - 1, offset))
            offsets += offset
            started += 1
        end, count = active[0][0], len(active)
        if end > now:
            middle = (now + end - 1) / 2
            longest = max(offset for _, offset in active)
            spans.append((count, offsets / count + middle, longest + middle, end - now))
            now = end
        while active and active[0][0] <= now:
            offsets -= heappop(active)[1]
    return spans


def _wave_spans(slots: int, prompts: Sequence[int], replies: Sequence[int]) -> list[_Span]:
    """Return one span per wave: all its sequences stay until the longest reply has ended."""
    spans: list[_Span] = []
    for first in range(0, len(prompts), slots):
        begins, steps = prompts[first : first + slots], max(replies[first : first + slots]) - 1
        middle = 1 + (steps - 1) / 2
        spans.append((len(begins), sum(begins) / len(begins) + middle, max(begins) + middle, steps))
    return spans


@lru_cache(maxsize=4096)
def prefill_seconds(job: InferenceJob, layout: Layout, length: int) -> float:
    """Return the seconds of the forward pass over a prompt of `length` tokens.

    Short prompts share a pass, and each counts an equal part of it. The head is left out: it computes the logits of the
    last token only.
    """
    prompts_per_pass = max(1, PROMPT_TOKENS // length)
    precision = Precision(
        "inference", job.compute, job.compute, job.compute, job.weights if job.weights != job.compute else ""
    )
    engine = _FUSED if job.graphs else engine_for(DEFAULT_COMM, job.cluster.device)
    batch = BatchSpec(length, length * prompts_per_pass * layout.dp)
    training = Job(job.model, job.cluster, batch, precision, Optim(), engine)
    pass_layout = Layout(**{**vars(layout), "microbatch": prompts_per_pass})
    table, _ = cost_table(training, batch_layouts([pass_layout]))
    _, of_layer = job.model.unique_layers()
    launch = 0.0 if job.graphs else job.cluster.device.launch
    total = _pass_seconds(table.embedding, launch)
    for kind, cost in enumerate(table.layers):
        total = total + of_layer.count(kind) * _pass_seconds(cost, launch)
    return float(total[0]) / prompts_per_pass


def _pass_seconds(cost: MicrobatchCost, launch: float) -> Floats:
    """Return the seconds of a forward pass with its communication, or of launching its kernels if that takes longer."""
    busy = cost.forward + sum(cost.comm_forward.values(), np.zeros_like(cost.forward))
    return np.maximum(busy, launch * cost.kernels_forward)
