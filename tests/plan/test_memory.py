"""Worked examples of memory from papers and guides, published readings, and relations between layouts."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from kumi.plan.engines import ENGINES
from kumi.plan.estimates import MemoryEstimate
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.memory.activations import model_activations
from kumi.plan.memory.device_memory import (
    ALLOCATOR_OVERHEAD,
    host_memory,
    memory_reading,
    num_microbatches,
    rank_memory,
    stage_memory,
    usable_memory,
)
from kumi.plan.memory.process import HEAP_OVERHEAD, process_bytes
from kumi.plan.memory.states import rank_params, resident_state_bytes
from kumi.plan.pipeline.stages import rank_stages
from kumi.spec.cluster import Device
from kumi.spec.engine import KUMI, Engine
from kumi.spec.layout import OFFLOAD, RECOMPUTE, Layout
from kumi.spec.ledger import num_params
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.numerics import Numerics
from kumi.spec.optim import Optim
from planned import job_of, share_of

GIB = 2**30
ROPE = Rope(500000.0)
LAYER = LayerSpec(Attention(32, 8, 128, ROPE), MLP(14336))
LLAMA_8B = ModelSpec("llama", 128256, 4096, (LAYER,) * 32, 1e-5, 8192)
LLAMA_70B = ModelSpec("llama", 128256, 8192, (LayerSpec(Attention(64, 8, 128, ROPE), MLP(28672)),) * 80, 1e-5, 8192)
SPARSE = ModelSpec("moe", 32000, 2048, (LayerSpec(Attention(16, 4, 128, ROPE), MoE(64, 8, 1024)),) * 8, 1e-5, 4096)


def gpt(layers, hidden, heads, vocab=51200):
    """A GPT as in Megatron-LM: LayerNorm, biases, one activation of width 4 h."""
    attention = Attention(heads, heads, hidden // heads, None, qkv_bias=True, out_bias=True)
    layer = LayerSpec(attention, MLP(4 * hidden, bias=True, hidden_act="gelu_new", gated=False))
    return ModelSpec("gpt", vocab, hidden, (layer,) * layers, 1e-5, 2048, norm="layernorm", learned_positions=2048)


# Float16 with dropout, materialized scores, and selective recomputation of attention.
KORTHIKANTI = replace(ENGINES["megatron-lm-2021"], selective="attention")


def states_of(job, layout):
    """Return the bytes of states on rank 0 per parameter of the model."""
    x, part = share_of(job, layout)
    return float(
        sum(size[0] for size in resident_state_bytes(job, x, rank_params(job, x, part)).values())
    ) / num_params(job.model)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 560), (1, 315), (2, 192.5), (3, 70)])
def test_llama_70b_in_pure_bfloat16_on_eight_gpus(zero, gigabytes):
    engine = replace(ENGINES["deepspeed"], grad_itemsize=2)
    layout = Layout(dp_replicate=8) if zero == 0 else Layout(dp_shard=8, zero=zero)
    result = states_of(job_of(LLAMA_70B, kind="bf16-pure", engine=engine), layout)
    assert 70 * result == pytest.approx(gigabytes, rel=1e-4)


@pytest.mark.parametrize(
    ("engine", "each"),
    [(KUMI, 16), (ENGINES["megatron-lm"], 18), (ENGINES["megatron-bridge"], 16), (ENGINES["nanotron"], 20)],
)
def test_bytes_a_parameter_of_mixed_precision(engine, each):
    assert states_of(job_of(LLAMA_8B, engine=engine), Layout(dp_replicate=8)) == pytest.approx(each, rel=1e-5)


@pytest.mark.parametrize("shards", [4, 64])
def test_the_distributed_optimizer_keeps_six_bytes_and_divides_twelve(shards):
    result = states_of(job_of(LLAMA_8B, engine=ENGINES["megatron-lm"]), Layout(dp_shard=shards, zero=1))
    assert result == pytest.approx(6 + 12 / shards, rel=1e-3)


@pytest.mark.parametrize(("kind", "each"), [("adamw", 8), ("adamw-8bit", 2.03125), ("muon", 4.5229), ("sgd", 4)])
def test_states_of_optimizers(kind, each):
    job = job_of(LLAMA_8B, optim=Optim(kind=kind))
    assert states_of(job, Layout()) - 8 == pytest.approx(each, rel=1e-3)


def saved_by_layer(model, layout, *, engine, how="none", kind="fp16", seq_len=2048):
    """Return the bytes per token and hidden element that a layer saves."""
    result = model_activations(
        job_of(model, kind=kind, engine=engine, seq_len=seq_len), batch_layouts([layout])
    ).layers[0]
    return float(getattr(result, how)[0]) / model.hidden_size


TP, SP = Layout(tp=8, sequence_parallel=False), Layout(tp=8)
GPT_22B = gpt(48, 6144, 64)
SCORES = 5 * 64 * 2048 / 6144  # 5as/h


@pytest.mark.parametrize(
    ("layout", "how", "published"),
    [
        (Layout(), "none", 34 + SCORES),
        (Layout(), "selective", 34),
        (Layout(), "full", 2),
        (TP, "none", 10 + 24 / 8 + SCORES / 8),
        (SP, "none", (34 + SCORES) / 8),
        (SP, "selective", 34 / 8),
        (TP, "full", 2),
        (SP, "full", 2 / 8),
    ],
)
def test_korthikanti_table_2(layout, how, published):
    """Bytes of a GPT layer in units of sbh (arXiv:2205.05198), which leave out the norms' statistics."""
    assert saved_by_layer(GPT_22B, layout, engine=KORTHIKANTI, how=how) == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "microbatch", "pp", "stages", "plain", "selective"),
    [
        (GPT_22B, 4, 1, 1, 59.25, 9.5625),
        (gpt(96, 12288, 96), 1, 8, 3, 66.84375, 12.3515625),
        (gpt(105, 20480, 128), 1, 35, 3, 114.0234375, 23.076171875),
        (gpt(128, 25600, 160), 1, 64, 1, 131.25, 26.5625),
    ],
)
def test_korthikanti_figure_1(model, microbatch, pp, stages, plain, selective):
    """GiB of activations on a GPU of the first stage, with TP only and with SP and selective recomputation."""
    job = job_of(model, kind="fp16", engine=KORTHIKANTI, sequences=280)
    schedule = "interleaved" if stages > 1 else "1f1b"
    for parallel, how, published in ((False, "none", plain), (True, "selective", selective)):
        layout = Layout(
            pp=pp,
            tp=8,
            microbatch=microbatch,
            sequence_parallel=parallel,
            recompute=how,
            schedule=schedule,
            stages=stages,
        )
        x, part = share_of(job, layout)
        each = getattr(model_activations(job, x).layers[0], how)[0]
        result = microbatch * 2048 * each * part.layers[0, 0] * part.in_flight[0]
        assert result / GIB == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "percents"),
    [
        (GPT_22B, (66.84, 49.42, 16.18, 7.64)),
        (gpt(96, 12288, 96), (62.04, 56.53, 18.49, 8.71)),
        (gpt(105, 20480, 128), (58.31, 62.04, 20.27, 9.42)),
        (gpt(128, 25600, 160), (58.31, 62.04, 20.27, 9.42)),
    ],
)
def test_korthikanti_figure_7(model, percents):
    """Percent of the activations with TP alone: with SP, with selective recomputation, with both, with full."""
    layouts = ((SP, "none"), (TP, "selective"), (SP, "selective"), (TP, "full"))
    whole = saved_by_layer(model, TP, engine=KORTHIKANTI)
    result = [100 * saved_by_layer(model, layout, engine=KORTHIKANTI, how=how) / whole for layout, how in layouts]
    assert result == pytest.approx(percents, rel=1.2e-2)


