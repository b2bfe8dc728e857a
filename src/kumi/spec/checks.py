"""What is illegal, whoever trains it: rules that the search prunes many layouts with, and the trainer refuses one with.

What this version's trainer does not have besides is in `kumi.spec.trainable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from math import gcd, isqrt
from operator import and_, or_
from typing import Any

from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Host
from kumi.spec.divisibility import cuts
from kumi.spec.layout import CONTEXT, OFFLOAD, RECOMPUTE, Layout
from kumi.spec.legality import Rule, broken, choices, others
from kumi.spec.model import ModelSpec
from kumi.spec.schedule import refusal
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import Schedule
from kumi.spec.sharding import most_layers, rank_layers

# The largest values beside frozen matrices in four bits, which every rank holds whole.
WHOLE_WHEN_QUANTIZED = {"tp": 1, "zero": 0}
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp", "stages", "microbatch", "tiles")


def rules(model: ModelSpec, cluster: ClusterSpec, batch: BatchSpec) -> tuple[Rule, ...]:
    """Every rule of legal layouts for training `model` on `cluster` with `batch`, whoever trains it."""
    return (
        *_degrees(),
        *_zero(),
        *_cluster(cluster),
        *_offload(cluster.host),
        *_tensor(model),
        *_sequence(batch),
        *_context(model),
        *expert_rules(model),
        *_quantized(model),
        *_length(model, batch),
        *_batch(batch),
        *_stages(model),
        *_schedule(batch),
        *_recompute(model),
    )


def problems(model: ModelSpec, layout: Layout, cluster: ClusterSpec, batch: BatchSpec) -> list[str]:
    """Everything that keeps `model` from training on `cluster` with `layout` and `batch`, whoever trains it; empty when
    nothing does."""
    return broken(rules(model, cluster, batch), layout)


def misfits(model: ModelSpec, layout: Layout) -> list[str]:
    """What keeps `layout` from dividing the tensors of `model`, whatever they are computed on."""
    return broken([*_degrees(), *_zero(), *_tensor(model), *expert_rules(model), *_stages(model)], layout)


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending."""
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]


def _degrees() -> Iterator[Rule]:
    """Fields that hold a number or a word which means something: judged before all else, which divides by them."""
    yield from map(_degree, DEGREES)
    for name, words in (("recompute", RECOMPUTE), ("offload", OFFLOAD), ("context", CONTEXT)):
        yield _word(name, words)
    yield Rule(
        "degrees",
        lambda x: (x.zero >= 0) & (x.zero <= 3),
        lambda layout: f"zero={layout.zero} is not a ZeRO stage; use 0, 1, 2 or 3",
        (),
    )


def _degree(name: str) -> Rule:
    return Rule(
        "degrees",
        lambda x: getattr(x, name) >= 1,
        lambda layout: f"{name}={getattr(layout, name)} is not a degree; use 1 or more",
        (),
    )


def _word(name: str, words: tuple[str, ...]) -> Rule:
    return Rule(
        "degrees",
        lambda x: x.one_of(name, words),
        lambda layout: f"{name}='{getattr(layout, name)}' is unknown; use {', '.join(words)}",
        (),
    )


def _zero() -> Iterator[Rule]:
    yield Rule(
        "zero",
        lambda x: (x.zero == 0) | (x.dp_shard * x.cp > 1) | (x.dp_replicate == 1),
        lambda layout: (
            f"zero={layout.zero} divides states over dp_shard, which is 1; "
            f"set dp_shard = {layout.dp_replicate} and dp_replicate = 1"
        ),
    )
    yield Rule(
        "zero",
        lambda x: (x.zero > 0) | (x.dp_shard == 1),
        lambda layout: (
            f"zero=0 divides nothing, but dp_shard={layout.dp_shard}; "
            f"set zero = 1, 2 or 3, or dp_replicate = {layout.dp} and dp_shard = 1"
        ),
    )
    yield Rule(
        "zero",
        lambda x: (x.zero != 2) | (x.pp == 1),
        lambda layout: (
            f"zero=2 with pp={layout.pp}: a pipeline's backwards alternate between its microbatches, so that whole "
            f"gradients stay until the last; set zero = 1 or 3, or pp = 1"
        ),
    )


