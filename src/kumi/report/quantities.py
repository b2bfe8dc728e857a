"""The quantities that a report shows, computed from its estimates for the terminal, the page and the sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from kumi.plan.estimates import Collective, Estimate, MemoryEstimate
from kumi.plan.time.traffic import listed_stride
from kumi.report import phrases
from kumi.spec.cluster import ClusterSpec, ranks_within
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import MoE

# Only the page's tables list communication that takes a smaller share of a step.
NOTICEABLE = 2e-4
# Ring algorithms: a rank sends this many times (n - 1) / n of the tensor's bytes.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


@dataclass(frozen=True)
class StageGroup:
    """Consecutive pp ranks, `first` to `last` inclusive, that need the same memory."""

    first: int
    last: int
    memory: MemoryEstimate

    @property
    def name(self) -> str:
        return f"rank {self.first}" if self.first == self.last else f"ranks {self.first}-{self.last}"


def stage_groups(estimate: Estimate) -> tuple[StageGroup, ...]:
    """Return the memory of every pp rank; consecutive ranks with equal memory form one group."""
    groups = []
    for memory, group in groupby(enumerate(estimate.memory), key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in group]
        groups.append(StageGroup(ranks[0], ranks[-1], memory))
    return tuple(groups)


def pick(count: int, most: int, required: int) -> list[int]:
    """Return at most `most` >= 3 of `count` indices, evenly spread, with the first, the last and `required`."""
    if count <= most:
        return list(range(count))
    spread = {round(index * (count - 1) / (most - 2)) for index in range(most - 1)}
    return sorted(spread | {required})


def fullest(estimate: Estimate) -> int:
    """Return the pp rank that needs the most memory."""
    return max(range(len(estimate.memory)), key=lambda rank: estimate.memory[rank].total)


def memory_kinds(memory: MemoryEstimate) -> list[tuple[str, int]]:
    """Return (kind, bytes) of the kinds with any bytes, in drawing order."""
    return [(kind, getattr(memory, kind)) for kind in phrases.MEMORY if getattr(memory, kind) > 0]


def time_kinds(estimate: Estimate) -> list[tuple[str, float]]:
    """Return (kind, seconds) of the kinds that take any time, longest first."""
    return sorted(((kind, value) for kind, value in estimate.time if value > 0), key=lambda pair: -pair[1])


def seconds_spent(estimate: Estimate, *kinds: str) -> float:
    """Return the seconds that a step spends on `kinds`."""
    return sum(value for kind, value in estimate.time if kind in kinds)


def wire_bytes(collective: Collective) -> float:
    """Return the bytes that one rank sends for `collective` in a step, as ring algorithms send them."""
    if collective.kind == "send":
        return collective.bytes * collective.count
    degree = collective.degree
    return _PASSES[collective.kind] * (degree - 1) / degree * collective.bytes * collective.count


@dataclass(frozen=True)
class Traffic:
    """The communication of one rank along `axis` over `link` in a step.

    `kinds`, `count`: the kinds and the number of messages.
    `sent`: bytes over the link.
    `busy`: seconds of all messages; `exposed`: the seconds that compute does not hide.
    `bandwidth`: bytes/s of the groups on the link, 0 if unknown. A group has the bandwidth of all its ranks in a node.
    `efficiency`: the share of `bandwidth` that large messages reach.
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
        """The share of `busy` that exceeds `sent` / (`bandwidth` x `efficiency`)."""
        if not self.bandwidth or not self.busy:
            return 0.0
        return max(0.0, 1 - self.sent / (self.bandwidth * self.efficiency * self.busy))


def noticeable(rows: tuple[Traffic, ...], step: float) -> list[Traffic]:
    """Return the rows that take a noticeable share of `step` seconds, or all rows if none does."""
    return [row for row in rows if row.busy > NOTICEABLE * step] or list(rows)


def traffic(job: Job, estimate: Estimate) -> tuple[Traffic, ...]:
    """Return the communication of `estimate` per link, inner links first, and axis."""
    order = {link.name: index for index, link in enumerate(job.cluster.links)}
    keyed = sorted(estimate.collectives, key=lambda item: (order.get(item.link, -1), item.link, item.axis))
    rows = []
    for (link, axis), group in groupby(keyed, key=lambda item: (item.link, item.axis)):
        items = [item for item in group if item.count]
        if not items:
            continue
        sent = [_link_bytes(job, estimate.layout, item) for item in items]
        speeds = [group_bandwidth(job.cluster, estimate.layout, axis, link, item.degree, {item.kind}) for item in items]
        # Groups along one axis may differ: those of the experts have other strides, and a ring uses more network cards.
        at_peak = sum(size / bandwidth for size, (bandwidth, _) in zip(sent, speeds, strict=True) if bandwidth)
        rows.append(
            Traffic(
                link,
                axis,
                tuple(dict.fromkeys(item.kind for item in items)),
                sum(item.count for item in items),
                sum(sent),
                sum(item.seconds for item in items),
                sum(item.exposed for item in items),
                sum(sent) / at_peak if at_peak else speeds[0][0],
                speeds[0][1],
            )
        )
    return tuple(rows)


