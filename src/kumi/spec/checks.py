"""What is illegal, in sentences. The search prunes with this and the trainer refuses with it.

`kumi.plan.legal` says the same of many layouts at once; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isqrt
from typing import Any

from kumi.errors import ModelError
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Host
from kumi.spec.families import check_trained
from kumi.spec.job import Job
from kumi.spec.layout import CONTEXT, OFFLOAD, RECOMPUTE, Layout
from kumi.spec.ledger import kind_ops
from kumi.spec.model import ModelSpec
from kumi.spec.op import Op
from kumi.spec.peft import untrained_adapters
from kumi.spec.schedule import placement, refusal
from kumi.spec.sharding import AXIS, stage_bounds, zero_degree
from kumi.spec.techniques import untrained_float8, untrained_optimizer, untrained_techniques

TRAINED_PRECISIONS = ("bf16", "fp16", "fp32", "fp64", "fp8")
# The largest values beside frozen matrices in four bits, which every rank holds whole.
WHOLE_WHEN_QUANTIZED = {"tp": 1, "zero": 0}
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp", "stages", "microbatch", "tiles")


def problems(model: ModelSpec, layout: Layout, cluster: ClusterSpec, batch: BatchSpec) -> list[str]:
    """Everything that keeps `model` from training on `cluster` with `layout` and `batch`, whoever trains it; empty when
    nothing does. `untrainable` says what this version's trainer cannot do besides."""
    wrong = list(_words(layout))
    if wrong:
        return wrong
    wrong = [
        *_zero(layout),
        *_cluster(layout, cluster),
        *_offload(layout, cluster.host),
        *_tensor(model, layout),
        *_sequence(layout, batch),
        *_context(model, layout),
        *_experts(model, layout),
        *_quantized(model, layout),
        *_length(model, batch),
    ]
    cut = list(_batch(layout, batch))
    shape = [*_stages(model, layout), *_schedule(layout, 2 * layout.pp if cut else batch.microbatches(layout))]
    return [*wrong, *cut, *(shape or _recompute(model, layout))]


def misfits(model: ModelSpec, layout: Layout) -> list[str]:
    """What keeps `layout` from dividing the tensors of `model`, whatever they are computed on."""
    return list(_words(layout)) or [
        *_zero(layout),
        *_tensor(model, layout),
        *_experts(model, layout),
        *_stages(model, layout),
    ]


def untrainable(job: Job, layout: Layout) -> list[str]:
    """What keeps this version of kumi from training `job` with a legal `layout`: it can only be planned."""
    try:
        check_trained(job.model)
    except ModelError as error:
        return [str(error), *untrained(job, layout)]
    return untrained(job, layout)


def untrained(job: Job, layout: Layout) -> list[str]:
    """The same, but for the model."""
    return [*_untrained_axes(job.model, layout), *_untrained_choices(job, layout)]