def _cluster(cluster: ClusterSpec) -> Iterator[Rule]:
    yield Rule(
        "cluster",
        lambda x: x.world_size == cluster.devices,
        lambda layout: (
            f"the layout needs {layout.world_size} devices (pp {layout.pp} x dp_replicate {layout.dp_replicate} x "
            f"dp_shard {layout.dp_shard} x cp {layout.cp} x tp {layout.tp}), the cluster has {cluster.devices}; "
            f"degrees must multiply to {cluster.devices}"
        ),
    )


def _offload(host: Host) -> Iterator[Rule]:
    for place, missing in host_lacks(host).items():
        if missing:
            yield _without(missing, [name for name in OFFLOAD if not _goes_to(place, name)])


def _goes_to(place: str, offload: str) -> bool:
    """Whether `offload` moves something to `place`, "host" or "nvme"."""
    return offload.endswith("-nvme") if place == "nvme" else offload != "none"


def _without(missing: str, able: list[str]) -> Rule:
    return Rule(
        "offload",
        lambda x: x.one_of("offload", able),
        lambda layout: (
            f"offload='{layout.offload}' needs {missing} of a node, which the cluster's description does not "
            f"give; write it into a cluster file, or set offload = 'none'"
        ),
    )


def host_lacks(host: Host) -> dict[str, str]:
    """What must be known, and is not, to move something to the host and to its NVMe drives; empty where all is."""
    known = {
        "host": {"host.memory": host.memory, "host.device_bandwidth": host.device_bandwidth},
        "nvme": {"host.nvme": host.nvme, "host.nvme_bandwidth": host.nvme_bandwidth},
    }
    return {place: " and ".join(name for name, value in values.items() if not value) for place, values in known.items()}


def _tensor(model: ModelSpec) -> Iterator[Rule]:
    need = cuts(model)

    def use() -> str:
        whole = gcd(*(count for _, count in need.tensor))
        return f"use {choices([degree for degree in divisors(whole) if need.tp_divides_kv_heads(degree)])}"

    def divides(name: str, count: int) -> Rule:
        return Rule(
            "tensor",
            lambda x: count % x.tp == 0,
            lambda layout: f"tp={layout.tp} does not divide {name}={count}; {use()}",
        )

    def deals(count: int) -> Rule:
        return Rule(
            "tensor",
            lambda x: (count % x.tp == 0) | (x.tp % count == 0),
            lambda layout: (
                f"tp={layout.tp} does not divide num_key_value_heads={count}, nor is it a multiple of it; {use()}"
            ),
        )

    yield from (divides(name, count) for name, count in need.tensor)
    yield from map(deals, need.kv_heads)


def _sequence(batch: BatchSpec) -> Iterator[Rule]:
    yield Rule(
        "sequence",
        lambda x: (x.cp == 1) | (batch.seq_len % (2 * x.cp) == 0),
        lambda layout: (
            f"cp={layout.cp} cuts sequences into 2 x {layout.cp} pieces, a near and a far one for each rank, which do "
            f"not divide seq_len={batch.seq_len}; use {_multiple(batch.seq_len, 2 * layout.cp)}, or another cp"
        ),
    )
    yield Rule(
        "sequence",
        lambda x: (x.tp == 1) | (x.sequence_parallel == 0) | (batch.seq_len % (x.tp * x.cp) == 0),
        lambda layout: (
            f"sequence_parallel cuts sequences into tp x cp = {layout.tp * layout.cp} pieces, which do not divide "
            f"seq_len={batch.seq_len}; use {_multiple(batch.seq_len, layout.tp * layout.cp)}, or "
            f"set sequence_parallel = false"
        ),
    )


