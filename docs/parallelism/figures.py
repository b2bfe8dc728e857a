"""Compute the tables of these pages from the specs and the planner, and write them between their marks.

python docs/parallelism/figures.py

A table stands in a page between `<!-- computed: NAME -->` and `<!-- end -->`. Run it in the repository's root.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kumi.config import job, load_plan
from kumi.plan.estimate import estimate
from kumi.plan.estimates import Collective, MemoryEstimate
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.memory.activations import model_activations
from kumi.plan.pipeline.timeline import Timeline, simulate
from kumi.plan.time.traffic import collectives
from kumi.report.phrases import percent, rate, volume
from kumi.report.quantities import wire_bytes
from kumi.report.rank_placement import placement
from kumi.spec import schedule, schedules
from kumi.spec.batch import BatchSpec
from kumi.spec.job import Job
from kumi.spec.layout import CONTEXT, OFFLOAD, Layout
from kumi.spec.ledger import layer_ops, logit_chunk
from kumi.spec.optim import Optim
from kumi.spec.optim_states import OPTIM_KINDS, bytes_per_element
from kumi.spec.precision import ITEMSIZE, PRECISIONS
from kumi.spec.process_groups import axis
from kumi.spec.sharding import is_routed, local_numel, shard_shape, stage_bounds
from kumi.units import format_bytes

PAGES = Path(__file__).parent
BLOCK = re.compile(r"(<!-- computed: ([\w.]+) -->)(?:(?!<!--).)*(<!-- end -->)", re.S)
PP, MICROBATCHES = 4, 8
SCHEDULES = {name: one.stages for name, one in schedules.SCHEDULES.items()}


def tables() -> dict[str, str]:
    """Return every table in Markdown, by its name."""
    return {
        "placement": _placement(), "data.zero": _zero(), "tensor.counts": _counts(), "tensor.degrees": _tensor(),
        "pipeline.schedules": _schedules(), "pipeline.stages": _stages(), "context.degrees": _context(),
        "expert.degrees": _experts(), "memory.recompute": _recompute(), "memory.offload": _offload(),
        "memory.optim": _optim(), "memory.precision": _precision(), "memory.logits": _logits(),
        "memory.tiles": _tiles(), "tutorial.layouts": _tutorial(),
    }  # fmt: skip


def refreshed(page: str, computed: dict[str, str]) -> str:
    """Return the text of a page with its tables replaced by the computed ones."""
    return BLOCK.sub(lambda block: f"{block[1]}\n\n{computed[block[2]]}\n\n{block[3]}", page)


def llama(*, seq_len: int = 8192, tokens: int = 2**18) -> Job:
    """Return Llama 3 8B (3.1 for sequences longer than 8,192) on one node of eight H100."""
    version = "3" if seq_len <= 8192 else "3.1"
    source = f"model.source=examples/models/llama-{version}-8b"
    example = job(load_plan("examples/plan/llama-3-8b.toml", [source, "cluster.nodes=1"]))
    return replace(example, batch=BatchSpec(seq_len, tokens))


def commands(page: Path) -> list[list[str]]:
    """Return the kumi commands in the code blocks of a page, as lists of words."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("kumi ")]


def trained(words: Sequence[str]) -> tuple[str, Job, Layout]:
    """Return the run folder, the job and the layout of a `kumi train` command of the tutorial."""
    config = load_plan(words[2], [word for word in words[3:] if not word.startswith("-") and "=" in word])
    assert config.train is not None
    name = Path(config.train.out).name
    return name, job(config), Layout(**config.layout.model_dump(exclude_none=True))


def mixtral() -> Job:
    """Return Mixtral 8x7B on eight nodes of eight H100."""
    return job(load_plan("examples/plan/mixtral-8x7b.toml"))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def states(memory: MemoryEstimate) -> int:
    """Return the resident bytes of parameters, gradients and optimizer states."""
    return memory.params + memory.grads + memory.optimizer