def _link_bytes(job: Job, layout: Layout, item: Collective) -> float:
    """Return the bytes that one rank sends over the slowest link of `item` in a step.

    A ring passes all of its bytes over every link. All-to-alls send only what goes to ranks behind the link, and with
    `Engine.tokens_once` a token once to each block of ranks there, as the planner counts them.
    """
    at = next((index for index, link in enumerate(job.cluster.links) if link.name == item.link), 0)
    if item.kind != "all_to_all" or at == 0:
        return wire_bytes(item)
    inside = ranks_within(listed_stride(layout, item.axis, item.degree), item.degree, job.cluster.links[at - 1].span)
    copies = max((layer.mlp.num_experts_per_tok for layer in job.model.layers if isinstance(layer.mlp, MoE)), default=1)
    copies, blocks = copies if job.engine.tokens_once else 1, item.degree / inside
    share = blocks * (1 - (1 - 1 / blocks) ** copies) / copies
    return share * item.bytes * item.count * (item.degree - inside) / item.degree


def group_bandwidth(
    cluster: ClusterSpec, layout: Layout, axis: str, link: str, degree: int, kinds: set[str]
) -> tuple[float, float]:
    """Return the bytes/s of one group along `axis` on `link` (0 if unknown), and the share that large messages reach.

    A ring leaves a node over the network cards of all its devices there, so their bandwidths add up. Sends and
    all-to-alls use one card per device.
    """
    if link not in {item.name for item in cluster.links}:
        return 0.0, 1.0
    at = next(index for index, item in enumerate(cluster.links) if item.name == link)
    inside = 1
    if at > 0 and not kinds <= {"send", "all_to_all"}:
        inside = ranks_within(listed_stride(layout, axis, degree), degree, cluster.links[at - 1].span)
    return cluster.links[at].bandwidth * inside, cluster.links[at].efficiency


@dataclass(frozen=True)
class Gap:
    """The difference in time between `other` and the chosen layout, for equal tokens.

    `seconds`: how much longer `other` takes for the tokens of one step; negative if it is faster.
    `noise`: True if the estimates' error is at least as large as the difference.
    `losses`: (kind, seconds) that `other` takes longer, largest first.
    """

    other: Estimate
    seconds: float
    noise: bool
    losses: tuple[tuple[str, float], ...]


def gap(best: Estimate, other: Estimate) -> Gap:
    """Compare `other` with `best` for the tokens of one step of `best`; the steps of `other` may be smaller."""
    steps = best.tokens_per_step / other.tokens_per_step
    seconds, mine = other.step_seconds * steps - best.step_seconds, dict(best.time)
    lost = {kind: value * steps - mine.get(kind, 0.0) for kind, value in other.time}
    losses = sorted(((kind, value) for kind, value in lost.items() if value > 0), key=lambda pair: -pair[1])
    noise = abs(seconds) <= max(best.uncertainty, other.uncertainty) * best.step_seconds
    return Gap(other, seconds, noise, tuple(losses))


def savings_needed(difference: Gap) -> str:
    """Return the savings that would close the gap: "1.2 s less exposed tp communication"."""
    return " and ".join(_needs(difference)) or "nothing"


def _needs(difference: Gap) -> Iterator[str]:
    """Yield the largest losses until they close the gap: at most two by name, then the remaining seconds."""
    left = difference.seconds
    for index, (kind, value) in enumerate(difference.losses):
        if left <= 0.02 * difference.seconds:
            return
        if index == 2:
            yield f"{phrases.seconds(left)} elsewhere"
            return
        yield f"{phrases.seconds(min(left, value))} less {phrases.time_name(kind)}"
        left -= value


def used_assumptions(cluster: ClusterSpec, estimate: Estimate) -> tuple[str, ...]:
    """Return the assumed figures of `cluster` that change `estimate`."""
    return tuple(name for name in cluster.assumed if _is_used(name, cluster, estimate))


def _is_used(name: str, cluster: ClusterSpec, estimate: Estimate) -> bool:
    """Return whether `estimate` depends on the figure `name`, such as "host.nvme" or "NVLink 3: latency"."""
    part, _, figure = name.partition(".")
    if part == "host":
        needed = "-nvme" if figure.startswith("nvme") else ""
        return estimate.layout.offload != "none" and estimate.layout.offload.endswith(needed)
    if name == "device.launch":
        return seconds_spent(estimate, "host") > 0
    if part == "device":
        return True
    link = name.rpartition(": ")[0]
    return any(item.link.startswith(link) for item in estimate.collectives)
