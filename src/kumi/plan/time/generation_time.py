"""Seconds in which the ranks of a training layout generate a rollout batch.

A slot is a place for one of the sequences that a data-parallel rank decodes at once; the replies to one prompt are a
group. One call of the engine `kumi.rollout.own_engine` generates at most `FILLS` replies per slot. For each call,
ZeRO's ranks gather all weights; a data-parallel rank computes the prompt of a group once, and decodes with slots that
are refilled; then all ranks wait for the longest reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kumi.plan.inference.inference_job import InferenceJob, inference_job
from kumi.plan.inference.reply_lengths import longest_p99, reply_lengths
from kumi.plan.inference.rollout_time import prefill_seconds, rollout_time
from kumi.plan.layout_batch import Floats, LayoutBatch
from kumi.plan.time.collective_times import collective_seconds
from kumi.plan.unique_rows import unique_rows
from kumi.spec.generation_layout import gathered_bytes
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.rollout import FILLS, RolloutSpec
from kumi.spec.sharding import zero_axis

# Fields of a layout that decide how fast it generates.
_FIELDS = ("dp_replicate", "dp_shard", "tp", "ep", "expert_tp")


# A reply: (index of its group, number of tokens of its prompt, number of its own tokens).
_Sequence = tuple[int, int, int]


@dataclass(frozen=True)
class BatchLengths:
    """Tokens of each prompt of a rollout batch, and of the replies to it, group by group."""

    prompts: tuple[int, ...]
    replies: tuple[tuple[int, ...], ...]

    @property
    def sequences(self) -> list[_Sequence]:
        """All replies, group by group."""
        groups = enumerate(zip(self.prompts, self.replies, strict=True))
        return [(group, prompt, reply) for group, (prompt, replies) in groups for reply in replies]


@dataclass(frozen=True)
class GenerationTime:
    """Seconds of a rollout batch: all-gathers of weights, passes over prompts, decode steps."""

    gather: float
    prefill: float
    decode: float

    @property
    def seconds(self) -> float:
        return self.gather + self.prefill + self.decode


@lru_cache(maxsize=64)
def expected_lengths(spec: RolloutSpec) -> BatchLengths:
    """Return lengths with the means of `spec`.

    Prompts are equally long. Replies shorter than `max_new_tokens` on average have a log-normal distribution whose 99th
    percentile is `max_new_tokens`, if there is one, and are cut there.
    """
    most = spec.max_new_tokens
    mean = min(spec.reply_tokens, most)
    lengths = reply_lengths(spec.replies, mean, min(most, longest_p99(mean)) if mean < most else None)
    cut, size = [min(length, most) for length in lengths], spec.group_size
    groups = tuple(tuple(cut[first : first + size]) for first in range(0, spec.replies, size))
    return BatchLengths((max(1, round(spec.prompt_tokens)),) * spec.prompts, groups)


def generates_at_known_speed(job: Job) -> bool:
    """Return True if the device's memory bandwidth is known, which bounds decode steps, and its peak FLOP/s."""
    device = job.cluster.device
    return bool(device.memory_bandwidth and device.peak_flops(job.precision.compute))


def generation_seconds(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the seconds of the expected rollout batch of `job`, (rows,); 0 if the device's speed is unknown."""
    assert job.rollout is not None, "only runs with rollouts generate in each step"
    if not generates_at_known_speed(job):
        return np.zeros(len(layouts))
    columns = [getattr(layouts, name) for name in _FIELDS]
    first, index = unique_rows(*columns, np.minimum(layouts.zero, 1))
    lengths = expected_lengths(job.rollout)
    seconds = [generation_time(job, layouts.row(row), lengths).seconds for row in first.tolist()]
    return np.array(seconds)[index]


def generation_time(job: Job, layout: Layout, lengths: BatchLengths) -> GenerationTime:
    """Return the seconds in which the ranks of `layout` generate a batch of these `lengths`.

    Raise ConfigError if the device's speed is unknown.
    """
    assert job.rollout is not None, "only runs with rollouts generate in each step"
    plain = Layout(**{name: getattr(layout, name) for name in _FIELDS}, zero=min(1, layout.zero))
    return _generation_time(inference_job(job), plain, job.rollout.slots, _gather_seconds(job, plain), lengths)


@lru_cache(maxsize=1024)
def _generation_time(
    job: InferenceJob, layout: Layout, slots: int, gather: float, lengths: BatchLengths
) -> GenerationTime:
    """Return the seconds of all calls of the engine for a batch of these `lengths`; each call takes `gather` seconds
    to gather the weights, and as long as its slowest rank to generate."""
    sequences = lengths.sequences
    prefill, decode, calls = 0.0, 0.0, 0
    call_size = FILLS * slots * layout.dp
    for start in range(0, len(sequences), call_size):
        in_call = sequences[start : start + call_size]
        bounds = [len(in_call) * rank // layout.dp for rank in range(layout.dp + 1)]
        # Ranks with equal shares take equally long.
        shares = {_renumber_groups(in_call[begin:end]) for begin, end in pairwise(bounds) if end > begin}
        times = [_share_seconds(job, layout, slots, share) for share in shares]
        slowest = max(times, key=sum)
        prefill, decode, calls = prefill + slowest[0], decode + slowest[1], calls + 1
    return GenerationTime(calls * gather, prefill, decode)


def _renumber_groups(share: Sequence[_Sequence]) -> tuple[_Sequence, ...]:
    """Return `share` with its groups numbered from 0."""
    return tuple((group - share[0][0], prompt, reply) for group, prompt, reply in share)


def _share_seconds(job: InferenceJob, layout: Layout, slots: int, share: Sequence[_Sequence]) -> tuple[float, float]:
    """Return the seconds of a rank's share of a call: passes over prompts, one for each group, and decode steps."""
    prompts = dict.fromkeys((group, prompt) for group, prompt, _ in share)
    prefill = sum(prefill_seconds(job, layout, prompt) for _, prompt in prompts)
    prompt_of_reply, replies = [prompt for _, prompt, _ in share], [reply for *_, reply in share]
    return prefill, rollout_time(job, layout, slots, prompt_of_reply, replies).decode


def _gather_seconds(job: Job, layout: Layout) -> float:
    """Return the seconds in which ZeRO's ranks gather all weights."""
    if not layout.zero:
        return 0.0
    axis = zero_axis(layout, routed=False)
    size = np.asarray(gathered_bytes(job.model, layout, job.precision))
    degree, stride = np.asarray(axis.degree), np.asarray(axis.stride)
    return float(collective_seconds(job.cluster, "all_gather", size, degree, stride))