def sent(messages: Iterable[Collective], *axes: str, kinds: Sequence[str] = ()) -> float:
    """Return the bytes that a rank sends along `axes` in a step, without the gradient norm."""
    return sum(wire_bytes(one) for one in messages if one.axis in axes and (not kinds or one.kind in kinds))


def _placement() -> str:
    layout = Layout(pp=2, dp_shard=4, cp=2, tp=4, zero=3)
    example = job(load_plan("examples/plan/llama-3-70b-aws.toml"))
    placed = placement(layout, example.cluster, experts=False)["axes"]
    rows = [(f"`{one['axis']}`", one["degree"], one["stride"], " ".join(map(str, one["group"])), one["link"],
             rate(one["bandwidth"])) for one in placed if one["axis"] != "zero"]  # fmt: skip
    return _table(("axis", "degree", "stride", "the group of rank 0", "link", "a device"), rows)


def _zero() -> str:
    rows = []
    for keys, layout in (
        ("`dp_replicate = 8`, `zero = 0`", Layout(dp_replicate=8)),
        *((f"`dp_shard = 8`, `zero = {zero}`", Layout(dp_shard=8, zero=zero)) for zero in (1, 2, 3)),
        ("`dp_replicate = 2`, `dp_shard = 4`, `zero = 3`", Layout(dp_replicate=2, dp_shard=4, zero=3)),
    ):
        memory, messages = estimate(llama(), layout).memory[0], collectives(llama(), layout)
        gathered = sent(messages, "dp_shard", kinds=["all_gather"])
        reduced = sent(messages, "dp", "dp_shard", "dp_replicate", kinds=["reduce_scatter", "all_reduce"])
        rows.append((keys, format_bytes(states(memory)), format_bytes(memory.gathered + memory.weights),
                     volume(gathered), volume(reduced)))  # fmt: skip
    head = ("keys", "resident states", "transient", "parameters sent a step", "gradients sent a step")
    return _table(head, rows)


def _counts() -> str:
    job = llama()
    layers, rows = job.model.num_hidden_layers, []
    for when in ("forward", "backward", "recompute"):
        row = []
        for layout in (Layout(tp=8, sequence_parallel=False, recompute="full"), Layout(tp=8, recompute="full")):
            times = layers * job.batch.microbatches(layout)
            counts: dict[str, int] = {}
            for message in collectives(job, layout):
                if message.axis == "tp" and message.when == when:
                    counts[message.kind] = counts.get(message.kind, 0) + message.count // times
            row.append(", ".join(f"{count} `{kind}`" for kind, count in counts.items() if count))
        rows.append((when if when != "recompute" else 'with `recompute = "full"`, also', *row))
    return _table(("when", "`sequence_parallel = false`", "`sequence_parallel = true`"), rows)


