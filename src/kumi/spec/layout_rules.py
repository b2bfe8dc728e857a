"""The rules that a layout must keep to be legal for a model, a cluster and a batch, whatever trains it.

`layout_rules` returns all of them. The search applies the rules to arrays of layouts, `kumi.spec.checks` applies them
to one layout: `x` in a condition is a `Layout` or a `kumi.plan.layout_batch.LayoutBatch` (see `LayoutRule`). The limits
of this version's trainer are in `kumi.spec.trainable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from math import gcd
from operator import and_, or_
from typing import Any

from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Host
from kumi.spec.divisibility import divisibility, divisors
from kumi.spec.layout import CONTEXT, OFFLOAD, RECOMPUTE, Layout
from kumi.spec.ledger import unique_layer_ops
from kumi.spec.legality import LayoutRule, all_but, joined_by_or
from kumi.spec.lora import NF4_BLOCK
from kumi.spec.model import ModelSpec
from kumi.spec.op import Dim, Op
from kumi.spec.schedule import illegal_schedule
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import Schedule
from kumi.spec.sharding import DIM_TO_AXIS, max_rank_layers, rank_layers, shard_size

# Fields whose value must be 1 or more.
_POSITIVE = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp", "stages", "microbatch", "tiles")


def layout_rules(model: ModelSpec, cluster: ClusterSpec, batch: BatchSpec) -> tuple[LayoutRule, ...]:
    """Return every rule for training `model` on `cluster` with `batch`."""
    return (
        *shape_rules(),
        *_cluster_rules(cluster),
        *_offload_rules(cluster.host),
        *tp_rules(model),
        *_sequence_rules(batch),
        *_context_rules(model),
        *expert_rules(model),
        *_quantized_rules(model),
        *_length_rules(model, batch),
        *_batch_rules(batch),
        *_stage_rules(model),
        *_schedule_rules(batch),
        *_recompute_rules(model),
    )


def shape_rules() -> Iterator[LayoutRule]:
    """Yield the rules that a layout must keep for any model: valid values of its fields, and degrees that fit
    `zero`."""
    yield from _field_rules()
    yield from _zero_rules()


def tensor_rules(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules for sharding the tensors of `model`: dims over tp, ep and expert_tp, layers over stages."""
    yield from tp_rules(model)
    yield from expert_rules(model)
    yield from _stage_rules(model)


def _field_rules() -> Iterator[LayoutRule]:
    """Yield the rules for the value of each field. All other rules require these, because they divide by degrees."""
    yield from map(_positive_rule, _POSITIVE)
    for name, words in (("recompute", RECOMPUTE), ("offload", OFFLOAD), ("context", CONTEXT)):
        yield _word_rule(name, words)
    yield LayoutRule(
        "degrees",
        lambda x: (x.zero >= 0) & (x.zero <= 3),
        lambda layout: f"zero={layout.zero} is not a ZeRO stage; set zero = 0, 1, 2 or 3",
        (),
    )


def _positive_rule(name: str) -> LayoutRule:
    return LayoutRule(
        "degrees",
        lambda x: getattr(x, name) >= 1,
        lambda layout: f"{name}={getattr(layout, name)} must be 1 or more; set {name} = 1",
        (),
    )


def _word_rule(name: str, words: tuple[str, ...]) -> LayoutRule:
    return LayoutRule(
        "degrees",
        lambda x: x.one_of(name, words),
        lambda layout: f"{name}='{getattr(layout, name)}' is unknown; use one of {', '.join(words)}",
        (),
    )


