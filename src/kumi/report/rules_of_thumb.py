"""Rules of thumb from sizing guides, evaluated for a job and compared with its estimates.

Each rule is a function of a job and an estimate, whose docstring states what the rule claims. It returns a `Rule`, or
None if it does not apply to the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kumi.plan.estimates import Estimate
from kumi.plan.report import Report
from kumi.report import phrases
from kumi.report.quantities import Traffic, fullest, seconds_spent, traffic
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params
from kumi.spec.schedules import SCHEDULES
from kumi.units import format_bytes

# A rule misleads if it is off by more than this share.
CLOSE = 0.2
# Ranks count as balanced if the busiest has less than this share more work than the mean.
_BALANCED = 0.02


@dataclass(frozen=True)
class Rule:
    """A rule of thumb beside the estimate.

    `claimed`: the value by the rule.
    `estimated`: the value of the estimate, in the same unit.
    `texts`: both values formatted.
    `why`: the reason for the difference.
    `where`: the title of the standard layout that was evaluated; empty for the chosen layout.
    """

    name: str
    claimed: float
    estimated: float
    texts: tuple[str, str]
    why: str
    where: str = ""

    @property
    def misleads(self) -> bool:
        """True if the rule is off by more than `CLOSE`, either way."""
        return abs(self.claimed - self.estimated) > CLOSE * min(abs(self.claimed), abs(self.estimated))


def misleading(report: Report) -> list[Rule]:
    """Return the rules that mislead, each for the chosen layout or else the first standard one that it applies to."""
    expected = [(item.title, item.estimate) for item in report.expected if item.estimate is not None]
    estimates, rules = [("", report.best), *expected], []
    for rule in RULES:
        evaluated = ((title, rule(report.job, estimate)) for title, estimate in estimates)
        first = next(((title, value) for title, value in evaluated if value is not None), None)
        if first is not None and first[1].misleads:
            rules.append(_named(first[1], first[0]))
    return rules


def _named(rule: Rule, where: str) -> Rule:
    return Rule(rule.name, rule.claimed, rule.estimated, rule.texts, rule.why, where)


def _bytes(name: str, claimed: float, estimated: float, why: str) -> Rule:
    return Rule(name, claimed, estimated, (format_bytes(claimed), format_bytes(estimated)), why)


def _volumes(name: str, claimed: float, estimated: float, why: str) -> Rule:
    return Rule(name, claimed, estimated, (phrases.volume(claimed), phrases.volume(estimated)), why)


def _shares(name: str, claimed: float, estimated: float, why: str) -> Rule:
    return Rule(name, claimed, estimated, (phrases.percent(claimed), phrases.percent(estimated)), why)


def _local_params(job: Job, layout: Layout) -> float:
    """Return the parameters of a rank if all tp and pp ranks held equally many."""
    return num_params(job.model) / (layout.tp * layout.pp)


def _states(job: Job, estimate: Estimate, optimizer: int) -> float:
    """Return the bytes of weights (2 per parameter), gradients (2) and `optimizer`, each sharded by the ZeRO stage."""
    layout = estimate.layout
    shards = [layout.dp_shard if layout.zero >= stage else 1 for stage in (3, 2, 1)]
    return _local_params(job, layout) * (2 / shards[0] + 2 / shards[1] + optimizer / shards[2])


def _states_rule(job: Job, estimate: Estimate, name: str, optimizer: int, why: str, unsharded: str) -> Rule | None:
    """Return a rule on the bytes of model states, with `optimizer` bytes per parameter for Adam.

    None for expert parallelism and offloaded states, which such rules do not cover. `why` may contain {states}, the
    estimated bytes. `unsharded` follows it if there are temporarily unsharded tensors, of {gathered} bytes.
    """
    if estimate.layout.ep > 1 or estimate.layout.offload not in ("none", "activations"):
        return None
    memory = estimate.memory[fullest(estimate)]
    states = memory.params + memory.grads + memory.optimizer + memory.weights
    sizes = {"states": format_bytes(states), "gathered": format_bytes(memory.gathered)}
    text = (why + unsharded if memory.gathered else why).format(**sizes)
    return _bytes(name, _states(job, estimate, optimizer), states + memory.gathered, text)


def eight_bytes(job: Job, estimate: Estimate) -> Rule | None:
    """Model states take 8 bytes per parameter: Adam in bf16 without float32 master weights."""
    return _states_rule(
        job,
        estimate,
        "model states take 8 bytes per parameter (2 + 2 + 4, Adam in bf16)",
        4,
        f"weights and moments are stored in {job.precision.param}",
        "; unsharded weights and gradients take {gathered} more",
    )


def sixteen_bytes(job: Job, estimate: Estimate) -> Rule | None:
    """Model states take 16 bytes per parameter (Rajbhandari et al., 2020, arXiv:1910.02054)."""
    return _states_rule(
        job,
        estimate,
        "model states take 16 bytes per parameter (2 + 2 + 12, mixed precision)",
        12,
        f"{phrases.holder(estimate.layout)} stores {{states}}",
        "; unsharded weights and gradients take {gathered} more",
    )


def sixteen_activations(job: Job, estimate: Estimate) -> Rule:
    """Activations are batch x sequence x hidden x layers x 16 bytes."""
    layout, model = estimate.layout, job.model
    tokens = layout.microbatch * job.batch.seq_len / layout.cp
    activations = max(memory.activations for memory in estimate.memory)
    elements = tokens * model.hidden_size * model.num_hidden_layers / layout.pp
    full = layout.recompute == "full" and layout.recompute_layers is None
    in_flight = ", summed over its microbatches in flight" if layout.pp > 1 else ""
    how = "" if layout.recompute == "none" else f" with {layout.recompute} recompute"
    factor = phrases.digits(activations / elements)
    return _bytes(
        f"activations = 16 x batch x sequence x hidden x layers{' / sqrt(layers), checkpointed' if full else ''}",
        16 * elements / (model.num_hidden_layers**0.5 if full else 1),
        activations,
        f"{phrases.holder(layout)} stores {factor} x batch x sequence x hidden x layers{how}{in_flight}",
    )


def no_logits(job: Job, estimate: Estimate) -> Rule | None:
    """All activations are in the layers. In fact the last stage also has logits and loss."""
    if job.model.head == "score":
        return None
    memory = estimate.memory[max(range(len(estimate.memory)), key=lambda rank: estimate.memory[rank].head)]
    tokens = estimate.layout.microbatch * job.batch.seq_len // estimate.layout.cp
    return _bytes(
        "all activations are in the layers",
        memory.activations,
        memory.activations + memory.head,
        f"logits and loss take {format_bytes(memory.head)}: {tokens:,} tokens x vocabulary of {job.model.vocab_size:,}",
    )


def recompute_third(job: Job, estimate: Estimate) -> Rule | None:
    """Recomputation costs a third more compute."""
    if estimate.layout.recompute == "none":
        return None
    return _shares(
        "recomputation costs 33% more compute",
        1 / 3,
        seconds_spent(estimate, "recompute") / seconds_spent(estimate, *phrases.COMPUTE),
        f"{estimate.layout.recompute} recompute repeats only the operations whose outputs were dropped",
    )


def gathered_once(job: Job, estimate: Estimate) -> Rule | None:
    """FSDP sends one all-gather and one reduce-scatter of the parameters per step."""
    layout = estimate.layout
    data = [item for item in traffic(job, estimate) if item.axis.startswith("dp_shard")]
    if layout.zero < 3 or layout.dp_shard == 1 or not data:
        return None
    claimed = 2 * 2 * _local_params(job, layout) * (layout.dp_shard - 1) / layout.dp_shard
    return _volumes(
        "FSDP sends one all-gather and one reduce-scatter of bf16 weights per step",
        claimed,
        sum(item.sent for item in data),
        f"each of the {phrases.plural(job.batch.microbatches(layout), 'microbatch')} gathers the parameters for the "
        f"forward and again for the backward pass, and reduces gradients in {job.precision.reduce}",
    )


def reduced_once(job: Job, estimate: Estimate) -> Rule | None:
    """Tensor parallelism sends one all-reduce per layer."""
    layout = estimate.layout
    sent = sum(item.sent for item in traffic(job, estimate) if item.axis == "tp")
    if layout.tp == 1 or not sent:
        return None
    tokens = layout.microbatch * job.batch.seq_len * job.batch.microbatches(layout) / layout.cp
    layers = job.model.num_hidden_layers / layout.pp
    claimed = 2 * (layout.tp - 1) / layout.tp * 2 * tokens * job.model.hidden_size * layers
    return _volumes(
        "tensor parallelism sends one all-reduce per layer",
        claimed,
        sent,
        f"a layer all-reduces after attention and after its MLP, in forward and backward; all tp communication is "
        f"worth {sent / claimed:.1f} all-reduces per layer",
    )


def bubble(job: Job, estimate: Estimate) -> Rule | None:
    """The pipeline is idle for (p - 1) / (m + p - 1) of the step."""
    layout = estimate.layout
    if layout.pp == 1:
        return None
    count = job.batch.microbatches(layout)
    claimed = (layout.pp - 1) / (count + layout.pp - 1)
    return _shares(
        f"a pipeline is idle for (p-1)/(m+p-1) of the step, p = {layout.pp} and m = {count}",
        claimed,
        seconds_spent(estimate, "bubble") / estimate.step_seconds,
        _bubble_reason(estimate),
    )


def _textbook() -> list[str]:
    """Return the schedules that idle (p - 1) / (m + p - 1) of the step: one stage per rank, and unsplit backward
    passes."""
    return [name for name, schedule in SCHEDULES.items() if schedule.stages == 1 and not schedule.splits_backward]


def _bubble_reason(estimate: Estimate) -> str:
    """Return why the formula does not match: another schedule, unbalanced ranks, or costs that it leaves out."""
    seconds = [0.0] * estimate.layout.pp
    for stage in estimate.stages:
        seconds[stage.rank] += stage.forward + stage.backward_input + stage.backward_weight
    imbalance = max(seconds) * len(seconds) / sum(seconds)
    layout = estimate.layout
    reasons = []
    if layout.schedule not in _textbook():
        reasons.append(f"the formula is for {' and '.join(_textbook())}, not for {layout.schedule}")
    if imbalance > 1 + _BALANCED:
        reasons.append(f"the busiest rank has {phrases.times(imbalance)} the mean work, and the others wait for it")
    return "; ".join(reasons) or "the formula leaves out transfers, communication and the optimizer update"


def equal_stages(job: Job, estimate: Estimate) -> Rule | None:
    """Every stage needs the same memory."""
    if estimate.layout.pp == 1:
        return None
    rank = fullest(estimate)
    mean = sum(memory.total for memory in estimate.memory) / len(estimate.memory)
    memory = estimate.memory[rank]
    average = sum(item.activations for item in estimate.memory) / len(estimate.memory)
    return _bytes(
        "every stage needs the same memory",
        mean,
        memory.total,
        f"rank {rank} holds {format_bytes(memory.activations)} of activations, the average rank "
        f"{format_bytes(average)}: early stages keep more microbatches, the first and last hold embedding and head",
    )


def no_latency(job: Job, estimate: Estimate) -> Rule | None:
    """Communication takes bytes / bandwidth; evaluated for the axis that loses most to latency."""
    rows = [item for item in traffic(job, estimate) if item.bandwidth and item.busy]
    if not rows:
        return None
    worst = max(rows, key=_latency_seconds)
    claimed = worst.sent / (worst.bandwidth * worst.efficiency)
    return Rule(
        f"communication along {worst.axis} takes bytes / bandwidth ({worst.link})",
        claimed,
        worst.busy,
        (phrases.seconds(claimed), phrases.seconds(worst.busy)),
        f"{phrases.plural(worst.count, 'message')} of {phrases.volume(worst.sent / worst.count)} on average: each one "
        f"pays the latency of its hops, and small ones do not saturate the link",
    )


def _latency_seconds(item: Traffic) -> float:
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
