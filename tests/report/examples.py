"""Jobs and hand-made estimates with round numbers, for tests of reports on plans."""

from dataclasses import replace
from typing import Any

from kumi.plan.estimates import Collective, Estimate, MemoryEstimate, StageEstimate
from kumi.plan.pipeline.timeline import Timeline, simulate
from kumi.plan.report import Report, StandardLayout
from kumi.spec import families
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.schedule import actions, stage_assignment

GIB = 2**30
LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
H100 = Device(
    "H100", "cuda", 80 * GIB, ("float32", "bfloat16"), (("bfloat16", 1e15), ("float32", 67e12)), 3.35e12, processors=132
)
LINKS = (Link("NVLink", 8, 450e9, 3e-6), Link("InfiniBand", 1 << 30, 50e9, 10e-6))

CHOSEN = Layout(pp=4, dp_shard=2, tp=8, zero=1, recompute="selective")
SHARDED = Layout(dp_shard=64, zero=3, recompute="full")


def job(nodes: int = 8, sequences: int = 128, links: tuple[Link, ...] = LINKS, **config: int) -> Job:
    """Return Llama-3 70B with the changes in `config`, on `nodes` nodes of 8 H100, in sequences of 8192 tokens."""
    cluster = ClusterSpec("test", H100, 8, nodes, links=links if nodes > 1 else links[:1])
    model = families.from_hf(LLAMA_70B | config)
    return Job(model, cluster, BatchSpec(8192, 8192 * sequences), PRECISIONS["bf16"], Optim())


def one_device(**config: int) -> Job:
    """Return `job` on a single H100 without links."""
    made = job(nodes=1, **config)
    return replace(made, cluster=replace(made.cluster, devices_per_node=1, links=()))


def memory(**gib: float) -> MemoryEstimate:
    """Memory by kind from GiB."""
    kinds = {
        "params": 0.0,
        "grads": 0.0,
        "optimizer": 0.0,
        "gathered": 0.0,
        "weights": 0.0,
        "activations": 0.0,
        "head": 0.0,
    } | gib
    return MemoryEstimate(**{kind: int(value * GIB) for kind, value in kinds.items()})


def estimate(
    layout: Layout, time: dict[str, float], stages: tuple[MemoryEstimate, ...], collectives: tuple[Collective, ...] = ()
) -> Estimate:
    """An estimate of 1,048,576 tokens a step, its length the sum of `time`, on devices with 72 GiB usable."""
    seconds, tokens = sum(time.values()), 128 * 8192
    return Estimate(
        layout,
        stages,
        72 * GIB,
        seconds,
        tuple(time.items()),
        _stages(layout, time),
        collectives,
        tokens,
        layout.world_size,
        6 * 70e9 * tokens,
        1e15,
        0.08,
    )


def _stages(layout: Layout, time: dict[str, float]) -> tuple[StageEstimate, ...]:
    each, micro = 80 // layout.pp, 128 / layout.dp / layout.microbatch
    forward, backward = time["forward"] / micro, time["backward"] / micro
    return tuple(
        StageEstimate(rank, rank * each, (rank + 1) * each, forward, backward / 2, backward / 2)
        for rank in range(layout.pp)
    )


CHOSEN_STAGES = tuple(
    memory(
        params=4,
        grads=8,
        optimizer=12,
        weights=2,
        activations=24 - 5 * rank,
        head=3 * (rank == 3),
        buffers=1,
        reserved=4,
    )
    for rank in range(4)
)
CHOSEN_TRAFFIC = (
    Collective("all_gather", "tp", 8, 128e6, 2560, "forward", "sequence parts", "NVLink", 1.0, 0.6),
    Collective("reduce_scatter", "tp", 8, 128e6, 2560, "backward", "sequence parts", "NVLink", 1.0, 0.4),
    Collective("send", "pp", 4, 16e6, 128, "forward", "activations", "InfiniBand", 0.1, 0.0),
    Collective("reduce_scatter", "dp_shard", 2, 9e9, 1, "backward", "gradients", "InfiniBand", 0.12, 0.1),
)


def best(**fields: Any) -> Estimate:
    """TP 8 x PP 4 x ZeRO-1 over 2: 10 s a step, 55 GiB."""
    time = {
        "forward": 2.3,
        "backward": 4.6,
        "recompute": 0.3,
        "tp": 1.0,
        "cp": 0.0,
        "ep": 0.0,
        "pp": 0.0,
        "dp": 0.1,
        "bubble": 1.5,
        "optimizer": 0.2,
        "offload": 0.0,
        "host": 0.0,
    }
    return replace(estimate(CHOSEN, time, CHOSEN_STAGES, CHOSEN_TRAFFIC), **fields)


def sharded(dp: float = 4.3) -> Estimate:
    """FSDP over all 64, with full recomputation: 13 s a step when `dp` takes 4.3 s, 30 GiB."""
    time = {"forward": 2.1, "backward": 4.3, "recompute": 2.1, "tp": 0.0, "dp": dp, "bubble": 0.0, "optimizer": 0.2}
    stages = (memory(params=4, grads=4, optimizer=8, gathered=6, activations=4, head=2, reserved=2),)
    traffic = (
        Collective("all_gather", "dp_shard", 64, 141e9, 4, "forward", "parameters", "InfiniBand", 2.9, 2.3),
        Collective("reduce_scatter", "dp_shard", 64, 282e9, 2, "backward", "gradients", "InfiniBand", 3.0, 2.0),
    )
    return estimate(SHARDED, time, stages, traffic)


def copies() -> Estimate:
    """DDP, which needs 1,100 GiB."""
    time = {"forward": 2.0, "backward": 4.0, "dp": 2.0, "optimizer": 1.0}
    stages = (memory(params=263, grads=263, optimizer=526, activations=48),)
    return estimate(Layout(dp_replicate=64), time, stages)


def runner_up(name: str, seconds: float, layout: Layout, **gib: float) -> Estimate:
    """`best` with `seconds` more of the kind of time `name`, as the estimate of `layout`."""
    time = dict(best().time)
    time[name] += seconds
    stages = tuple(memory(**gib) for _ in range(layout.pp)) if gib else CHOSEN_STAGES
    return estimate(layout, time, stages, CHOSEN_TRAFFIC)


def timeline(microbatches: int = 64, schedule: str = "1f1b", stages: int = 1) -> Timeline:
    """Four ranks with 10 ms a forward, 12 ms a gradient of inputs, 8 ms of weights, and 1 ms to send."""
    lists, assignment = actions(schedule, 4, stages, microbatches), stage_assignment(schedule, 4, stages)
    return simulate(lists, assignment, [(0.010, 0.012, 0.008)] * (4 * stages), 0.001)


def report() -> Report:
    """A report with something of everything but a timeline."""
    near = runner_up("bubble", 0.4, replace(CHOSEN, microbatch=2))
    far = runner_up("tp", 2.0, replace(CHOSEN, pp=2, dp_shard=4), params=8, activations=50)
    return Report(
        job(),
        best(),
        others=(near, far, sharded()),
        expected=(
            StandardLayout("DDP (a full replica per device)", Layout(dp_replicate=64), estimate=copies()),
            StandardLayout("FSDP (ZeRO-3) over all devices", SHARDED, estimate=sharded()),
            StandardLayout("TP in nodes, FSDP across", Layout(tp=16), ("tp=16 does not divide 8 heads; use 8",)),
        ),
        searched=12345,
        fitting=678,
        front=(best(), far, sharded()),
        lacking=(runner_up("bubble", -1.0, replace(CHOSEN, recompute="none"), params=40, activations=40),),
    )