def _tensor() -> str:
    rows, job = [], llama()
    for tp in (1, 2, 4, 8):
        layout = Layout(dp_shard=8 // tp, tp=tp, zero=1 if tp < 8 else 0)
        elements = sum(local_numel(param, Layout(tp=tp), 0) for op in layer_ops(job.model, 0) for param in op.params)
        activations = [
            estimate(job, replace(layout, sequence_parallel=on)).memory[0].activations for on in (False, True)
        ]
        rows.append((tp, f"{elements / 1e6:.1f} M", *map(format_bytes, activations),
                     volume(sent(collectives(job, layout), "tp"))))  # fmt: skip
    head = ("`tp`", "parameters of a layer on a rank", "activations, `sequence_parallel = false`",
            "activations, `sequence_parallel = true`", "sent a step along tp")  # fmt: skip
    return _table(head, rows)


def timeline(name: str, stages: int) -> Timeline:
    """Simulate equal stages, where forward, gradient of inputs and gradient of weights take equally long."""
    lists, assignment = schedule.actions(name, PP, stages, MICROBATCHES), schedule.stage_assignment(name, PP, stages)
    return simulate(lists, assignment, [(1 / stages,) * 3] * (PP * stages))


def waiting(simulated: Timeline) -> float:
    """Return the share of the time in which ranks wait, on average."""
    return sum(simulated.idle) / len(simulated.idle) / simulated.seconds


def in_flight(name: str, stages: int, rank: int) -> float:
    """Return the most microbatches whose activations a rank keeps at once, in units of all its layers."""
    now = most = 0.0
    ends = {"B": -1.0, "I": 0.0, "W": -1.0, "F": 1.0}
    for action in schedule.actions(name, PP, stages, MICROBATCHES)[rank]:
        now += ends[action.kind] / stages
        most = max(most, now)
    return most


def _schedules() -> str:
    rows = [(f"`{name}`", stages, percent(waiting(timeline(name, stages))),
             *(f"{in_flight(name, stages, rank):g}" for rank in (0, PP - 1)), 2 * stages)
            for name, stages in SCHEDULES.items()]  # fmt: skip
    return _table(("`schedule`", "`stages`", "ranks wait", "microbatches kept by rank 0", f"by rank {PP - 1}",
                   "messages of an inner rank for a microbatch"), rows)  # fmt: skip


def _stages() -> str:
    layout, job = Layout(pp=PP, dp_shard=2, zero=1, recompute="full"), llama()
    estimated, bounds = estimate(job, layout), stage_bounds(layout, job.model.num_hidden_layers)
    rows = [
        (rank, f"{first} to {last - 1}", format_bytes(states(memory)), format_bytes(memory.activations),
         volume(sent(collectives(job, layout, rank), "pp")))
        for rank, (memory, (first, last)) in enumerate(zip(estimated.memory, bounds, strict=True))
    ]  # fmt: skip
    return _table(("pp rank", "layers", "resident states", "activations", "sent a step along pp"), rows)


def _context() -> str:
    job, rows = llama(seq_len=131072, tokens=2**20), []
    for cp in (1, 2, 4, 8):
        layout = Layout(dp_shard=8 // cp, cp=cp, zero=3, recompute="full")
        memory = estimate(job, layout).memory[0]
        sizes = [sent(collectives(job, replace(layout, context=word)), "cp") for word in CONTEXT]
        rows.append((cp, f"{131072 // cp:,}", format_bytes(states(memory)), format_bytes(memory.activations),
                     *map(volume, sizes)))  # fmt: skip
    head = ("`cp`", "tokens of a sequence on a rank", "resident states", "activations")
    return _table((*head, *(f'sent a step, `"{word}"`' for word in CONTEXT)), rows)


def expert_elements(job: Job, layout: Layout) -> tuple[int, int]:
    """Return the elements of a layer's routed experts with which rank 0 computes, and the ones in its shard."""
    params = [param for op in layer_ops(job.model, 0) for param in op.params if is_routed(param)]
    whole = 0
    for param in params:
        size = 1
        for part in shard_shape(param, layout.tp, layout.ep, layout.expert_tp):
            size *= part
        whole += size
    return whole, sum(local_numel(param, layout, 0) for param in params)


def _experts() -> str:
    job, rows = mixtral(), []
    count = max(op.experts for op in layer_ops(job.model, 0))
    for tp, ep, expert_tp in ((1, 1, 1), (1, 4, 1), (1, 8, 1), (2, 8, 1), (2, 8, 2)):
        layout = Layout(dp_shard=64 // tp, tp=tp, ep=ep, expert_tp=expert_tp, zero=3)
        used, resident = expert_elements(job, layout)
        messages = collectives(job, layout)
        rows.append((tp, ep, expert_tp, axis(layout, "expert_dp").degree, count // ep, f"{used / 1e6:,.0f} M",
                     f"{resident / 1e6:.1f} M", volume(sent(messages, "ep")) if ep > 1 else "-"))  # fmt: skip
    return _table(("`tp`", "`ep`", "`expert_tp`", "expert_dp", "experts on a rank", "their elements a layer",
                   "kept by the rank", "sent a step along ep"), rows)  # fmt: skip


def _recompute() -> str:
    job, base = llama(), Layout(dp_shard=8, zero=3)
    (layer,) = model_activations(job, batch_layouts([base])).layers
    sizes = {"none": (layer.none, 0 * layer.none), "selective": (layer.selective, layer.recomputed_selective),
             "full": (layer.full, layer.recomputed_full)}  # fmt: skip
    rows = []
    for word, (saved, again) in sizes.items():
        memory = estimate(job, replace(base, recompute=word)).memory[0]
        rows.append((f'`recompute = "{word}"`', f"{saved[0]:,.0f}", f"{again[0]:,.0f}",
                     format_bytes(memory.activations)))  # fmt: skip
    head = ("key", "bytes kept a token and layer", "bytes recomputed, one layer at a time", "activations of a rank")
    return _table(head, rows)


def _offload() -> str:
    job, rows = llama(), []
    for word in OFFLOAD:
        estimated = estimate(job, Layout(dp_shard=8, zero=3, offload=word))
        memory = estimated.memory[0]
        rows.append((f'`offload = "{word}"`', format_bytes(states(memory)), format_bytes(memory.activations),
                     format_bytes(estimated.host_memory)))  # fmt: skip
    return _table(("key", "states on the device", "activations on the device", "memory of the host a rank"), rows)


def _tiles() -> str:
    job, rows = llama(), []
    for count in (1, 4, 16):
        layout = Layout(dp_shard=8, zero=3, tiles=count)
        (layer,), memory = model_activations(job, batch_layouts([layout])).layers, estimate(job, layout).memory[0]
        rows.append((f"`tiles = {count}`", f"{layer.none[0]:,.0f}", format_bytes(memory.gathered),
                     format_bytes(memory.total)))  # fmt: skip
    return _table(("key", "bytes kept a token and layer", "gathered", "memory of a rank"), rows)


def _optim() -> str:
    rows = [(f'`kind = "{kind}"`', f"{bytes_per_element(Optim(kind=kind), 4):.3g}") for kind in OPTIM_KINDS]
    return _table(("`[optim]`", "bytes a parameter, of a matrix of a layer"), rows)


def _precision() -> str:
    rows = []
    for kind, precision in PRECISIONS.items():
        size = bytes_per_element(Optim(), ITEMSIZE[precision.param])
        rows.append(
            (
                f'`kind = "{kind}"`',
                precision.param,
                precision.compute,
                precision.reduce,
                f"{2 * ITEMSIZE[precision.param] + size:.3g}",
            )
        )
    return _table(("`[precision]`", "parameters", "computing", "reduction",
                   "resident bytes a parameter, with AdamW"), rows)  # fmt: skip


def _logits() -> str:
    job = llama()
    vocab, chunk = job.model.vocab_size, logit_chunk(job.model.vocab_size, job.cluster.device.kind)
    whole, parts = 4 * 8192 * vocab, 2 * 4 * chunk * vocab
    rows = [("all logits of a sequence, in float32", format_bytes(whole)),
            (f"{chunk:,} tokens at a time, and their gradients", format_bytes(parts))]  # fmt: skip
    return _table(("memory at the loss", "bytes"), rows)


def _tutorial() -> str:
    rows: dict[str, tuple[object, ...]] = {}
    for words in commands(PAGES / "tutorial.md"):
        if words[1] != "train" or "--dry-run" in words:
            continue
        name, job, layout = trained(words)
        messages = [one for one in collectives(job, layout) if one.what != "norm"]
        kinds = dict.fromkeys((one.axis, one.kind) for one in messages)
        counts = (f"{sum(one.count for one in messages if (one.axis, one.kind) == kind)} {kind[1]} ({kind[0]})"
                  for kind in kinds)  # fmt: skip
        row = (f"`{name}`", layout.world_size, format_bytes(states(estimate(job, layout).memory[0])),
               volume(sent(messages, *{one.axis for one in messages})), ", ".join(counts) or "-")  # fmt: skip
        rows.setdefault(name, row)  # a resumed run with another layout is listed with its first one
    return _table(("run", "ranks", "states of rank 0", "sent by it a step", "messages a step (axis)"), rows.values())


if __name__ == "__main__":
    computed = tables()
    for file in sorted(PAGES.glob("*.md")):
        file.write_text(refreshed(file.read_text(encoding="utf-8"), computed), encoding="utf-8")