def _zero_rules() -> Iterator[LayoutRule]:
    """Yield the rules that zero > 0 has ranks to shard over, dp_shard > 1 has states to shard, and zero=2 has pp=1."""
    yield LayoutRule(
        "zero",
        lambda x: (x.zero == 0) | (x.dp_shard * x.cp > 1) | (x.dp_replicate == 1),
        lambda layout: (
            f"zero={layout.zero} shards states over the dp_shard ranks, but dp_shard=1; "
            f"set dp_shard = {layout.dp_replicate} and dp_replicate = 1"
        ),
    )
    yield LayoutRule(
        "zero",
        lambda x: (x.zero > 0) | (x.dp_shard == 1),
        lambda layout: (
            f"zero=0 shards no states, but dp_shard={layout.dp_shard}; "
            f"set zero = 1, 2 or 3, or dp_replicate = {layout.dp} and dp_shard = 1"
        ),
    )
    yield LayoutRule(
        "zero",
        lambda x: (x.zero != 2) | (x.pp == 1),
        lambda layout: (
            f"zero=2 with pp={layout.pp} would save no memory, because a pipeline keeps unsharded gradients until its "
            f"last microbatch; set zero = 1 or 3, or pp = 1"
        ),
    )


def _cluster_rules(cluster: ClusterSpec) -> Iterator[LayoutRule]:
    """Yield the rule that the layout uses all devices of `cluster`."""
    yield LayoutRule(
        "cluster",
        lambda x: x.world_size == cluster.devices,
        lambda layout: (
            f"the layout needs {layout.world_size} devices (pp {layout.pp} x dp_replicate {layout.dp_replicate} x "
            f"dp_shard {layout.dp_shard} x cp {layout.cp} x tp {layout.tp}), but the cluster has {cluster.devices}; "
            f"choose degrees with a product of {cluster.devices}"
        ),
    )


def _offload_rules(host: Host) -> Iterator[LayoutRule]:
    for place, missing in missing_host_facts(host).items():
        if missing:
            yield _host_rule(missing, [name for name in OFFLOAD if not _uses(place, name)])


def _uses(place: str, offload: str) -> bool:
    """True if `offload` moves tensors to `place`, "host" or "nvme"."""
    return offload.endswith("-nvme") if place == "nvme" else offload != "none"


def _host_rule(missing: str, possible: list[str]) -> LayoutRule:
    """Return the rule that `offload` is one of `possible`, because the fields `missing` of the host are unknown."""
    return LayoutRule(
        "offload",
        lambda x: x.one_of("offload", possible),
        lambda layout: (
            f"offload='{layout.offload}' needs {missing}, which the description of the cluster does not give; add it "
            "to a cluster file, or set offload = 'none'"
        ),
    )


def missing_host_facts(host: Host) -> dict[str, str]:
    """Return, for each of the places "host" and "nvme", the unknown fields of `host` that offloading to it needs.

    The names are joined by "and"; the text is empty if all fields are known.
    """
    facts = {
        "host": {"host.memory": host.memory, "host.device_bandwidth": host.device_bandwidth},
        "nvme": {"host.nvme": host.nvme, "host.nvme_bandwidth": host.nvme_bandwidth},
    }
    return {place: " and ".join(name for name, value in values.items() if not value) for place, values in facts.items()}


