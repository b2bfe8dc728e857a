"""The planner's estimates against measured figures and against layouts that guides recommend.

docs/worked-examples.md compares them. If an estimate misses a figure, its test states the error, and fails when that
changes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_jobs import planned

from kumi.plan.engines import ENGINES
from kumi.plan.estimate import estimate
from kumi.plan.memory.device_memory import ALLOCATOR_OVERHEAD
from kumi.plan.search.search_layouts import search
from kumi.spec.checks import illegal
from kumi.spec.cluster import Device, Link
from kumi.spec.layout import Layout

# Recommended layouts on p5 instances


def guided(model, nodes, seq_len, guide, within):
    """Return the best layout, and the fastest with the guide's degrees. It must take at most `within` times as long."""
    task = planned(model, "aws-p5", nodes, seq_len, 4 * 2**20 // seq_len)
    lean = {"cp": 1, "dp_replicate": 1, "offload": "none"}
    best = search(task, lean, top=1).plans[0]
    theirs = search(task, lean | guide, top=1).plans
    assert theirs, f"{guide} does not fit"
    assert theirs[0].step_seconds <= within * best.step_seconds
    return best.layout, theirs[0].layout


def test_a_7b_on_p5_is_data_parallel():
    for nodes in (1, 4):
        best, theirs = guided("llama-2-7b", nodes, 4096, {"tp": 1, "pp": 1}, 1.0 + 1e-9)
        assert (best.tp, best.pp) == (theirs.tp, theirs.pp) == (1, 1)
        assert best.zero >= 1


def test_a_13b_on_p5_is_data_parallel_and_fully_sharded():
    best, _ = guided("llama-2-13b", 1, 4096, {"tp": 1, "pp": 1}, 1.05)
    assert (best.tp, best.pp, best.zero) == (1, 1, 3)


def test_a_70b_on_32_devices_fits_as_tp_8_x_fsdp_4_and_is_faster_with_less_tensor_parallelism():
    best, theirs = guided("llama-3-70b", 4, 8192, {"tp": 8, "pp": 1, "zero": 3}, 1.35)
    assert (theirs.tp, theirs.dp_shard) == (8, 4)
    assert best.tp < 8


def test_a_405b_on_256_devices_fits_as_tp_8_x_pp_4_only_with_zero_3():
    """The guide's TP 8, PP 4, DP 8 with only the optimizer states sharded needs more than 80 GB."""
    task = planned("llama-3.1-405b", "aws-p5", 32, 8192, 512)
    megatron = Layout(tp=8, pp=4, dp_shard=8, zero=1, recompute="full", schedule="1f1b")
    assert not illegal(task.model, megatron, task.cluster, task.batch)
    assert not estimate(task, megatron).fits
    assert estimate(task, replace(megatron, zero=3)).fits


def test_a_405b_on_1024_devices_fits_as_tp_8_x_pp_16_x_dp_8():
    task = planned("llama-3.1-405b", "aws-p5", 128, 8192, 512)
    theirs = search(task, {"tp": 8, "pp": 16, "cp": 1, "dp_replicate": 1, "zero": 1, "offload": "none"}, top=1).plans[0]
    assert theirs.layout.dp_shard == 8
    sharded = estimate(task, Layout(tp=2, dp_shard=512, zero=3, recompute="full"))
    assert sharded.fits
    assert 0.7 < theirs.step_seconds / sharded.step_seconds < 1.4


# Llama 3 405B as it was trained (arXiv:2407.21783, table 4): layout, and the published share of the peak.
META = [
    (8192, 8192, Layout(tp=8, pp=16, dp_shard=64, zero=1), 0.43),
    (16384, 8192, Layout(tp=8, pp=16, dp_shard=128, zero=1), 0.41),
    (16384, 131072, Layout(tp=8, cp=16, pp=16, dp_shard=8, zero=1), 0.38),
]


def meta(devices, seq_len, layout, recompute):
    """Return the estimate of a row of the table: 16 M tokens per step, eight stages per rank (not in the paper)."""
    task = planned(
        "llama-3.1-405b",
        "h100-sxm",
        devices // 8,
        seq_len,
        2**24 // seq_len,
        network="roce-3200",
        engine=ENGINES["torchtitan"],
    )
    return estimate(task, replace(layout, schedule="interleaved", stages=8, recompute=recompute))


@pytest.mark.parametrize(("devices", "seq_len", "layout", "published"), META)
def test_llama_3_405b_as_it_was_trained(devices, seq_len, layout, published):
    """Without recomputation, as in the paper.

    In the paper it fits because tensors are freed early and fewer microbatches are in flight; with the planner's
    schedules it does not fit. Attention is counted in full, more than half of the work at 131,072 tokens; the paper
    does not state how it counts.
    """
    result = meta(devices, seq_len, layout, "none")
    assert result.mfu == pytest.approx(published, rel=0.1)
    assert not result.fits
    lean = meta(devices, seq_len, layout, "selective")
    assert lean.fits
    assert lean.mfu == pytest.approx(published, rel=0.2)


def with_contiguous(result, count):
    """Return the peak bytes of `result` if `count` microbatches, not pp, pass through a stage before the next stage.

    A rank of the interleaved schedule then has (stages - 1) x count + 2 (pp - 1 - rank) + 1 microbatches of a stage in
    flight. The allocator's overhead falls with the activations.
    """
    layout, peaks = result.layout, []
    for rank, memory in enumerate(result.memory):
        usual, fewer = ((layout.stages - 1) * number + 2 * (layout.pp - 1 - rank) + 1 for number in (layout.pp, count))
        freed = memory.activations * (1 - fewer / usual)
        peaks.append(memory.total - freed * (1 + ALLOCATOR_OVERHEAD["compiled"]))
    return max(peaks)


@pytest.mark.parametrize(("devices", "seq_len", "layout", "published"), META)
def test_llama_3_405b_fits_with_few_contiguous_microbatches(devices, seq_len, layout, published):
    """The paper's schedule takes any number of contiguous microbatches; it does not say which number was used."""
    result, device = meta(devices, seq_len, layout, "none"), 80e9
    assert with_contiguous(result, layout.pp) == pytest.approx(result.peak_memory)
    assert with_contiguous(result, 4) < device < with_contiguous(result, 6)


# Llama 2 on ABCI: nodes of eight A100-40GB with four cards of InfiniBand HDR


# Megatron-LM of 2023 as the authors ran it: eager norms, rotary embeddings and gated activations, FlashAttention-2
# (which selective recomputation does not affect), no overlap of communication. Read in rioyokotalab/Megatron-Llama2:
# scripts/abci/*/llama-2-*-dp*-tp*-pp*.sh and megatron/model/transformer.py.
SWALLOW = replace(
    ENGINES["megatron-lm"],
    name="Megatron-LM of 2023",
    kernels="eager",
    attention="flash",
    autograd=("norm", "gate"),
    overlap_grads=False,
    overlap_params=False,
    overlap_pp=False,
)
# The authors' fork of llama-recipes: FSDP1 around transformers' blocks, activations checkpointed (kotoba-tech/
# kotoba-recipes, scripts/abci/*b/*.sh).
RECIPES = replace(ENGINES["accelerate-fsdp"], name="llama-recipes")
# Without any overlap: the slowest that FSDP can be.
IN_TURN = replace(RECIPES, overlap_grads=False, overlap_params=False)
ABCI = {
    "llama-2-7b": (64, Layout(tp=2, pp=2, dp_shard=16, zero=1), 134, 4, 134),
    "llama-2-13b": (64, Layout(tp=2, pp=4, dp_shard=8, zero=1), 143, 4, 135),
    "llama-2-70b": (256, Layout(tp=8, pp=8, dp_shard=4, zero=1), 158, 1, 87),
}


def printed_flops(model, tokens, seq_len, *, megatron):
    """Return the FLOPs of a step as the authors' programs count them.

    The script for the Megatron figures of their paper (okoge-kaz/swallow-project-parper-graph, flops-7b.py and others)
    counts query, key and value without grouped queries, and attention twice in one layer instead of once in every
    layer. The log of their FSDP runs counts two matrices of the MLP instead of three, and recomputation.
    """
    hidden, layers, vocab = model.hidden_size, model.num_hidden_layers, model.vocab_size
    layer = model.layers[0]
    ffn = layer.mlp.intermediate_size
    if megatron:
        groups = layer.attention.num_attention_heads // layer.attention.num_key_value_heads
        matrices = (8 + 6 * ffn / hidden) * layers * hidden**2
        return 3 * tokens * (matrices + 2 * 4 * seq_len * hidden / groups + 2 * hidden * vocab)
    matrices = (8 + 4 * ffn / hidden) * layers * hidden**2
    return 4 * tokens * matrices * (1 + seq_len / (6 * hidden) + vocab / (16 * layers * hidden))


def abci(name, engine, layout):
    """Return TFLOP/s per device as the authors' program would print it for the estimated step."""
    devices = ABCI[name][0]
    task = planned(name, "abci-a", devices // 8, 4096, 1024, engine=engine)
    result = estimate(task, layout)
    assert result.peak_memory <= task.cluster.device.memory, "it ran, though one estimate exceeds the default margin"
    flops = printed_flops(task.model, task.batch.tokens_per_step, 4096, megatron=engine is SWALLOW)
    return flops / result.step_seconds / devices / 1e12


def three_d(name):
    return abci(name, SWALLOW, ABCI[name][1])


def sharded(name, engine=RECIPES):
    devices, microbatch = ABCI[name][0], ABCI[name][3]
    return abci(name, engine, Layout(dp_shard=devices, zero=3, microbatch=microbatch, recompute="full"))


@pytest.mark.parametrize("name", ABCI)
def test_llama_2_on_abci_with_3d_parallelism(name):
    """Published: 134, 143 and 158 TFLOP/s per device; each estimate is within 12 %."""
    assert three_d(name) == pytest.approx(ABCI[name][2], rel=0.12)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b"])
def test_llama_2_on_abci_with_fsdp(name):
    """Published: 134 and 135 TFLOP/s per device; each estimate is within 12 %."""
    assert sharded(name) == pytest.approx(ABCI[name][4], rel=0.12)


def test_the_70b_with_fsdp_on_abci_is_not_explained():
    """Published: 87 TFLOP/s per device. Even without any overlap, the estimate is a third above.

    The authors' script for it also offloaded the weights to the host, on another number of devices.
    """
    slowest = sharded("llama-2-70b", IN_TURN)
    assert 1.2 * 87 < slowest < 1.6 * 87
    assert sharded("llama-2-70b") > slowest


def test_the_order_of_the_six_figures_on_abci():
    """3D parallelism gains with size, and FSDP without overlap loses.

    FSDP with overlap, as in other published runs, does not agree with the fall from 135 to 87.
    """
    figures = {("3d", name): three_d(name) for name in ABCI} | {("fsdp", name): sharded(name, IN_TURN) for name in ABCI}
    published = {("3d", name): row[2] for name, row in ABCI.items()} | {
        ("fsdp", name): row[4] for name, row in ABCI.items()
    }
    for faster, first in published.items():
        for slower, second in published.items():
            if first > 1.02 * second:
                assert figures[faster] > figures[slower], (faster, slower)


# Several sites joined by an optical link of 100 Gb/s, or by a link like the internet


# The link that makes two sites take 4.7 times as long: the source describes it as TCP.
LIKE_THE_INTERNET = """
name = "TCP between sites"
per = "site"
bandwidth = "0.79 Gb/s"
latency = "10 ms"
efficiency = 1.0
sources = { "bandwidth, latency, efficiency" = "assumed: such that two sites take 4.7 times the time of one" }
"""
SIDE_BY_SIDE = """
name = "100 Gb/s between two machines"
per = "node"
bandwidth = "100 Gb/s"
latency = "10 us"
efficiency = 0.9
sources = { "bandwidth, latency, efficiency" = "assumed: RDMA, as over the optical link, without the distance" }
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Return `ratio(count, link)`: the step time at `count` sites over that of the same machines at one site.

    The model is Llama-2-7B, with one pipeline stage on two H100 per site.
    """
    folder = tmp_path_factory.mktemp("links")
    files = {name: folder / f"{name}.toml" for name in ("tcp", "near")}
    files["tcp"].write_text(LIKE_THE_INTERNET)
    files["near"].write_text(SIDE_BY_SIDE)

    def seconds(count, **section):
        task = planned(
            "llama-2-7b", "h100-sxm", count, 4096, 192, engine=ENGINES["megatron-bridge"], devices_per_node=2, **section
        )
        result = estimate(task, Layout(tp=2, pp=count, recompute="selective"))
        assert result.fits
        return result.step_seconds

    def ratio(count, link):
        link = str(files.get(link, link))
        return seconds(count, sites=count, site_link=link) / seconds(count, network=str(files["near"]))

    return ratio


def test_sites_joined_by_an_optical_link_are_as_good_as_one(sites):
    """Published: 1.005 (1.006 in the announcement) for two sites 40 km apart, 1.1 for three."""
    assert sites(2, "optical-100g") == pytest.approx(1.005, abs=0.005)
    assert 1.0 < sites(3, "optical-100g") < 1.1


def test_sites_joined_by_something_like_the_internet_are_not(sites):
    """Published: 4.7 times for two sites and 9.2 for three. One description of the link gives both within 15 %."""
    assert sites(2, "tcp") == pytest.approx(4.7, rel=0.05)
    assert sites(3, "tcp") == pytest.approx(9.2, rel=0.15)
    # kumi's own preset of the internet is ten times as fast.
    assert 1.2 < sites(2, "internet") < 2.5


# Headline figures of picotron, which has its own kernels and fused attention

SMOLLM = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 24,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def test_picotron_s_figures_lie_between_op_by_op_and_compiled_kernels():
    """50 % MFU of SmolLM-1.7B on 8 H100, 38 % of Llama-2-7B on 64; layouts and batches are not printed."""
    jobs = [planned(SMOLLM, "h100-sxm", 1, 2048, 512, engine=ENGINES[name]) for name in ("nanotron", "torchtitan")]
    slow, fast = (search(task, {"dp_replicate": 8}, top=1).plans[0].mfu for task in jobs)
    assert slow < 0.50 < 1.05 * fast
    task = planned("llama-2-7b", "h100-sxm", 8, 4096, 1024, engine=ENGINES["nanotron"])
    tp4 = estimate(task, Layout(tp=4, dp_shard=16, zero=1)).mfu
    dp64 = estimate(task, Layout(dp_shard=64, zero=2, microbatch=2)).mfu
    assert tp4 < 0.38 < dp64


# gpt2 on two TITAN RTX, 200 steps of 2 x 4 sequences of 1,024 tokens in float32 (transformers' page on several GPUs)


TITAN = Device(
    "NVIDIA TITAN RTX",
    "cuda",
    24 << 30,
    ("float32",),
    (("float32", 16.3e12),),
    672e9,
    0.85,
    (("", 0.85),),
    processors=72,
    reserved=1 << 30,
)
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def test_gpt2_on_two_devices_with_and_without_nvlink():
    """Published: 101.9 s with NVLink, 131.4 s without. Each estimate is within 20 %, but not the gap.

    In the estimate, an all-reduce of 0.5 GB over PCIe overlaps with the backward pass. kumi does not plan DataParallel
    (110.6 s).
    """
    eager = replace(ENGINES["accelerate-fsdp"], attention="eager", grad_reduce_itemsize=4, dropout=True)
    task = planned(GPT2, "aws-p5", 1, 1024, 8, engine=eager, kind="fp32", devices_per_node=2)
    seconds = []
    for link in (Link("two bridges of NVLink", 2, 50e9, 3e-6), Link("PCIe 3, through the host", 2, 6e9, 10e-6)):
        cluster = replace(task.cluster, device=TITAN, links=(link,))
        seconds.append(
            200 * estimate(replace(task, cluster=cluster), Layout(dp_replicate=2, microbatch=4)).step_seconds
        )
    assert seconds == [pytest.approx(101.9, rel=0.2), pytest.approx(131.4, rel=0.2)]
    assert seconds[0] < seconds[1] < 1.1 * seconds[0]