def _untrained_axes(model: ModelSpec, layout: Layout) -> Iterator[str]:
    rows = -(-model.vocab_size // layout.tp)
    if rows * (layout.tp - 1) >= model.vocab_size:
        yield (
            f"tp={layout.tp} leaves ranks without any of the vocab_size={model.vocab_size} tokens, of which others "
            f"have {rows} each; use a smaller tp"
        )
    if not cuts(model).experts or not _experts_are_legal(model, layout):
        return
    if layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"sequence_parallel=false with tp={layout.tp}: this version sends each rank's own tokens to experts; "
            f"set sequence_parallel = true, or tp = 1"
        )
    parts = zero_degree(layout, routed=True)
    if layout.zero and layout.dp_shard * layout.cp == 1 and parts > 1:
        yield (
            f"zero={layout.zero} would divide the experts only, over {parts} tp ranks: dp_shard x cp is 1; set zero = 0"
        )
    for size in sorted({model.hidden_size, *(2 * width // layout.expert_tp for width in cuts(model).width)}):
        if layout.zero and size % parts:
            yield (
                f"zero={layout.zero} divides each expert's matrices over {parts} ranks, which do not divide their "
                f"{size} rows; use a larger ep, or another dp_shard"
            )


def _experts_are_legal(model: ModelSpec, layout: Layout) -> bool:
    return not list(_experts(model, layout))


def _untrained_choices(job: Job, layout: Layout) -> Iterator[str]:
    yield from untrained_techniques(job.model, layout)
    yield from untrained_float8(job, layout)
    yield from untrained_adapters(job, layout)
    yield from untrained_optimizer(job, layout)
    if job.precision.kind not in TRAINED_PRECISIONS:
        yield (
            f"precision.kind='{job.precision.kind}': this version trains in {', '.join(TRAINED_PRECISIONS)} only; "
            f"plan it, or set one of these"
        )


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending."""
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]


def _choices(values: list[int]) -> str:
    listed = [str(value) for value in values]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"


@dataclass(frozen=True)
class Cuts:
    """What an axis must divide: of every layer that it cuts, how many pieces there are to hand out.

    `tensor`: query heads, groups of a Mamba mixer's heads, and widths of feed-forward layers, `kv_heads`: key-value
    heads; `width`: of routed experts, `experts`: how many of those. `whole_rows`: a layer needs all of a sequence.
    """

    tensor: tuple[tuple[str, int], ...]
    kv_heads: tuple[int, ...]
    width: tuple[int, ...]
    experts: tuple[int, ...]
    whole_rows: bool

    def tp_divides_kv_heads(self, tp: int) -> bool:
        """Whether every rank has equally many key-value heads, or equally many ranks every head."""
        return all(count % tp == 0 or tp % count == 0 for count in self.kv_heads)

    @property
    def heads(self) -> tuple[int, ...]:
        """Query heads of every layer that has other ones."""
        return tuple(count for name, count in self.tensor if name == "num_attention_heads")

    def deals_heads(self, cp: Any, tp: Any) -> Any:
        """Whether each of `cp` ranks can get as many of a tp rank's heads, and the keys and values of these; degrees
        are whole numbers, or numpy arrays of them."""
        found = cp > 0
        for count in self.heads:
            found = found & (count // tp % cp == 0)
        for count in self.kv_heads:
            held = -(-count // tp)
            found = found & ((held % cp == 0) | (cp % held == 0))
        return found


@lru_cache(maxsize=64)
def cuts(model: ModelSpec) -> Cuts:
    """What the axes must divide in `model`."""
    ops = [op for kind in kind_ops(model) for op in kind]
    names = {"heads": "num_attention_heads", "groups": "n_groups", "ffn": "intermediate_size"}
    dense = {(dim, count) for op in ops if not op.experts for dim, count in _cut_by_tp(op)}
    return Cuts(
        tuple(sorted((names.get(dim, dim), count) for dim, count in dense if dim != "kv_heads")),
        tuple(sorted(count for dim, count in dense if dim == "kv_heads")),
        tuple(sorted({count for op in ops if op.experts for _, count in _cut_by_tp(op)})),
        tuple(sorted({op.experts for op in ops if op.experts})),
        any(op.kind == "scan" for op in ops),
    )


def _cut_by_tp(op: Op) -> Iterator[tuple[str, int]]:
    return ((dim.name, dim.count) for dim in (op.source, op.target) if AXIS.get(dim.name) == "tp")


def _words(layout: Layout) -> Iterator[str]:
    for name in DEGREES:
        if getattr(layout, name) < 1:
            yield f"{name}={getattr(layout, name)} is not a degree; use 1 or more"
    if layout.recompute not in RECOMPUTE:
        yield f"recompute='{layout.recompute}' is unknown; use {', '.join(RECOMPUTE)}"
    if layout.offload not in OFFLOAD:
        yield f"offload='{layout.offload}' is unknown; use {', '.join(OFFLOAD)}"
    if layout.context not in CONTEXT:
        yield f"context='{layout.context}' is unknown; use {', '.join(CONTEXT)}"
    if layout.zero not in (0, 1, 2, 3):
        yield f"zero={layout.zero} is not a ZeRO stage; use 0, 1, 2 or 3"


def _zero(layout: Layout) -> Iterator[str]:
    if layout.zero > 0 and layout.dp_shard * layout.cp == 1 and layout.dp_replicate > 1:
        yield (
            f"zero={layout.zero} divides states over dp_shard, which is 1; "
            f"set dp_shard = {layout.dp_replicate} and dp_replicate = 1"
        )
    elif layout.zero == 0 and layout.dp_shard > 1:
        yield (
            f"zero=0 divides nothing, but dp_shard={layout.dp_shard}; "
            f"set zero = 1, 2 or 3, or dp_replicate = {layout.dp} and dp_shard = 1"
        )
    if layout.zero == 2 and layout.pp > 1:
        yield (
            f"zero=2 with pp={layout.pp}: a pipeline's backwards alternate between its microbatches, so that whole "
            f"gradients stay until the last; set zero = 1 or 3, or pp = 1"
        )


def _cluster(layout: Layout, cluster: ClusterSpec) -> Iterator[str]:
    if layout.world_size != cluster.devices:
        yield (
            f"the layout needs {layout.world_size} devices (pp {layout.pp} x dp_replicate {layout.dp_replicate} x "
            f"dp_shard {layout.dp_shard} x cp {layout.cp} x tp {layout.tp}), the cluster has {cluster.devices}; "
            f"degrees must multiply to {cluster.devices}"
        )


def _offload(layout: Layout, host: Host) -> Iterator[str]:
    for place, missing in host_lacks(host).items():
        if missing and (layout.offload.endswith("-nvme") if place == "nvme" else layout.offload != "none"):
            yield (
                f"offload='{layout.offload}' needs {missing} of a node, which the cluster's description does not "
                f"give; write it into a cluster file, or set offload = 'none'"
            )


def host_lacks(host: Host) -> dict[str, str]:
    """What must be known, and is not, to move something to the host and to its NVMe drives; empty where all is."""
    known = {
        "host": {"host.memory": host.memory, "host.device_bandwidth": host.device_bandwidth},
        "nvme": {"host.nvme": host.nvme, "host.nvme_bandwidth": host.nvme_bandwidth},
    }
    return {place: " and ".join(name for name, value in values.items() if not value) for place, values in known.items()}


def _tensor(model: ModelSpec, layout: Layout) -> Iterator[str]:
    need, tp = cuts(model), layout.tp
    whole = gcd(*(count for _, count in need.tensor))
    use = f"use {_choices([degree for degree in divisors(whole) if need.tp_divides_kv_heads(degree)])}"
    for name, count in need.tensor:
        if count % tp:
            yield f"tp={tp} does not divide {name}={count}; {use}"
    for count in need.kv_heads:
        if count % tp and tp % count:
            yield f"tp={tp} does not divide num_key_value_heads={count}, nor is it a multiple of it; {use}"


def _sequence(layout: Layout, batch: BatchSpec) -> Iterator[str]:
    cp, tp = layout.cp, layout.tp
    if cp > 1 and batch.seq_len % (2 * cp):
        yield (
            f"cp={cp} cuts sequences into 2 x {cp} pieces, a near and a far one for each rank, which do not divide "
            f"seq_len={batch.seq_len}; use {_multiple(batch.seq_len, 2 * cp)}, or another cp"
        )
    if tp > 1 and layout.sequence_parallel and batch.seq_len % (tp * cp):
        yield (
            f"sequence_parallel cuts sequences into tp x cp = {tp * cp} pieces, which do not divide "
            f"seq_len={batch.seq_len}; use {_multiple(batch.seq_len, tp * cp)}, or "
            f"set sequence_parallel = false"
        )


def _context(model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Ulysses deals the heads of a tp rank out to its cp ranks, and copies key-value heads that these outnumber."""
    need, cp, tp = cuts(model), layout.cp, layout.tp
    if cp > 1 and need.whole_rows:
        yield (f"cp={cp} cuts sequences, along all of which the model's Mamba layers pass their states on; set cp = 1")
        return
    if cp == 1 or layout.context != "ulysses" or any(count % tp for count in need.heads):
        return
    if not (heads := gcd(*(count // tp for count in need.heads))) or need.deals_heads(cp, tp):
        return
    use = _choices([degree for degree in divisors(heads) if need.deals_heads(degree, tp)])
    yield (
        f"context='ulysses' cannot deal the {heads} heads of a tp rank, and their keys and values, out to cp={cp} "
        f"ranks; use {use} for cp, or context = 'ring'"
    )


def _multiple(number: int, of: int) -> int:
    """The multiple of `of` nearest to `number`."""
    return max(1, round(number / of)) * of


def _experts(model: ModelSpec, layout: Layout) -> Iterator[str]:
    need, ep, expert_tp = cuts(model), layout.ep, layout.expert_tp
    if not need.experts:
        for name in ("ep", "expert_tp"):
            if getattr(layout, name) > 1:
                yield f"{name}={getattr(layout, name)}, but the model has no experts; set {name} = 1"
        return
    if any(count % ep for count in need.experts):
        yield (
            f"ep={ep} does not divide num_experts={_choices(list(need.experts))}; "
            f"use {_choices(divisors(gcd(*need.experts)))}"
        )
    if any(count % expert_tp for count in need.width):
        yield (
            f"expert_tp={expert_tp} does not divide the experts' width of {_choices(list(need.width))}; "
            f"use {_choices(divisors(gcd(*need.width)))}"
        )
    ranks = layout.dp_shard * layout.cp * layout.tp
    if ranks % (ep * expert_tp):
        yield (
            f"ep x expert_tp = {ep * expert_tp} does not divide the dp_shard x cp x tp = {ranks} ranks that experts "
            f"are dealt to; use a product that does, one of {_choices(divisors(ranks))}"
        )


def _quantized(model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Matrices packed in four bits cannot be sharded: the scales belong to blocks of the whole matrix."""
    quantize = "" if model.lora is None else model.lora.quantize
    for name, most in WHOLE_WHEN_QUANTIZED.items() if quantize else ():
        if getattr(layout, name) > most:
            yield (
                f"{name}={getattr(layout, name)} with lora.quantize='{quantize}': quantised matrices are whole on "
                f"every rank; set {name} = {most}, with dp_replicate or pp instead"
            )


def _length(model: ModelSpec, batch: BatchSpec) -> Iterator[str]:
    if batch.seq_len > model.max_position_embeddings:
        yield (
            f"seq_len={batch.seq_len} is longer than max_position_embeddings={model.max_position_embeddings}; "
            f"shorten seq_len or extend the model's rope"
        )


def _batch(layout: Layout, batch: BatchSpec) -> Iterator[str]:
    if batch.tokens_per_step % batch.seq_len:
        near = _multiple(batch.tokens_per_step, batch.seq_len)
        yield f"seq_len={batch.seq_len} does not divide tokens_per_step={batch.tokens_per_step}; use {near}"
    elif batch.sequences % layout.dp:
        yield (
            f"dp={layout.dp} does not divide the {_sequences(batch.sequences)} of a step; "
            f"use {_choices(divisors(batch.sequences))} for dp, or change tokens_per_step"
        )
    elif batch.sequences // layout.dp % layout.microbatch:
        yield (
            f"microbatch={layout.microbatch} does not divide the {_sequences(batch.sequences // layout.dp)} "
            f"that each rank has in a step; use {_choices(divisors(batch.sequences // layout.dp))}"
        )


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"


def _stages(model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Only the first stage, with the embedding, and the last, with the head, may go without layers."""
    count, layers, given = layout.pp * layout.stages, model.num_hidden_layers, layout.stage_layers
    if given:
        if len(given) != count:
            yield f"stage_layers has {len(given)} entries for pp x stages = {count} stages; give one for each"
        if sum(given) != layers:
            yield f"stage_layers adds up to {sum(given)} layers, the model has {layers}; divide these"
        if any(size < 0 for size in given) or any(size < 1 for size in given[1:-1]):
            yield f"stage_layers={list(given)}: only the first and last stage may have no layers; give others 1 or more"
    elif count > layers + 2:
        yield (
            f"pp x stages = {layout.pp} x {layout.stages} is more than the {layers} layers and the two stages that "
            f"may have only the embedding or the head; use at most {layers + 2}"
        )


def _schedule(layout: Layout, microbatches: int) -> Iterator[str]:
    reason = refusal(layout.schedule, layout.pp, layout.stages, microbatches)
    if reason:
        yield reason


def _recompute(model: ModelSpec, layout: Layout) -> Iterator[str]:
    some = layout.recompute_layers
    if some is None:
        return
    sizes = [last - first for first, last in stage_bounds(layout, model.num_hidden_layers)]
    most = max(sum(sizes[stage] for stage in held) for held in placement(layout.schedule, layout.pp, layout.stages))
    if layout.recompute == "none" and some > 0:
        yield f"recompute_layers={some}, but recompute='none'; set recompute = 'selective' or 'full', or leave it out"
    elif not 0 <= some <= most:
        yield f"recompute_layers={some}, but no rank has more than {most} layers; use 0 to {most}, or leave it out"