def tp_rules(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules of `tp` for the dims of `model`."""
    need = divisibility(model)

    def remedy() -> str:
        # Every divisor of all counts that also fits the key-value heads is a legal tp.
        common = gcd(*(count for _, count in need.tensor))
        return f"set tp = {joined_by_or([degree for degree in divisors(common) if need.tp_divides_kv_heads(degree)])}"

    def divides(name: str, count: int) -> LayoutRule:
        return LayoutRule(
            "tensor",
            lambda x: count % x.tp == 0,
            lambda layout: f"tp={layout.tp} does not divide {name}={count}; {remedy()}",
        )

    def divides_or_repeats(count: int) -> LayoutRule:
        return LayoutRule(
            "tensor",
            lambda x: (count % x.tp == 0) | (x.tp % count == 0),
            lambda layout: (
                f"tp={layout.tp} neither divides num_key_value_heads={count} nor is a multiple of it; {remedy()}"
            ),
        )

    yield from (divides(name, count) for name, count in need.tensor)
    yield from map(divides_or_repeats, need.kv_heads)


def _sequence_rules(batch: BatchSpec) -> Iterator[LayoutRule]:
    """Yield the rules that cp, and tp with sequence parallelism, split a sequence into equal chunks."""
    yield LayoutRule(
        "sequence",
        lambda x: (x.cp == 1) | (batch.seq_len % (2 * x.cp) == 0),
        lambda layout: (
            f"cp={layout.cp} splits sequences into 2 x {layout.cp} chunks, which do not divide "
            f"seq_len={batch.seq_len}; set seq_len = {_multiple(batch.seq_len, 2 * layout.cp)}, or change cp"
        ),
    )
    yield LayoutRule(
        "sequence",
        lambda x: (x.tp == 1) | (x.sequence_parallel == 0) | (batch.seq_len % (x.tp * x.cp) == 0),
        lambda layout: (
            f"sequence_parallel=true splits sequences into tp x cp = {layout.tp * layout.cp} chunks, which do not "
            f"divide seq_len={batch.seq_len}; set seq_len = {_multiple(batch.seq_len, layout.tp * layout.cp)}, or "
            f"sequence_parallel = false"
        ),
    )


def _context_rules(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules of context parallelism.

    Ulysses distributes the heads of a tp rank over the cp ranks, and copies key-value heads if they are fewer than the
    cp ranks.
    """
    need = divisibility(model)
    if need.needs_full_sequence:
        yield LayoutRule(
            "context",
            lambda x: x.cp == 1,
            lambda layout: (
                f"cp={layout.cp} splits sequences, but the state of the model's Mamba layers runs through the complete "
                f"sequence; set cp = 1"
            ),
        )
        return
    without_ulysses = all_but(CONTEXT, "ulysses")

    def holds(x: Any) -> Any:
        # If tp does not divide the heads, a rule of `tp_rules` reports it instead.
        undivided = reduce(or_, (count % x.tp != 0 for count in need.heads), False)
        return (x.cp == 1) | x.one_of("context", without_ulysses) | undivided | need.divides_heads(x.cp, x.tp)

    def message(layout: Layout) -> str:
        heads = gcd(*(count // layout.tp for count in need.heads))
        use = joined_by_or([degree for degree in divisors(heads) if need.divides_heads(degree, layout.tp)])
        return (
            f"context='ulysses' cannot distribute the {heads} heads of a tp rank, and their keys and values, evenly "
            f"over cp={layout.cp} ranks; set cp = {use}, or context = 'ring'"
        )

    yield LayoutRule("context", holds, message)


def _multiple(number: int, of: int) -> int:
    """Return the positive multiple of `of` that is nearest to `number`."""
    return max(1, round(number / of)) * of


def _divides_all(name: str, counts: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return the condition that the degree `name` divides all `counts`."""
    return lambda x: reduce(and_, (count % getattr(x, name) == 0 for count in counts), True)


def expert_rules(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules of `ep` and `expert_tp`."""
    need = divisibility(model)
    if not need.experts:
        yield from map(_no_experts_rule, ("ep", "expert_tp"))
        return
    yield LayoutRule(
        "experts",
        _divides_all("ep", need.experts),
        lambda layout: (
            f"ep={layout.ep} does not divide num_experts={joined_by_or(list(need.experts))}; "
            f"set ep = {joined_by_or(divisors(gcd(*need.experts)))}"
        ),
    )
    yield LayoutRule(
        "experts",
        _divides_all("expert_tp", need.width),
        lambda layout: (
            f"expert_tp={layout.expert_tp} does not divide the experts' width of {joined_by_or(list(need.width))}; "
            f"set expert_tp = {joined_by_or(divisors(gcd(*need.width)))}"
        ),
    )
    yield LayoutRule("experts", lambda x: x.dp_shard * x.cp * x.tp % (x.ep * x.expert_tp) == 0, _expert_ranks_message)


def _no_experts_rule(name: str) -> LayoutRule:
    return LayoutRule(
        "experts",
        lambda x: getattr(x, name) == 1,
        lambda layout: f"{name}={getattr(layout, name)} shards routed experts, but the model has none; set {name} = 1",
    )


def _expert_ranks_message(layout: Layout) -> str:
    ranks = layout.dp_shard * layout.cp * layout.tp
    return (
        f"ep x expert_tp = {layout.ep * layout.expert_tp} does not divide the dp_shard x cp x tp = {ranks} ranks that "
        f"share the experts; choose a product of {joined_by_or(divisors(ranks))}"
    )


def _quantized_rules(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rule that tp shards 4-bit matrices between their blocks of consecutive elements, which share a scale.

    Then every rank has complete blocks, with the values that they have without tp.
    """
    if model.lora is None or not model.lora.quantize:
        return
    matrices = {op.params[0].dims[-1]: op.params[0] for ops in unique_layer_ops(model) for op in ops if _packed(op)}

    def size(dim: Dim, tp: Any) -> Any:
        return shard_size(dim, tp if DIM_TO_AXIS.get(dim.name) == "tp" else 1)

    def message(layout: Layout) -> str:
        dim = next(dim for dim in matrices if size(dim, layout.tp) % NF4_BLOCK)
        return (
            f"tp={layout.tp} with lora.quantize='nf4' leaves a rank {size(dim, layout.tp)} columns of "
            f"{matrices[dim].name}, which is no multiple of the {NF4_BLOCK} elements that share a scale; use a smaller "
            f"tp, or shard by zero = 3, pp or cp instead"
        )

    yield LayoutRule(
        "quantized",
        lambda x: (x.tp == 1) | reduce(and_, (size(dim, x.tp) % NF4_BLOCK == 0 for dim in matrices)),
        message,
        ("degrees", "tensor"),
    )


def _packed(op: Op) -> bool:
    return bool(op.params) and bool(op.params[0].quantized)


def _length_rules(model: ModelSpec, batch: BatchSpec) -> Iterator[LayoutRule]:
    """Yield the rule that the positions of `model` suffice for a sequence."""
    yield LayoutRule(
        "length",
        lambda x: batch.seq_len <= model.max_position_embeddings,
        lambda layout: (
            f"seq_len={batch.seq_len} is longer than max_position_embeddings={model.max_position_embeddings}; "
            f"shorten seq_len, or extend the model's RoPE scaling"
        ),
    )


def _batch_rules(batch: BatchSpec) -> Iterator[LayoutRule]:
    """Yield the rules of the batch. Each requires the rules before it, so only the first violation is reported."""
    after = ("degrees", "batch")
    yield LayoutRule(
        "batch",
        lambda x: batch.tokens_per_step % batch.seq_len == 0,
        lambda layout: (
            f"seq_len={batch.seq_len} does not divide tokens_per_step={batch.tokens_per_step}; "
            f"set tokens_per_step = {_multiple(batch.tokens_per_step, batch.seq_len)}"
        ),
        after,
    )
    yield LayoutRule(
        "batch",
        lambda x: batch.sequences % x.dp == 0,
        lambda layout: (
            f"dp={layout.dp} does not divide the {_sequences(batch.sequences)} of a step; "
            f"choose dp = {joined_by_or(divisors(batch.sequences))} (dp_replicate x dp_shard), or change "
            "tokens_per_step"
        ),
        after,
    )
    yield LayoutRule(
        "batch",
        lambda x: batch.sequences // x.dp % x.microbatch == 0,
        lambda layout: (
            f"microbatch={layout.microbatch} does not divide the {_sequences(batch.sequences // layout.dp)} "
            f"of a rank in a step; set microbatch = {joined_by_or(divisors(batch.sequences // layout.dp))}"
        ),
        after,
    )


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"


def _stage_rules(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules of pipeline stages. Only the first stage, with the embedding, and the last, with the head, may
    have no layers."""
    layers = model.num_hidden_layers
    yield LayoutRule(
        "stages",
        lambda x: not x.stage_layers or len(x.stage_layers) == x.pp * x.stages,
        lambda layout: (
            f"stage_layers has {len(layout.stage_layers)} entries, but the layout has pp x stages = "
            f"{layout.pp * layout.stages} stages; give one entry per stage"
        ),
    )
    yield LayoutRule(
        "stages",
        lambda x: not x.stage_layers or sum(x.stage_layers) == layers,
        lambda layout: (
            f"stage_layers={list(layout.stage_layers)} adds up to {sum(layout.stage_layers)} layers, but the model has "
            f"{layers}; give entries that add up to {layers}"
        ),
    )
    yield LayoutRule(
        "stages",
        lambda x: min(x.stage_layers, default=0) >= 0 and min(x.stage_layers[1:-1], default=1) >= 1,
        lambda layout: (
            f"stage_layers={list(layout.stage_layers)} has a stage without layers, which only the first and last stage "
            f"may be; give all others 1 or more"
        ),
    )
    yield LayoutRule(
        "stages",
        lambda x: bool(x.stage_layers) | (x.pp * x.stages <= layers + 2),
        lambda layout: (
            f"pp x stages = {layout.pp} x {layout.stages} is more than {layers + 2}: the model has {layers} layers, "
            f"and two stages may have only the embedding or the head; use at most {layers + 2}"
        ),
    )


def _schedule_rules(batch: BatchSpec) -> Iterator[LayoutRule]:
    """Yield the rules of `kumi.spec.schedule.illegal_schedule` about stages and about microbatches.

    The rule about microbatches requires the rule about stages and those of the batch.
    """
    yield LayoutRule(
        "schedule",
        lambda x: _holds_for_schedule(x, lambda record: record.takes_stages(x.stages)),
        lambda layout: str(illegal_schedule(layout.schedule, layout.pp, layout.stages, 0)),
    )
    yield LayoutRule(
        "microbatches",
        lambda x: _holds_for_schedule(x, lambda record: record.takes_microbatches(x.pp, batch.microbatches(x))),
        lambda layout: str(illegal_schedule(layout.schedule, layout.pp, layout.stages, batch.microbatches(layout))),
        ("degrees", "batch", "schedule"),
    )


def _holds_for_schedule(x: Any, holds: Callable[[Schedule], Any]) -> Any:
    """Return `holds` for the record of the schedule of `x`; for a batch of layouts, for the schedule of each layout."""
    return reduce(or_, (x.one_of("schedule", names) & holds(SCHEDULES[names[0]]) for names in _schedules_by_needs()))


@lru_cache
def _schedules_by_needs() -> tuple[tuple[str, ...], ...]:
    """Return the names of all schedules, in groups that take the same numbers of stages and of microbatches."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, schedule in SCHEDULES.items():
        groups.setdefault(
            (schedule.stages, schedule.more_stages, schedule.in_rounds, schedule.least_per_rank), []
        ).append(name)
    return tuple(tuple(names) for names in groups.values())


def _recompute_rules(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules of `recompute_layers`: it needs a kind of recomputation, and a rank with as many layers."""
    layers, after = model.num_hidden_layers, ("degrees", "stages", "schedule", "microbatches", "recompute")
    recomputing = all_but(RECOMPUTE, "none")

    def some_rank_has_enough(x: Any) -> Any:
        count = x.recompute_layers
        # In an even division, one of the first, second and last rank has the most layers.
        ranks = range(x.pp) if x.stage_layers else (0, 1 * (x.pp > 1), x.pp - 1)
        return reduce(or_, (count <= rank_layers(x, layers, rank) for rank in ranks))

    yield LayoutRule(
        "recompute",
        lambda x: x.recompute_layers is None or (x.recompute_layers <= 0) | x.one_of("recompute", recomputing),
        lambda layout: (
            f"recompute_layers={layout.recompute_layers} with recompute='none' has no effect; "
            f"set recompute = 'selective' or 'full', or leave recompute_layers out"
        ),
        after,
    )
    yield LayoutRule(
        "recompute",
        lambda x: (
            x.recompute_layers is None or x.recomputes_all | ((x.recompute_layers >= 0) & some_rank_has_enough(x))
        ),
        lambda layout: (
            f"recompute_layers={layout.recompute_layers} is out of range, because no rank has more than "
            f"{max_rank_layers(layout, layers)} layers; set recompute_layers = 0 to "
            f"{max_rank_layers(layout, layers)}, or leave it out"
        ),
        after,
    )
