"""Convert a published run to the planner's input, a job and a layout, with the measured seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from planner_clusters import cluster_of, devices_of_node
from planner_defaults import GLOBAL_BATCH_OF, RECOMPUTE_OF, SC21_MICRO_BATCH, SC21_STAGES, engine_of, first, zero_of
from planner_flops import measured_seconds, model_flops, repeated_flops
from planner_models import model_of, positions_of
from planner_rows import Run

from kumi.spec import ledger
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job
from kumi.spec.layout import RECOMPUTE, Layout
from kumi.spec.model import ModelSpec
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS, Precision

# Words of the precision column -> the planner's. Rounding recipes (rowwise, blocks of 32) are all "fp8".
PRECISION_OF = (
    (r"fp4", "nvfp4"),
    (r"fp8", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|half", "fp16"),
    (r"fp32|tf32|float32", "fp32"),
    # GPUs that have bfloat16 are trained in it, or in float16 at the same speed.
    (r"^$", "bf16"),
)
NVFP4 = Precision("nvfp4", compute="bfloat16", products="float4")


@dataclass(frozen=True)
class Case:
    """A run that can be scored: `seconds` of a step as measured, None where nobody says; `flops` with what is
    computed again, `model_flops` without, of all devices."""

    run: Run
    job: Job
    layout: Layout
    seconds: float | None
    flops: float
    model_flops: float
    choices: tuple[tuple[int, str], ...] = ()

    @property
    def tokens(self) -> int:
        return self.job.batch.tokens_per_step

    def choosing(self, microbatch: int, recompute: str) -> Case:
        """The same run with a microbatch and a kind of recomputation that its table does not give."""
        layout = replace(self.layout, microbatch=microbatch, recompute=recompute)
        return replace(self, layout=layout, flops=self.model_flops + repeated_flops(self.job, layout))


def case_of(run: Run, *, measured: bool = True) -> Case | str:
    """`run` as a case, or why it cannot be one; with `measured`, it must say how long a step took or what it held."""
    model = model_of(run)
    if isinstance(model, str):
        return model
    if not positions_of(run):
        return "seq_len: not given"
    run = replace(run, seq_len=positions_of(run))
    layout = layout_of(run)
    if isinstance(layout, str):
        return layout
    cluster = cluster_of(run, layout.world_size)
    if isinstance(cluster, str):
        return cluster
    precision = precision_of(run, cluster)
    if isinstance(precision, str):
        return precision
    layout, sequences = _batch(run, layout)
    layout = replace(layout, stage_layers=stage_layers_of(run, model, layout))
    batch = BatchSpec(run.seq_len, sequences * run.seq_len)
    job = Job(model, cluster, batch, precision, Optim(), engine_of(run))
    seconds = measured_seconds(run, job, layout)
    if model.lora is not None and not (run.seconds or run.tokens_per_s_per_gpu):
        # Tables differ in whether they count gradients of frozen weights.
        seconds = None
    if measured and seconds is None and run.memory is None:
        return "measured: no step time, tokens/s, TFLOP/s (but of adapters) or memory"
    flops = model_flops(job)
    return Case(run, job, layout, seconds, flops + repeated_flops(job, layout), flops, choices_of(run, job, layout))


def layout_of(run: Run) -> Layout | str:
    """The layout of a run, what it leaves out completed from defaults; or what does not add up."""
    engine = engine_of(run)
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    world = run.gpus or tp * pp * cp * (run.dp or 1)
    dp, rest = divmod(world, tp * pp * cp)
    if rest or dp < 1 or (run.dp is not None and run.dp != dp):
        return "layout: tp x pp x dp x cp is not the number of GPUs"
    zero = zero_of(run, engine, dp, max(1, devices_of_node(run) // (tp * cp)))
    if zero is None:
        return f"layout: sharding {run.sharding!r} is not known"
    stage, shard = zero[0], min(zero[1], dp)
    if engine.name.startswith("torchtitan") and pp > 1 and stage == 3:
        # With a pipeline, it frees no weights between microbatches and divides gradients after the last.
        stage = 1
    if dp % shard:
        return f"layout: {shard} sharing ranks do not divide dp={dp}"
    stages = _stages(run, pp)
    return Layout(
        pp=pp,
        dp_replicate=dp // shard if stage else dp,
        dp_shard=shard if stage else 1,
        cp=cp,
        tp=tp,
        ep=run.ep or 1,
        zero=stage,
        microbatch=stated_microbatch(run) or 1,
        recompute=stated_recompute(run) or "none",
        sequence_parallel=_sequence_parallel(run, engine.name, tp),
        schedule=_schedule(run, pp, stages),
        stages=stages,
    )


def stage_layers_of(run: Run, model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Layers of every stage where a trainer divides them otherwise than evenly; else empty."""
    engine, count, pp = engine_of(run).name, model.num_hidden_layers, layout.pp
    if pp == 1 or layout.stages > 1:
        return ()
    if engine == "nanotron":
        return _by_cost(model, pp)
    if engine == "megatron-deepspeed-bf16":
        # The embedding and the head each take the place of a layer.
        return tuple(size - (stage in (0, pp - 1)) for stage, size in enumerate(_filled(count + 2, pp)))
    return tuple(_filled(count, pp)) if engine == "megatron-deepspeed" and count % pp else ()