def _context(model: ModelSpec) -> Iterator[Rule]:
    """Ulysses deals the heads of a tp rank out to its cp ranks, and copies key-value heads that these outnumber."""
    need = cuts(model)
    if need.whole_rows:
        yield Rule(
            "context",
            lambda x: x.cp == 1,
            lambda layout: (
                f"cp={layout.cp} cuts sequences, along all of which the model's Mamba layers pass their states on; "
                f"set cp = 1"
            ),
        )
        return
    other_ways = others(CONTEXT, "ulysses")

    def holds(x: Any) -> Any:
        # Heads that tp does not divide are another rule's.
        undivided = reduce(or_, (count % x.tp != 0 for count in need.heads), False)
        return (x.cp == 1) | x.one_of("context", other_ways) | undivided | need.deals_heads(x.cp, x.tp)

    def say(layout: Layout) -> str:
        heads = gcd(*(count // layout.tp for count in need.heads))
        use = choices([degree for degree in divisors(heads) if need.deals_heads(degree, layout.tp)])
        return (
            f"context='ulysses' cannot deal the {heads} heads of a tp rank, and their keys and values, out to "
            f"cp={layout.cp} ranks; use {use} for cp, or context = 'ring'"
        )

    yield Rule("context", holds, say)


def _multiple(number: int, of: int) -> int:
    """The multiple of `of` nearest to `number`."""
    return max(1, round(number / of)) * of


def _divides_all(name: str, counts: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: reduce(and_, (count % getattr(x, name) == 0 for count in counts), True)


def expert_rules(model: ModelSpec) -> Iterator[Rule]:
    """Return what `ep` and `expert_tp` must divide."""
    need = cuts(model)
    if not need.experts:
        yield from map(_without_experts, ("ep", "expert_tp"))
        return
    yield Rule(
        "experts",
        _divides_all("ep", need.experts),
        lambda layout: (
            f"ep={layout.ep} does not divide num_experts={choices(list(need.experts))}; "
            f"use {choices(divisors(gcd(*need.experts)))}"
        ),
    )
    yield Rule(
        "experts",
        _divides_all("expert_tp", need.width),
        lambda layout: (
            f"expert_tp={layout.expert_tp} does not divide the experts' width of {choices(list(need.width))}; "
            f"use {choices(divisors(gcd(*need.width)))}"
        ),
    )
    yield Rule("experts", lambda x: x.dp_shard * x.cp * x.tp % (x.ep * x.expert_tp) == 0, _undealt)


def _without_experts(name: str) -> Rule:
    return Rule(
        "experts",
        lambda x: getattr(x, name) == 1,
        lambda layout: f"{name}={getattr(layout, name)}, but the model has no experts; set {name} = 1",
    )


def _undealt(layout: Layout) -> str:
    ranks = layout.dp_shard * layout.cp * layout.tp
    return (
        f"ep x expert_tp = {layout.ep * layout.expert_tp} does not divide the dp_shard x cp x tp = {ranks} ranks that "
        f"experts are dealt to; use a product that does, one of {choices(divisors(ranks))}"
    )


def _quantized(model: ModelSpec) -> Iterator[Rule]:
    """Matrices packed in four bits cannot be sharded: the scales belong to blocks of the whole matrix."""
    quantize = "" if model.lora is None else model.lora.quantize

    def whole(name: str, most: int) -> Rule:
        return Rule(
            "quantized",
            lambda x: getattr(x, name) <= most,
            lambda layout: (
                f"{name}={getattr(layout, name)} with lora.quantize='{quantize}': quantised matrices are whole on "
                f"every rank; set {name} = {most}, with dp_replicate or pp instead"
            ),
        )

    if quantize:
        yield from (whole(name, most) for name, most in WHOLE_WHEN_QUANTIZED.items())


def _length(model: ModelSpec, batch: BatchSpec) -> Iterator[Rule]:
    yield Rule(
        "length",
        lambda x: batch.seq_len <= model.max_position_embeddings,
        lambda layout: (
            f"seq_len={batch.seq_len} is longer than max_position_embeddings={model.max_position_embeddings}; "
            f"shorten seq_len or extend the model's rope"
        ),
    )


def _batch(batch: BatchSpec) -> Iterator[Rule]:
    """Only the first that is broken is said."""
    after = ("degrees", "batch")
    yield Rule(
        "batch",
        lambda x: batch.tokens_per_step % batch.seq_len == 0,
        lambda layout: (
            f"seq_len={batch.seq_len} does not divide tokens_per_step={batch.tokens_per_step}; "
            f"use {_multiple(batch.tokens_per_step, batch.seq_len)}"
        ),
        after,
    )
    yield Rule(
        "batch",
        lambda x: batch.sequences % x.dp == 0,
        lambda layout: (
            f"dp={layout.dp} does not divide the {_sequences(batch.sequences)} of a step; "
            f"use {choices(divisors(batch.sequences))} for dp, or change tokens_per_step"
        ),
        after,
    )
    yield Rule(
        "batch",
        lambda x: batch.sequences // x.dp % x.microbatch == 0,
        lambda layout: (
            f"microbatch={layout.microbatch} does not divide the {_sequences(batch.sequences // layout.dp)} "
            f"that each rank has in a step; use {choices(divisors(batch.sequences // layout.dp))}"
        ),
        after,
    )


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"


def _stages(model: ModelSpec) -> Iterator[Rule]:
    """Only the first stage, with the embedding, and the last, with the head, may go without layers."""
    layers = model.num_hidden_layers
    yield Rule(
        "stages",
        lambda x: not x.stage_layers or len(x.stage_layers) == x.pp * x.stages,
        lambda layout: (
            f"stage_layers has {len(layout.stage_layers)} entries for pp x stages = {layout.pp * layout.stages} "
            f"stages; give one for each"
        ),
    )
    yield Rule(
        "stages",
        lambda x: not x.stage_layers or sum(x.stage_layers) == layers,
        lambda layout: (
            f"stage_layers adds up to {sum(layout.stage_layers)} layers, the model has {layers}; divide these"
        ),
    )
    yield Rule(
        "stages",
        lambda x: min(x.stage_layers, default=0) >= 0 and min(x.stage_layers[1:-1], default=1) >= 1,
        lambda layout: (
            f"stage_layers={list(layout.stage_layers)}: only the first and last stage may have no layers; "
            f"give others 1 or more"
        ),
    )
    yield Rule(
        "stages",
        lambda x: bool(x.stage_layers) | (x.pp * x.stages <= layers + 2),
        lambda layout: (
            f"pp x stages = {layout.pp} x {layout.stages} is more than the {layers} layers and the two stages that "
            f"may have only the embedding or the head; use at most {layers + 2}"
        ),
    )


def _schedule(batch: BatchSpec) -> Iterator[Rule]:
    """What `kumi.spec.schedule.refusal` says of one layout: of its schedule and stages, and where these are in order
    and the batch divides, of its microbatches."""
    yield Rule(
        "schedule",
        lambda x: _by_schedule(x, lambda one: one.takes_stages(x.stages)),
        lambda layout: str(refusal(layout.schedule, layout.pp, layout.stages, 0)),
    )
    yield Rule(
        "microbatches",
        lambda x: _by_schedule(x, lambda one: one.takes_microbatches(x.pp, batch.microbatches(x))),
        lambda layout: str(refusal(layout.schedule, layout.pp, layout.stages, batch.microbatches(layout))),
        ("degrees", "batch", "schedule"),
    )


def _by_schedule(x: Any, holds: Callable[[Schedule], Any]) -> Any:
    """What `holds` says of the schedule of `x`, or of each row's."""
    return reduce(or_, (x.one_of("schedule", names) & holds(SCHEDULES[names[0]]) for names in _alike()))


@lru_cache
def _alike() -> tuple[tuple[str, ...], ...]:
    """The schedules, those together that take the same stages and microbatches."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, schedule in SCHEDULES.items():
        groups.setdefault(
            (schedule.stages, schedule.more_stages, schedule.in_rounds, schedule.least_per_rank), []
        ).append(name)
    return tuple(tuple(names) for names in groups.values())


def _recompute(model: ModelSpec) -> Iterator[Rule]:
    layers, after = model.num_hidden_layers, ("degrees", "stages", "schedule", "microbatches", "recompute")
    recomputing = others(RECOMPUTE, "none")

    def exist(x: Any) -> Any:
        some = x.recompute_layers
        ranks = range(x.pp) if x.stage_layers else (0, 1 * (x.pp > 1), x.pp - 1)
        return reduce(or_, (some <= rank_layers(x, layers, rank) for rank in ranks))

    yield Rule(
        "recompute",
        lambda x: x.recompute_layers is None or (x.recompute_layers <= 0) | x.one_of("recompute", recomputing),
        lambda layout: (
            f"recompute_layers={layout.recompute_layers}, but recompute='none'; "
            f"set recompute = 'selective' or 'full', or leave it out"
        ),
        after,
    )
    yield Rule(
        "recompute",
        lambda x: x.recompute_layers is None or x.recomputes_all | ((x.recompute_layers >= 0) & exist(x)),
        lambda layout: (
            f"recompute_layers={layout.recompute_layers}, but no rank has more than {most_layers(layout, layers)} "
            f"layers; use 0 to {most_layers(layout, layers)}, or leave it out"
        ),
        after,
    )