def test_llama_8b_keeps_34_to_41_bytes_a_hidden_element():
    """Fused grouped-query attention and a gated MLP: 12 + 4r bytes, and per MLP column 6 with fused kernels, else 8."""
    fused = saved_by_layer(LLAMA_8B, Layout(), engine=ENGINES["megatron-lm"])
    eager = saved_by_layer(LLAMA_8B, Layout(), engine=replace(ENGINES["megatron-lm"], autograd=("gate",)))
    assert (fused, eager) == (pytest.approx(34, abs=0.1), pytest.approx(41, abs=0.1))


def test_sixteen_bytes_a_hidden_element_undercount_two_to_four_times():
    """The guides' batch x seq x hidden x layers x 16, and their 80 GB for a 70B at 2,048 tokens, about 1 GB a layer."""
    rule = 16 * 2048 * 8192 * 80
    for engine in (ENGINES["megatron-lm"], ENGINES["nanotron"]):
        result = 2048 * 8192 * 80 * saved_by_layer(LLAMA_70B, Layout(), engine=engine)
        assert 2 < result / rule < 4
        assert 40e9 < result < 80e9


# torchtitan's documents of December 2024: GiB reserved, Llama 3.1 8B with FSDP, 2 x 8,192 tokens a GPU.
TITAN = [(8, "eager", 82.4), (8, "compiled", 77.0), (128, "eager", 67.0), (128, "compiled", 62.0)]