def _filled(count: int, pp: int) -> list[int]:
    """`count` pieces, as many to each stage as go up evenly, rounded up, until none are left."""
    each = -(-count // pp)
    counts = [min(each, max(0, count - each * stage)) for stage in range(pp)]
    return counts if min(counts) > 1 else [count // pp + (stage < count % pp) for stage in range(pp)]


def _by_cost(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """nanotron's division: a stage takes blocks until the costs so far pass its share of all; the embedding is free,
    the head costs its matrix (nanotron v0.5, models/base.py, models/llama.py)."""
    costs = [
        sum(param.numel for op in ledger.layer_ops(model, index) for param in op.params if len(param.dims) > 1)
        for index in range(model.num_hidden_layers)
    ]
    total, passed, stage, counts = sum(costs) + model.vocab_size * model.hidden_size, 0, 0, [0] * pp
    for cost in costs:
        counts[stage] += 1
        passed += cost
        if passed > total * (stage + 1) / pp and stage < pp - 1:
            stage += 1
    return tuple(counts)


def _stages(run: Run, pp: int) -> int:
    """Virtual stages: the column, SC'21's scripts, or two where the notes speak of an interleaved schedule.

    Megatron-Core's scaling runs overlap the pipeline's messages, which it does with virtual stages only; they are taken
    to be as small as in NVIDIA's recipes, up to 24 for each rank.
    """
    if pp == 1 or run.vpp:
        return run.vpp or 1
    if "2104.04473" in run.text:
        return SC21_STAGES.get(run.hidden or 0, 1)
    if "tp-comm-overlap" in run.text and run.layers and run.layers % pp == 0:
        return max(size for size in range(1, 25) if run.layers // pp % size == 0)
    return 2 if "interleaved" in run.text else 1


def _schedule(run: Run, pp: int, stages: int) -> str:
    if pp > 1 and stages > 1:
        return "zb-h1" if "zerobubble" in run.text else "interleaved"
    return "gpipe" if "gpipe" in run.text else "1f1b"


def stated_microbatch(run: Run) -> int | None:
    """The column; SC'21's scripts; the largest that fits, where the notes say so. None where there is nothing."""
    paper = SC21_MICRO_BATCH.get(run.hidden or 0) if "2104.04473" in run.text else None
    largest = re.search(r"max micro batch that fits = (\d+)", run.text)
    return run.micro_batch or paper or (int(largest.group(1)) if largest else None)


def choices_of(run: Run, job: Job, layout: Layout) -> tuple[tuple[int, str], ...]:
    """(microbatch, recomputation) that a run may have had where it does not say, the likeliest first; empty where it
    says both. Without a pipeline, microbatches are as large as fits; and no more is computed again than must be."""
    stated = stated_recompute(run)
    again = (stated,) if stated is not None else RECOMPUTE
    sizes: tuple[int, ...] = (layout.microbatch,)
    if stated_microbatch(run) is None and layout.pp == 1 and run.global_batch:
        share = job.batch.sequences // layout.dp
        sizes = tuple(size for size in (16, 8, 4, 2, 1) if share % size == 0)
    if len(sizes) * len(again) == 1:
        return ()
    return (*((size, again[0]) for size in sizes), *((sizes[-1], how) for how in again[1:]))


def stated_recompute(run: Run) -> str | None:
    """What a run computes again, by its column or its text; None where they say nothing."""
    words = {"none": "none", "full": "full", "selective": "selective"}
    return words.get(run.recompute) or first(RECOMPUTE_OF, run.text)


def _sequence_parallel(run: Run, engine: str, tp: int) -> bool:
    """The column; else off in Megatron before 2022 and its fork with DeepSpeed, which do not have it."""
    default = engine != "megatron-lm-2021" and not engine.startswith("megatron-deepspeed")
    return tp > 1 and (default if run.sp is None else run.sp)


def _batch(run: Run, layout: Layout) -> tuple[Layout, int]:
    """(layout, sequences in a step): where the global batch is blank, the local batch of the notes, else a microbatch
    for every data-parallel rank, four for each stage of a pipeline. A microbatch is no larger than a rank's share."""
    local = re.search(r"local batch (\d+)", run.text)
    if local and layout.pp > 1 and not run.micro_batch:
        # torchtitan cuts a rank's batch into as many microbatches as there are stages' ranks.
        layout = replace(layout, microbatch=max(1, int(local.group(1)) // layout.pp))
    units = 4 * layout.pp if layout.pp > 1 else 1
    stated = run.global_batch or (first(GLOBAL_BATCH_OF, run.text) if run.dp else None)
    sequences = stated or layout.dp * (int(local.group(1)) if local else layout.microbatch * units)
    return replace(layout, microbatch=max(1, min(layout.microbatch, sequences // layout.dp))), sequences


def precision_of(run: Run, cluster: ClusterSpec) -> Precision | str:
    """The number formats of a run; or that its device has them not."""
    name = first(PRECISION_OF, run.precision)
    if name is None:
        return f"precision: {run.precision!r} is not known"
    precision = NVFP4 if name == "nvfp4" else PRECISIONS[name]
    if not cluster.device.peak_flops(precision.matmul_dtype):
        return f"precision: no peak FLOP/s of {cluster.device.name} in {precision.matmul_dtype}"
    return precision
