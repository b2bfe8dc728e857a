"""The figures that a report shows, drawn from its estimates: once, for the terminal, the page and the words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from kumi.plan.traffic import stride_of
from kumi.plan.types import Collective, Estimate, MemoryEstimate
from kumi.report import words
from kumi.spec.cluster import ClusterSpec, members_inside
from kumi.spec.job import Job
from kumi.spec.layout import Layout

# Traffic that takes a smaller part of a step is in the tables of the page only.
NOTICEABLE = 2e-4
# Of what one rank holds of the whole tensor, how often it sends (n - 1) / n of it.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


@dataclass(frozen=True)
class StageGroup:
    """Neighbouring pp ranks `first` to `last`, inclusive, that need the same memory."""

    first: int
    last: int
    memory: MemoryEstimate

    @property
    def name(self) -> str:
        return f"rank {self.first}" if self.first == self.last else f"ranks {self.first}-{self.last}"


def stage_groups(estimate: Estimate) -> tuple[StageGroup, ...]:
    """The memory of every pp rank, equal neighbours as one."""
    found = []
    for memory, group in groupby(enumerate(estimate.memory), key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in group]
        found.append(StageGroup(ranks[0], ranks[-1], memory))
    return tuple(found)


def pick(count: int, most: int, wanted: int) -> list[int]:
    """At most `most` >= 3 of `count` indices, ascending and evenly spread: the first, the last and `wanted` are in."""
    if count <= most:
        return list(range(count))
    spread = {round(index * (count - 1) / (most - 2)) for index in range(most - 1)}
    return sorted(spread | {wanted})


def fullest(estimate: Estimate) -> int:
    """The pp rank that needs most memory."""
    return max(range(len(estimate.memory)), key=lambda rank: estimate.memory[rank].total)


def memory_kinds(memory: MemoryEstimate) -> list[tuple[str, int]]:
    """The kinds that take any bytes, in the order they are drawn."""
    return [(kind, getattr(memory, kind)) for kind in words.MEMORY if getattr(memory, kind) > 0]


def time_kinds(estimate: Estimate) -> list[tuple[str, float]]:
    """The kinds that take any time, longest first."""
    return sorted(((kind, value) for kind, value in estimate.time if value > 0), key=lambda pair: -pair[1])


def spent(estimate: Estimate, *kinds: str) -> float:
    """Seconds of a step that go into `kinds`."""
    return sum(value for kind, value in estimate.time if kind in kinds)


def wire_bytes(collective: Collective) -> float:
    """Bytes that one rank sends for all messages of `collective` in a step, had it run as a ring."""
    if collective.kind == "send":
        return collective.bytes * collective.count
    degree = collective.degree
    return _PASSES[collective.kind] * (degree - 1) / degree * collective.bytes * collective.count


@dataclass(frozen=True)
class Traffic:
    """What the groups of `axis` send over `link` in a step, each rank.

    `sent` bytes in `count` messages of the `kinds`; `busy` seconds in all, `exposed` of them not hidden by compute.
    `bandwidth` is what a group has of the link: as many devices' shares as it has ranks in each node. `latency` is the
    share of `busy` that bytes at the link's reachable bandwidth do not explain.
    """

    link: str
    axis: str
    kinds: tuple[str, ...]
    count: int
    sent: float
    busy: float
    exposed: float
    bandwidth: float
    efficiency: float

    @property
    def name(self) -> str:
        return f"{self.axis} over {self.link}" if self.link else self.axis

    @property
    def latency(self) -> float:
        if not self.bandwidth or not self.busy:
            return 0.0
        return max(0.0, 1 - self.sent / (self.bandwidth * self.efficiency * self.busy))


def weighty(rows: tuple[Traffic, ...], step: float) -> list[Traffic]:
    """The traffic that takes any noticeable part of a `step` of so many seconds; all of it where none does."""
    return [row for row in rows if row.busy > NOTICEABLE * step] or list(rows)


def traffic(job: Job, estimate: Estimate) -> tuple[Traffic, ...]:
    """The traffic of `estimate` by link, inner links first, and axis."""
    order = {link.name: index for index, link in enumerate(job.cluster.links)}
    keyed = sorted(estimate.collectives, key=lambda item: (order.get(item.link, -1), item.link, item.axis))
    found = []
    for (link, axis), group in groupby(keyed, key=lambda item: (item.link, item.axis)):
        items = [item for item in group if item.count]
        if not items:
            continue
        degree = max(item.degree for item in items)
        bandwidth, efficiency = group_bandwidth(
            job.cluster, estimate.layout, axis, link, degree, {item.kind for item in items}
        )
        found.append(
            Traffic(
                link,
                axis,
                tuple(dict.fromkeys(item.kind for item in items)),
                sum(item.count for item in items),
                sum(map(wire_bytes, items)),
                sum(item.seconds for item in items),
                sum(item.exposed for item in items),
                bandwidth,
                efficiency,
            )
        )
    return tuple(found)


def group_bandwidth(
    cluster: ClusterSpec, layout: Layout, axis: str, link: str, degree: int, kinds: set[str]
) -> tuple[float, float]:
    """Bytes/s that one group along `axis` has of `link`, and the share of it that large messages reach; 0 if unknown.

    A ring leaves a node over the cards of all the group's devices there, so that their shares add up; to the next rank
    and from each to all others, every device sends over its own.
    """
    if link not in {item.name for item in cluster.links}:
        return 0.0, 1.0
    at = next(index for index, item in enumerate(cluster.links) if item.name == link)
    inside = 1
    if at > 0 and not kinds <= {"send", "all_to_all"}:
        inside = members_inside(stride_of(layout, axis), degree, cluster.links[at - 1].span)
    return cluster.links[at].bandwidth * inside, cluster.links[at].efficiency


@dataclass(frozen=True)
class Gap:
    """How far `other` is behind: `seconds` a step, and the kinds of time it loses them in, largest first.

    `noise` when the model's own error is larger than the gap.
    """

    other: Estimate
    seconds: float
    noise: bool
    losses: tuple[tuple[str, float], ...]


def gap(best: Estimate, other: Estimate) -> Gap:
    """`other` against `best`, for equal tokens: seconds are those of as many of its steps as have the tokens of one of
    `best`."""
    steps = best.tokens_per_step / other.tokens_per_step
    seconds, mine = other.step_seconds * steps - best.step_seconds, dict(best.time)
    lost = {kind: value * steps - mine.get(kind, 0.0) for kind, value in other.time}
    losses = sorted(((kind, value) for kind, value in lost.items() if value > 0), key=lambda pair: -pair[1])
    noise = abs(seconds) <= max(best.uncertainty, other.uncertainty) * best.step_seconds
    return Gap(other, seconds, noise, tuple(losses))


def needs(found: Gap) -> str:
    """What the layout would have to gain to draw level: "1.2 s less exposed tp traffic"."""
    return " and ".join(_needs(found)) or "nothing"


def _needs(found: Gap) -> Iterator[str]:
    """The largest losses, as far as they are needed to close the gap; after two, the rest as one."""
    left = found.seconds
    for index, (kind, value) in enumerate(found.losses):
        if left <= 0.02 * found.seconds:
            return
        if index == 2:
            yield f"{words.seconds(left)} elsewhere"
            return
        yield f"{words.seconds(min(left, value))} less {words.time_name(kind)}"
        left -= value