@pytest.mark.parametrize(("shards", "kernels", "read"), TITAN)
def test_reserved_memory_of_torchtitan(shards, kernels, read):
    engine = replace(ENGINES["torchtitan-2024"], kernels=kernels)
    layout = Layout(dp_shard=shards, zero=3, microbatch=2, recompute="selective")
    job = job_of(LLAMA_8B, seq_len=8192, sequences=2 * shards, engine=engine)
    assert memory_reading(job, layout, "reserved") / GIB == pytest.approx(read, rel=0.04)


def test_readings_show_ever_less():
    job = job_of(LLAMA_8B, device=replace(job_of(LLAMA_8B).cluster.device, reserved=GIB))
    layout = Layout(tp=2, dp_shard=4, zero=3)
    everything, reserved, allocated = (
        memory_reading(job, layout, how) for how in ("nvidia-smi", "reserved", "allocated")
    )
    result = rank_memory(job, layout)
    assert everything == result.total
    assert everything - reserved > GIB
    states = result.params + result.grads + result.optimizer
    assert reserved - allocated == pytest.approx(ALLOCATOR_OVERHEAD["eager"] * (allocated - states), rel=1e-6)


def random_layouts(count):
    """Yield random layouts from a fixed seed, legal or not."""
    draw = np.random.default_rng(3)

    def choose(*values):
        return values[draw.integers(len(values))]

    for _ in range(count):
        zero = int(choose(0, 1, 2, 3))
        shard = 1 if zero == 0 else int(choose(2, 4, 16))
        yield Layout(
            pp=int(choose(1, 2, 4)),
            dp_replicate=int(choose(1, 2)),
            dp_shard=shard,
            cp=int(choose(1, 2)),
            tp=int(choose(1, 2, 8)),
            ep=int(choose(1, 2)),
            zero=zero,
            microbatch=int(choose(1, 2)),
            recompute=str(choose(*RECOMPUTE)),
            recompute_layers=choose(None, 1, 2),
            sequence_parallel=bool(choose(True, False)),
            offload=str(choose(*OFFLOAD)),
            schedule=str(choose("1f1b", "gpipe", "zb-h1")),
        )


@pytest.mark.parametrize("engine", [KUMI, ENGINES["nanotron"], ENGINES["megatron-deepspeed"]])
@pytest.mark.parametrize("model", [LLAMA_8B, SPARSE])
def test_many_layouts_at_once_are_each_by_itself(model, engine):
    layouts, job = list(random_layouts(60)), job_of(model, engine=engine)
    x = batch_layouts(layouts)
    part = rank_stages(model, x, np.zeros(len(x), np.int64), num_microbatches(job, x))
    result, hosts = stage_memory(job, x, part), host_memory(job, x, part)
    # The other kinds are those of runs with rollouts.
    assert set(result) == set(asdict(MemoryEstimate(*[0] * 7))) - {"reference", "critic", "cache", "reward_models"}
    for index, layout in enumerate(layouts):
        alone, alone_share = share_of(job, layout)
        assert {kind: size[index] for kind, size in result.items()} == {
            kind: float(size[0]) for kind, size in stage_memory(job, alone, alone_share).items()
        }
        assert hosts[index] == host_memory(job, alone, alone_share)[0]
        assert all(size[index] >= 0 for size in result.values())


@pytest.mark.parametrize("axis", ["tp", "cp", "dp_shard", "ep"])
def test_a_longer_axis_needs_less(axis):
    engine = ENGINES["megatron-lm"]
    job = job_of(SPARSE, engine=engine, device=Device("GPU", "cuda", 0))
    base = {"dp_shard": 8, "zero": 1}
    totals = [rank_memory(job, Layout(**(base | {axis: degree}))).total for degree in (2, 4, 8)]
    assert totals == sorted(totals, reverse=True)


def test_recomputing_more_layers_keeps_less():
    job = job_of(LLAMA_8B, engine=ENGINES["megatron-lm"], seq_len=8192)
    totals = [
        rank_memory(job, Layout(tp=8, recompute="full", recompute_layers=count)).activations
        for count in (None, 24, 8, 0)
    ]
    assert totals == sorted(totals)
    none = rank_memory(job, Layout(tp=8, recompute="full", recompute_layers=32))
    assert none == rank_memory(job, Layout(tp=8, recompute="full"))


def test_offloaded_states_are_on_the_host_instead():
    job = job_of(LLAMA_8B, engine=ENGINES["deepspeed"])
    plain, optimizer, states = (Layout(dp_shard=8, zero=2, offload=what) for what in ("none", "optimizer", "states"))
    before, after, least = (rank_memory(job, layout) for layout in (plain, optimizer, states))
    hosts = [host_memory(job, *share_of(job, layout))[0] for layout in (plain, optimizer, states)]
    assert hosts == [0, before.optimizer, before.params + before.grads + before.optimizer]
    assert (after.optimizer, after.params) == (0, before.params)
    assert (least.params, least.grads, least.optimizer) == (0, 0, 0)
    assert 0 < least.gathered < before.params
    drives = host_memory(job, *share_of(job, replace(states, offload="states-nvme")))[0]
    assert 0 < drives < hosts[2] / 4


