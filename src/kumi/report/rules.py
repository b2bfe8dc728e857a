"""The field's rules of thumb, worked out for a job and held against its estimates: where they mislead, and why.

Each rule is a function from a job and an estimate to a `Rule`, or to None where it has nothing to say of that layout.
The rules are those that sizing guides print; what each leaves out is in its `why`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kumi.plan.types import Estimate
from kumi.report import words
from kumi.report.figures import Traffic, fullest, spent, traffic
from kumi.report.report import Report
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params
from kumi.spec.schedules import SCHEDULES
from kumi.units import format_bytes

# A rule that is off by less than this is close enough for what rules are for.
CLOSE = 0.2
# Ranks whose work differs by less are called equal.
UNEVEN = 0.02


@dataclass(frozen=True)
class Rule:
    """What a rule of thumb says (`said`), what the estimate says (`found`), both also as text, and what it misses.

    `where` names the layout when it is not the chosen one.
    """

    name: str
    said: float
    found: float
    texts: tuple[str, str]
    why: str
    where: str = ""

    @property
    def misleads(self) -> bool:
        """Whether the rule is off by more than `CLOSE`, either way."""
        return abs(self.said - self.found) > CLOSE * min(abs(self.said), abs(self.found))


def misleading(report: Report) -> list[Rule]:
    """The rules that mislead, each on the first it speaks of: the chosen layout, else one that one might expect."""
    expected = [(item.title, item.estimate) for item in report.expected if item.estimate is not None]
    estimates, found = [("", report.best), *expected], []
    for rule in RULES:
        spoken = ((name, rule(report.job, estimate)) for name, estimate in estimates)
        first = next(((name, said) for name, said in spoken if said is not None), None)
        if first is not None and first[1].misleads:
            found.append(_named(first[1], first[0]))
    return found


def _named(rule: Rule, where: str) -> Rule:
    return Rule(rule.name, rule.said, rule.found, rule.texts, rule.why, where)


def _bytes(name: str, said: float, found: float, why: str) -> Rule:
    return Rule(name, said, found, (format_bytes(said), format_bytes(found)), why)


def _volumes(name: str, said: float, found: float, why: str) -> Rule:
    return Rule(name, said, found, (words.volume(said), words.volume(found)), why)


def _shares(name: str, said: float, found: float, why: str) -> Rule:
    return Rule(name, said, found, (words.percent(said), words.percent(found)), why)


def _local_params(job: Job, layout: Layout) -> float:
    """Parameters a rank would hold if the tp and pp ranks held equally many."""
    return num_params(job.model) / (layout.tp * layout.pp)


def _states(job: Job, estimate: Estimate, optimizer: int) -> float:
    """Bytes of 2 a parameter, 2 a gradient and `optimizer`, each divided where its ZeRO stage divides it."""
    layout = estimate.layout
    over = [layout.dp_shard if layout.zero >= stage else 1 for stage in (3, 2, 1)]
    return _local_params(job, layout) * (2 / over[0] + 2 / over[1] + optimizer / over[2])


def _states_rule(job: Job, estimate: Estimate, name: str, optimizer: int, why: str, passing: str) -> Rule | None:
    """A rule for states, which does not speak of experts and hosts, with `optimizer` bytes a parameter for Adam.

    `why` says what of it is kept otherwise, given those bytes as {kept}; `passing`, what besides is whole in passing,
    as {gathered}.
    """
    if estimate.layout.ep > 1 or estimate.layout.offload not in ("none", "activations"):
        return None
    memory = estimate.memory[fullest(estimate)]
    kept = memory.params + memory.grads + memory.optimizer + memory.weights
    sizes = {"kept": format_bytes(kept), "gathered": format_bytes(memory.gathered)}
    text = (why + passing if memory.gathered else why).format(**sizes)
    return _bytes(name, _states(job, estimate, optimizer), kept + memory.gathered, text)


def eight_bytes(job: Job, estimate: Estimate) -> Rule | None:
    """8 bytes a parameter: bf16 Adam that keeps no float32 masters."""
    return _states_rule(
        job,
        estimate,
        "model states take 8 bytes a parameter (2 + 2 + 4, Adam in bf16)",
        4,
        f"weights and moments are kept in {job.precision.param}",
        ", and {gathered} of weights and gradients are whole in passing",
    )


def sixteen_bytes(job: Job, estimate: Estimate) -> Rule | None:
    """16 bytes a parameter (Rajbhandari et al., 2020, arXiv:1910.02054)."""
    return _states_rule(
        job,
        estimate,
        "model states take 16 bytes a parameter (2 + 2 + 12, mixed precision)",
        12,
        f"{words.holder(estimate.layout)} keeps {{kept}}",
        ", and holds {gathered} more in passing, whole layers and gradients",
    )


def sixteen_activations(job: Job, estimate: Estimate) -> Rule:
    """Activations are batch x sequence x hidden x layers x 16 bytes."""
    layout, model = estimate.layout, job.model
    tokens = layout.microbatch * job.batch.seq_len / layout.cp
    found = max(memory.activations for memory in estimate.memory)
    each = tokens * model.hidden_size * model.num_hidden_layers / layout.pp
    full = layout.recompute == "full" and layout.recompute_layers is None
    flight = ", its microbatches in flight together" if layout.pp > 1 else ""
    how = "" if layout.recompute == "none" else f" under {layout.recompute} recompute"
    return _bytes(
        f"activations = 16 x batch x sequence x hidden x layers{' / sqrt(layers), checkpointed' if full else ''}",
        16 * each / (model.num_hidden_layers**0.5 if full else 1),
        found,
        f"{words.holder(layout)} holds {words.digits(found / each)} x batch x sequence x hidden x layers{how}{flight}",
    )


def no_logits(job: Job, estimate: Estimate) -> Rule:
    """Sizing formulas stop at the layers; logits and the loss come on top, on the last stage."""
    memory = estimate.memory[max(range(len(estimate.memory)), key=lambda rank: estimate.memory[rank].head)]
    tokens = estimate.layout.microbatch * job.batch.seq_len // estimate.layout.cp
    return _bytes(
        "activations are those of the layers",
        memory.activations,
        memory.activations + memory.head,
        f"logits and loss take {format_bytes(memory.head)}, for {tokens:,} tokens x {job.model.vocab_size:,} words",
    )


def recompute_third(job: Job, estimate: Estimate) -> Rule | None:
    """Activation checkpointing costs a third more compute."""
    if estimate.layout.recompute == "none":
        return None
    return _shares(
        "recomputation costs 33% more compute",
        1 / 3,
        spent(estimate, "recompute") / spent(estimate, *words.COMPUTE),
        f"{estimate.layout.recompute} recompute runs again only what it dropped",
    )


def gathered_once(job: Job, estimate: Estimate) -> Rule | None:
    """FSDP sends an all-gather and a reduce-scatter of the parameters a step."""
    layout = estimate.layout
    data = [item for item in traffic(job, estimate) if item.axis.startswith("dp_shard")]
    if layout.zero < 3 or layout.dp_shard == 1 or not data:
        return None
    said = 2 * 2 * _local_params(job, layout) * (layout.dp_shard - 1) / layout.dp_shard
    return _volumes(
        "FSDP sends one all-gather and one reduce-scatter of bf16 weights a step",
        said,
        sum(item.sent for item in data),
        f"parameters are gathered for the forward and again for the backward, gradients reduced in "
        f"{job.precision.reduce}, in each microbatch, of which a step has {job.batch.microbatches(layout)}",
    )


def reduced_once(job: Job, estimate: Estimate) -> Rule | None:
    """Tensor parallelism makes one all-reduce a layer."""
    layout = estimate.layout
    found = sum(item.sent for item in traffic(job, estimate) if item.axis == "tp")
    if layout.tp == 1 or not found:
        return None
    tokens = layout.microbatch * job.batch.seq_len * job.batch.microbatches(layout) / layout.cp
    layers = job.model.num_hidden_layers / layout.pp
    said = 2 * (layout.tp - 1) / layout.tp * 2 * tokens * job.model.hidden_size * layers
    return _volumes(
        "tensor parallelism makes one all-reduce a layer",
        said,
        found,
        f"a layer sums after attention and after its MLP, forward and backward; with what else tp sends it is worth "
        f"{found / said:.1f} all-reduces",
    )


def bubble(job: Job, estimate: Estimate) -> Rule | None:
    """The pipeline idles (p - 1) / (m + p - 1) of the time."""
    layout = estimate.layout
    if layout.pp == 1:
        return None
    count = job.batch.microbatches(layout)
    said = (layout.pp - 1) / (count + layout.pp - 1)
    return _shares(
        f"a pipeline idles (p-1)/(m+p-1) of a step, p = {layout.pp} and m = {count}",
        said,
        spent(estimate, "bubble") / estimate.step_seconds,
        _bubble_reason(estimate),
    )


def _textbook() -> list[str]:
    """Return the schedules that idle (p - 1) / (m + p - 1): a stage a rank, and full backwards."""
    return [name for name, one in SCHEDULES.items() if one.stages == 1 and not one.splits_backward]


def _bubble_reason(estimate: Estimate) -> str:
    ranks = [0.0] * estimate.layout.pp
    for stage in estimate.stages:
        ranks[stage.rank] += stage.forward + stage.backward_input + stage.backward_weight
    uneven = max(ranks) * len(ranks) / sum(ranks)
    layout = estimate.layout
    reasons = []
    if layout.schedule not in _textbook():
        reasons.append(f"the formula is for {' and '.join(_textbook())}, not for {layout.schedule}")
    if uneven > 1 + UNEVEN:
        reasons.append(f"the busiest rank has {words.times(uneven)} the work of the mean, and the others wait for it")
    return "; ".join(reasons) or "the formula's step has no transfers, no traffic and no update in it"


def equal_stages(job: Job, estimate: Estimate) -> Rule | None:
    """Every stage needs what the average stage needs."""
    if estimate.layout.pp == 1:
        return None
    rank = fullest(estimate)
    mean = sum(memory.total for memory in estimate.memory) / len(estimate.memory)
    memory = estimate.memory[rank]
    average = sum(item.activations for item in estimate.memory) / len(estimate.memory)
    return _bytes(
        "every stage holds its share of the layers and so of the memory",
        mean,
        memory.total,
        f"rank {rank} holds {format_bytes(memory.activations)} of activations against {format_bytes(average)} on "
        f"average: early stages keep more microbatches, the outer ones hold the embedding and the head",
    )


def no_latency(job: Job, estimate: Estimate) -> Rule | None:
    """Traffic takes its bytes over the bandwidth; shown for the axis that loses most by it."""
    known = [item for item in traffic(job, estimate) if item.bandwidth and item.busy]
    if not known:
        return None
    worst = max(known, key=_lost)
    said = worst.sent / (worst.bandwidth * worst.efficiency)
    return Rule(
        f"traffic along {worst.axis} takes its bytes over the bandwidth of {worst.link}",
        said,
        worst.busy,
        (words.seconds(said), words.seconds(worst.busy)),
        f"{words.plural(worst.count, 'message')} of {words.volume(worst.sent / worst.count)} on average: each waits "
        f"for its hops first, and small ones do not fill the link",
    )


def _lost(item: Traffic) -> float:
    return item.latency * item.busy


RULES: tuple[Callable[[Job, Estimate], Rule | None], ...] = (
    eight_bytes,
    sixteen_bytes,
    sixteen_activations,
    no_logits,
    recompute_third,
    gathered_once,
    reduced_once,
    bubble,
    equal_stages,
    no_latency,
)
