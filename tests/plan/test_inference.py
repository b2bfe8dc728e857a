"""Plans of generation: the worked example, sums done by hand, and simulations step by step."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from kumi.errors import ConfigError
from kumi.plan.inference.decode_step import READ_SHARE, decode_step, distinct_experts
from kumi.plan.inference.inference_job import InferenceJob
from kumi.plan.inference.inference_memory import (
    inference_memory,
    largest_batch,
    longest_context,
    usable_bytes,
    weight_bytes,
)
from kumi.plan.inference.reply_lengths import reply_lengths
from kumi.plan.inference.rollout_time import prefill_seconds, rollout_time
from kumi.spec import families
from kumi.spec.cache_state import cache_bytes
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params, ops
from kumi.spec.precision import ITEMSIZE

MODELS = Path(__file__).parents[2] / "examples" / "models"
# An H100 by its data sheet, whose kernels would reach all of it.
H100 = Device(
    "H100",
    "cuda",
    80 * 10**9,
    ("bfloat16",),
    (("bfloat16", 989.4e12),),
    memory_bandwidth=3.35e12,
    matmul=(("", 1.0),),
    processors=132,
)
NVLINK = Link("NVLink", 8, 450e9, 4e-6)


def _job(name, device=H100, count=1, **options):
    model = families.from_hf(json.loads((MODELS / name / "config.json").read_text()))
    cluster = ClusterSpec("test", device, count, links=(NVLINK,) if count > 1 else ())
    return InferenceJob(model, cluster, "bfloat16", graphs=True, **options)


def test_the_worked_example_of_qwen3_8b(monkeypatch):
    """By arithmetic: 16.4 GB of weights in 4.9 ms, 64 caches of 4,096 tokens, 38.7 GB, in 11.5 ms: 3.9k tokens/s."""
    monkeypatch.setattr("kumi.plan.inference.decode_step.READ_SHARE", 1.0)
    job = _job("qwen3-8b")
    assert cache_bytes(job.model, 1, 1, "bfloat16") == 147_456
    assert cache_bytes(job.model, 64, 4096, "bfloat16") == 38_654_705_664
    weights = weight_bytes(job, Layout())
    assert weights == 2 * num_params(job.model)
    assert weights / 1e9 == pytest.approx(16.4, abs=0.05)
    assert weights / 3.35e12 == pytest.approx(4.9e-3, abs=5e-5)
    step = decode_step(job, Layout(), 64, 4096)
    assert float(step.cache) == pytest.approx(11.5e-3, abs=5e-5)
    # The example also reads the embedding, 1.2 GB; a step looks up 64 of its rows.
    table = 2 * 151_936 * 4096
    assert float(step.weights) == pytest.approx((weights - table) / 3.35e12, rel=0.03)
    assert 64 / (float(step.seconds) + table / 3.35e12) == pytest.approx(3.9e3, rel=0.01)


def test_a_large_batch_is_bound_by_its_products():
    job = _job("qwen3-8b")
    few, many = (float(decode_step(job, Layout(), batch, 1).weights) for batch in (1, 8192))
    assert few == pytest.approx(float(decode_step(job, Layout(), 8, 1).weights), rel=0.01)
    linear = sum(op.forward_flops(1, 1) for op in ops(job.model) if op.kind in ("linear", "log_prob"))
    assert many >= 8192 * linear / 989.4e12
    assert many <= 1.2 * 8192 * linear / 989.4e12


def test_arrays_of_batches_and_contexts_are_rows():
    job = _job("qwen3-8b")
    batch, context = np.array([1, 8, 64]), np.array([10, 100, 1000])
    rows = decode_step(job, Layout(), batch, context).seconds
    assert rows.tolist() == [
        float(decode_step(job, Layout(), *row).seconds) for row in zip(batch, context, strict=True)
    ]


def test_tensor_parallel_ranks_divide_reads_and_add_latency():
    job = _job("qwen3-8b", count=8)
    alone, eight = (decode_step(job, Layout(tp=tp), 4, 2000) for tp in (1, 8))
    assert float(eight.cache) == pytest.approx(float(alone.cache) / 8)
    assert float(alone.communication) == 0
    # Two all-reduces per layer, six hops each, and their bytes.
    assert 36 * 2 * 6 * 4e-6 < float(eight.communication) < 1.1 * 36 * 2 * 6 * 4e-6
    # The latent of an MLA is on every rank.
    latent = _job("deepseek-v3", count=8)
    eight = decode_step(latent, Layout(tp=8, expert_tp=8), 4, 2000)
    assert float(eight.cache) == pytest.approx(cache_bytes(latent.model, 4, 2000, "bfloat16") / (READ_SHARE * 3.35e12))


def test_the_experts_that_a_batch_reaches():
    job = _job("qwen3-30b-a3b")
    op = next(op for op in ops(job.model) if op.experts and op.kind == "linear")
    assert float(distinct_experts(op, Layout(), 1)) == pytest.approx(8)
    # Drawn at random: 16 tokens, 8 of 128 experts each.
    rng = np.random.default_rng(0)
    drawn = [len({int(e) for _ in range(16) for e in rng.choice(128, 8, replace=False)}) for _ in range(200)]
    assert float(distinct_experts(op, Layout(), 16)) == pytest.approx(mean(drawn), rel=0.02)
    assert float(distinct_experts(op, Layout(), 10_000)) == pytest.approx(128)
    # With ep = 8 over data-parallel replicas, the tokens of all eight reach the 16 experts of a rank.
    shared = Layout(dp_shard=8, ep=8)
    assert float(distinct_experts(op, shared, 2)) == pytest.approx(float(distinct_experts(op, Layout(), 16)) / 8)


def test_the_largest_batch_fills_the_memory():
    job = _job("qwen3-8b")
    batch = largest_batch(job, Layout(), 4096)
    assert inference_memory(job, Layout(), batch, 4096).total <= usable_bytes(job)
    assert inference_memory(job, Layout(), batch + 1, 4096).total > usable_bytes(job)
    context = longest_context(job, Layout(), batch)
    assert inference_memory(job, Layout(), batch, context).total <= usable_bytes(job)
    assert context >= 4096
    small = replace(job, cluster=replace(job.cluster, device=replace(H100, memory=10**10)))
    assert largest_batch(small, Layout(), 4096) == 0


def test_a_cpu_has_packed_copies_of_float32_matrices():
    job = _job("qwen3-8b", replace(H100, kind="cpu", memory=10**12))
    layers = sum(p.numel for op in ops(job.model) if op.kind == "linear" for p in op.params)
    packed = 4 * (layers + 151_936 * 4096)
    eager = replace(job, compute="float32", graphs=False)
    assert inference_memory(eager, Layout(), 1, 10).weights == weight_bytes(eager, Layout()) + packed
    for other in (replace(eager, graphs=True), replace(eager, compute="bfloat16")):
        assert inference_memory(other, Layout(), 1, 10).weights == weight_bytes(other, Layout())


def test_the_recorded_steps_do_not_wait_for_the_host():
    job = _job("qwen3-8b")
    eager = replace(job, graphs=False)
    assert float(decode_step(job, Layout(), 1, 1).host) == 0
    assert float(decode_step(eager, Layout(), 1, 1).host) > 0
    cpu = replace(H100, kind="cpu", launch=1e-5)
    added = decode_step(replace(eager, cluster=replace(job.cluster, device=cpu)), Layout(), 1, 1)
    assert float(added.host) > 500 * 1e-5


def _simulated(job, slots, prompts, replies, *, refill):
    """Decode token by token. Return the seconds of the steps and their number.

    A step of an engine without recorded graphs reads all caches up to the longest.
    """
    waiting, active, seconds, steps = list(zip(prompts, replies, strict=True)), [], 0.0, 0
    while waiting or active:
        while waiting and len(active) < slots and (refill or not steps or not active):
            batch = [waiting.pop(0) for _ in range(min(len(waiting), slots - len(active)))]
            longest = max(reply for _, reply in batch)
            active += [[length + 1, reply if refill else longest, 1] for length, reply in batch]
        active = [row for row in active if row[2] < row[1]]
        if not active or (refill and waiting and len(active) < slots):
            continue
        context = (mean if job.graphs else max)([length for length, _, _ in active])
        seconds += float(decode_step(job, Layout(), len(active), context).seconds)
        steps += 1
        active = [[length + 1, reply, done + 1] for length, reply, done in active]
    return seconds, steps


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("refill", [True, False])
def test_spans_of_steps_equal_a_simulation_of_every_step(refill, graphs):
    job = replace(_job("llama-2-7b"), graphs=graphs)
    prompts, replies = [7, 30, 11, 50, 5, 21, 9], [4, 1, 19, 8, 12, 3, 27]
    seconds, steps = _simulated(job, 3, prompts, replies, refill=refill)
    rollout = rollout_time(job, Layout(), 3, prompts, replies, refill=refill)
    assert rollout.steps == steps
    assert rollout.decode == pytest.approx(seconds, rel=1e-4)
    assert rollout.tokens == sum(replies)
    assert rollout.prefill == pytest.approx(sum(prefill_seconds(job, Layout(), length) for length in prompts))


def test_refilled_slots_take_less_time_than_waves():
    job, replies = _job("llama-2-7b"), reply_lengths(64, 100, 600)
    refilled, waves = (rollout_time(job, Layout(), 8, [50] * 64, replies, refill=refill) for refill in (True, False))
    assert refilled.steps < 0.7 * waves.steps


def test_prompts_take_at_least_the_time_of_their_products():
    job = _job("llama-2-7b")
    flops = 2 * (num_params(job.model) - 2 * 32_000 * 4096) * 2048
    assert flops / 989.4e12 < prefill_seconds(job, Layout(), 2048) < 1.5 * flops / 989.4e12


def test_lengths_have_the_mean_and_the_tail_asked_for():
    lengths = reply_lengths(10_000, 500, 2000)
    assert mean(lengths) == pytest.approx(500, rel=0.01)
    assert sorted(lengths)[9900] == pytest.approx(2000, rel=0.02)
    assert reply_lengths(3, 100) == [100, 100, 100]
    assert reply_lengths(50, 500, 2000) == reply_lengths(50, 500, 2000)
    with pytest.raises(ConfigError, match="99th percentile of 100 with a mean of 500"):
        reply_lengths(3, 500, 100)
    with pytest.raises(ConfigError, match="give one between 1 and 15"):
        reply_lengths(3, 1, 20)


def test_weights_are_divided_as_the_trainer_divides_them():
    job = _job("mixtral-8x7b", count=8)
    total = ITEMSIZE["bfloat16"] * num_params(job.model)
    shard = weight_bytes(job, Layout(tp=8, expert_tp=8))
    # Norms and routers are on every rank.
    replicated = sum(2 * p.numel for op in ops(job.model) if op.kind in ("norm", "router") for p in op.params)
    assert shard == pytest.approx((total - replicated) / 8 + replicated)
    assert weight_bytes(job, Layout(dp_shard=8, ep=8)) > shard