def test_offloaded_activations_leave_two_layers():
    job = job_of(LLAMA_8B, engine=ENGINES["megatron-lm"], seq_len=8192)
    layouts = [Layout(tp=8, recompute="none", offload=what) for what in ("none", "activations")]
    before, left = (rank_memory(job, layout).activations for layout in layouts)
    assert before - left == pytest.approx(host_memory(job, *share_of(job, layouts[1]))[0], rel=1e-3)
    assert left < 0.15 * before


def test_the_end_stages_hold_what_they_hold():
    """Only the last stage has logits, and with a tied head a copy of the table."""
    tied = replace(LLAMA_8B, tie_word_embeddings=True)
    job, layout = job_of(tied, engine=ENGINES["megatron-lm"]), Layout(pp=4, zero=0)
    first, middle, last = (rank_memory(job, layout, rank) for rank in (0, 1, 3))
    table = 2 * 128256 * 4096
    assert first.params - middle.params == table
    assert last.params - middle.params == pytest.approx(table, rel=1e-4)
    whole = rank_memory(job, Layout())
    assert whole.params == 2 * num_params(tied)
    assert first.activations > middle.activations > last.activations


def test_microbatches_in_flight_count():
    job = job_of(LLAMA_8B, engine=replace(ENGINES["megatron-lm"], logit_bytes=0.0))
    one_f_one_b, gpipe = (rank_memory(job, Layout(pp=4, schedule=schedule)) for schedule in ("1f1b", "gpipe"))
    assert gpipe.activations / one_f_one_b.activations == pytest.approx(64 / 4, rel=0.1)


def test_whole_logits_cost_as_many_times_as_ranks_cut_them():
    engine = Engine(kernels="fused", half_weights=True, logit_bytes=14.0)
    job = job_of(LLAMA_8B, engine=engine, seq_len=8192)
    engines = (engine, replace(engine, whole_logits=True))
    cut_once, whole = (rank_memory(replace(job, engine=trainer), Layout(tp=8, recompute="full")) for trainer in engines)
    assert whole.head == 14 * 8192 * 128256
    assert cut_once.head == whole.head / 8


def test_scores_that_are_held_grow_with_the_square_of_the_length():
    eager = replace(ENGINES["megatron-lm"], attention="eager")
    result = [saved_by_layer(LLAMA_8B, Layout(), engine=eager, seq_len=length, kind="bf16") for length in (1024, 2048)]
    assert result[1] - result[0] == 6 * 32 * 1024 / 4096


def test_a_cpu_keeps_kernels_for_every_size_of_a_block_and_modules():
    """Kernels are compiled for 16 bits only; PyTorch's flash kernel needs none; a ring has the keys of one rank."""
    model, cpu = LLAMA_8B, Device("", "cpu", 0)

    def reserved(kind="bf16", flash=(), seq_len=8192, **layout):
        job = replace(job_of(model, device=cpu, kind=kind, seq_len=seq_len), numerics=Numerics(flash=flash))
        return float(process_bytes(job, batch_layouts([Layout(**layout)]))[0])

    modules = reserved(kind="fp32")
    linear = reserved(flash=("bf16-long",)) - modules
    # Matrices of four shapes, the head, and three products of each.
    assert linear == 3 * 5 * 0.7 * 2**20
    assert reserved() - modules - linear == 3 * 40 * 0.7 * 2**20
    assert reserved(cp=8) - modules - linear == 3 * 16 * 0.7 * 2**20
    assert reserved(cp=8, context="ulysses") == reserved()


def test_the_heap_of_a_cpu_has_holes_between_transient_tensors():
    job = job_of(LLAMA_8B, device=Device("", "cpu", 0, reserved=1000))
    memory = rank_memory(job, Layout())
    transient = memory.gathered + memory.weights + memory.activations + memory.head + memory.buffers
    process = float(process_bytes(job, batch_layouts([Layout()]))[0])
    assert memory.reserved == pytest.approx(1000 + process + HEAP_OVERHEAD * transient, abs=2)


def test_an_estimate_may_fill_all_of_a_device_but_the_margin():
    device = Device("GPU", "cuda", 80 * GIB)
    assert usable_memory(replace(job_of(LLAMA_8B, device=device), margin=0.25)) == 60 * GIB
    assert 0.85 * 80 * GIB < usable_memory(job_of(LLAMA_8B, device=device)) < 0.98 * 80 * GIB
