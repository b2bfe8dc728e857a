"""Plans of reinforcement learning: seconds by hand, what is added to the memory, and layouts that it rules out."""

from dataclasses import replace

import numpy as np
import pytest

from kumi.errors import FitError
from kumi.plan.estimate import estimate, estimate_many, rank_share
from kumi.plan.inference.inference_job import inference_job
from kumi.plan.inference.rollout_time import prefill_seconds, rollout_time
from kumi.plan.layout_batch import CHOICES, batch_layouts
from kumi.plan.memory.device_memory import (
    host_memory,
    invariant_memory,
    num_microbatches,
    rank_generation_memory,
    rank_memory,
    rank_training_memory,
    rollout_moments,
    usable_memory,
)
from kumi.plan.pipeline.stages import rank_stages
from kumi.plan.rollout_step import rollout_step
from kumi.plan.search.candidates import layout_grid
from kumi.plan.search.fitting import make_candidates
from kumi.plan.session import plan
from kumi.plan.time.generation_time import BatchLengths, expected_lengths, generation_time
from kumi.spec.batch import BatchSpec
from kumi.spec.cache_state import cache_bytes
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.families import from_hf, with_score_head
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import params
from kumi.spec.loss_passes import LossPasses
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS, Precision
from kumi.spec.rollout import RolloutSpec
from kumi.spec.sharding import state_bytes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
}
MODEL, CRITIC = from_hf(CONFIG), from_hf(with_score_head(CONFIG))
DEVICE = Device(
    "made up",
    "cuda",
    24 * 10**9,
    ("bfloat16",),
    (("bfloat16", 100e12), ("float32", 50e12)),
    memory_bandwidth=1e12,
    matmul=(("", 0.8),),
    processors=100,
)
LINK = Link("link", 4, 100e9, 5e-6)
PINS = {"pp": 1, "cp": 1}


def _spec(**changes):
    fields = {
        "prompts": 8,
        "group_size": 4,
        "max_new_tokens": 256,
        "slots": 16,
        "updates": 1,
        "passes": 1,
        "prompt_tokens": 100,
        "longest_prompt": 256,
        "reply_tokens": 256,
    }
    return RolloutSpec(**(fields | changes))


def _job(devices=1, forwards=0, **changes):
    cluster = ClusterSpec("test", DEVICE, devices, links=(LINK,) if devices > 1 else ())
    batch = BatchSpec(512, 16 * 512)
    return Job(
        MODEL, cluster, batch, PRECISIONS["bf16"], Optim(), passes=LossPasses(True, forwards), rollout=_spec(**changes)
    )


def test_generation_is_one_pass_over_each_prompt_and_decode_steps():
    job = _job()
    lengths = expected_lengths(job.rollout)
    assert lengths == BatchLengths((100,) * 8, ((256,) * 4,) * 8)
    time, decode = generation_time(job, Layout(), lengths), inference_job(job)
    assert time.gather == 0
    assert time.prefill == pytest.approx(8 * prefill_seconds(decode, Layout(), 100))
    # Thirty-two replies in sixteen slots: two waves, as all are equally long.
    assert time.decode == pytest.approx(rollout_time(decode, Layout(), 16, [100] * 32, [256] * 32).decode)


def test_ranks_share_the_replies_and_wait_for_the_slowest_share():
    job = _job(devices=2, slots=4)
    lengths = BatchLengths((100, 100), ((10, 10), (200, 10)))
    layout, inference = Layout(dp_replicate=2), inference_job(job)
    time = generation_time(job, layout, lengths)
    plain = Layout(dp_replicate=2)
    assert time.decode == pytest.approx(rollout_time(inference, plain, 4, [100, 100], [200, 10]).decode)
    assert time.prefill == pytest.approx(prefill_seconds(inference, plain, 100))


def test_each_call_of_the_engine_gathers_the_weights_and_waits():
    job, layout = _job(devices=2, slots=1, prompts=8), Layout(dp_shard=2, zero=3)
    # Eight replies a slot and call: thirty-two replies on two ranks are two calls.
    lengths = expected_lengths(job.rollout)
    once = generation_time(job, layout, BatchLengths(lengths.prompts[:4], lengths.replies[:4]))
    assert once.gather > 0
    both = generation_time(job, layout, lengths)
    assert (both.gather, both.decode) == (pytest.approx(2 * once.gather), pytest.approx(2 * once.decode))


def test_a_mean_below_the_bound_gives_lengths_of_that_mean_up_to_the_bound():
    replies = np.array(expected_lengths(_spec(prompts=250, reply_tokens=64)).replies)
    assert replies.shape == (250, 4)
    assert replies.mean() == pytest.approx(64, rel=0.03)
    assert replies.max() == 256
    # No log-normal distribution of this mean reaches the bound with its 99th percentile.
    assert np.array(expected_lengths(_spec(prompts=250, reply_tokens=4)).replies).mean() == pytest.approx(4, rel=0.3)


def test_updates_take_the_seconds_of_their_rows():
    job, layout = _job(forwards=2, updates=2, passes=3, reply_tokens=156), Layout(microbatch=2)
    lengths = BatchLengths((100,) * 4, ((157, 157),) * 2 + ((29, 29),) * 2)
    result = rollout_step(job, layout, lengths)
    # The first update has four sequences of 256 positions, two in a row; the other one row of 4 x 128.
    assert (result.rows, result.row_tokens, result.reply_tokens) == (2, 512, 4 * 157 + 4 * 29)
    assert result.updates == 6
    assert len(result.train) == 2

    def kinds(rows, microbatch, span):
        batch = BatchSpec(512, rows * 512, span)
        plain = replace(job, batch=batch, rollout=None)
        return dict(estimate(plain, replace(layout, microbatch=microbatch)).time)

    large, small = kinds(2, 2, 256), kinds(1, 1, 128)
    assert result.log_probs == pytest.approx(large.pop("passes") + small.pop("passes"))
    assert result.train == (pytest.approx(sum(large.values())), pytest.approx(sum(small.values())))
    assert result.batch_seconds == pytest.approx(result.generate + result.log_probs + 3 * sum(result.train))
    assert result.step_seconds == pytest.approx(result.batch_seconds / 6)


def test_a_last_microbatch_of_fewer_rows_takes_their_share():
    job, layout = _job(), Layout(microbatch=2)

    def train(rows):
        lengths = BatchLengths((256,) * rows, ((257,),) * rows)
        result = rollout_step(job, layout, lengths)
        assert (result.rows, result.row_tokens) == (rows, 512)
        return result.train[0]

    assert train(3) == pytest.approx((train(2) + train(4)) / 2)


def test_a_step_of_the_search_has_its_share_of_the_rollout():
    job, layout = _job(forwards=1, updates=2, passes=2), Layout(microbatch=2)
    time = dict(estimate(job, layout).time)
    assert time["rollout"] == pytest.approx(generation_time(job, layout, expected_lengths(job.rollout)).seconds / 4)
    alone = dict(estimate(replace(job, rollout=None), layout).time)
    assert time["passes"] == pytest.approx(alone["passes"] / 2)
    assert sum(time.values()) == pytest.approx(sum(alone.values()) - alone["passes"] / 2 + time["rollout"])


def test_the_first_update_with_a_batch_needs_no_old_log_probs():
    all_rows, layout = _job(forwards=1, updates=4), Layout(microbatch=2)
    later = replace(all_rows, passes=LossPasses(True, later_forwards=1))
    assert rollout_step(later, layout).log_probs == pytest.approx(0.75 * rollout_step(all_rows, layout).log_probs)
    times = [dict(estimate(job, layout).time)["passes"] for job in (later, all_rows)]
    assert times[0] == pytest.approx(0.75 * times[1])


def test_no_speed_no_seconds():
    job = _job()
    unknown = replace(job, cluster=replace(job.cluster, device=replace(DEVICE, memory_bandwidth=0)))
    assert rollout_step(unknown, Layout()) is None


def test_the_memory_of_generation_is_states_gathered_weights_and_cache():
    job, layout = _job(devices=2), Layout(dp_shard=2, zero=3)
    memory = rank_generation_memory(job, layout)
    training = estimate(replace(job, rollout=None), layout).memory[0]
    assert memory.cache == cache_bytes(MODEL, 16, 512, "bfloat16")
    assert (memory.params, memory.optimizer, memory.grads) == (training.params, training.optimizer, 0)
    assert memory.gathered > 2 * 2 * MODEL.hidden_size * MODEL.vocab_size  # two bytes an element, and two tables
    # Ranks of tp have half of the heads, and no sequence more than its share of the replies.
    half = rank_generation_memory(job, Layout(tp=2, sequence_parallel=True))
    assert half.cache == memory.cache // 2
    assert rank_generation_memory(_job(devices=2, slots=64), layout).cache == memory.cache


def test_the_peak_is_that_of_generation_if_it_is_larger():
    small, large = _job(), _job(slots=64, prompts=64, group_size=16, longest_prompt=4096, max_new_tokens=4096)
    assert estimate(small, Layout()).memory[0].cache == 0
    peak = estimate(large, Layout()).memory[0]
    assert peak == rank_generation_memory(large, Layout())
    assert peak.cache == cache_bytes(MODEL, 64, 8192, "bfloat16")
    assert estimate_many(large, [Layout()]).memory[0] == pytest.approx(peak.total, rel=1e-6)


def test_a_second_model_takes_its_weights():
    job = _job()
    plain, compared = estimate(job, Layout()).memory[0], estimate(_job(reference=True), Layout()).memory[0]
    assert compared.reference == plain.params
    assert replace(compared, reference=0) == plain


REWARD = replace(MODEL, head="score", layers=MODEL.layers[:2], tie_word_embeddings=False)


def _scored(**changes):
    return _job(reward_models=(("quality", REWARD),), **changes)


def test_reward_models_take_their_frozen_weights_on_the_layout():
    job, plain = _scored(devices=2), _job(devices=2)
    count = sum(param.numel for param in params(REWARD))
    for layout, share in ((Layout(dp_replicate=2), 1), (Layout(dp_shard=2, zero=3), 2)):
        memory, without = estimate(job, layout).memory[0], estimate(plain, layout).memory[0]
        assert memory.reward_models == pytest.approx(2 * count / share, rel=1e-3)  # two bytes an element
        assert replace(memory, reward_models=0) == without
        generation = rank_generation_memory(job, layout)
        assert generation.total - rank_generation_memory(plain, layout).total == memory.reward_models


def test_the_peak_may_be_where_a_large_reward_model_scores():
    wide = replace(REWARD, layers=REWARD.layers * 8)
    job = _job(devices=2, reward_models=(("quality", wide),), longest_prompt=16, max_new_tokens=16, slots=1)
    layout = Layout(dp_shard=2, zero=1)
    moments = rollout_moments_of(job, layout)
    assert moments[1] > moments[0]
    peak = estimate(job, layout).memory[0]
    assert peak.total >= moments[1] - 1
    assert estimate_many(job, [layout]).memory[0] == pytest.approx(peak.total, rel=1e-6)


def rollout_moments_of(job, layout):
    layouts = batch_layouts([layout])
    share = rank_stages(job.model, layouts, np.array([0]), num_microbatches(job, layouts))
    moments = rollout_moments(job, layouts, invariant_memory(job, layouts, share))
    return [sum(float(size[0]) for size in moment.values()) for moment in moments]


def test_reward_models_take_a_pass_over_the_batch():
    layout, lengths = Layout(microbatch=2), BatchLengths((100,) * 4, ((156, 156),) * 4)
    job = _scored()
    result, plain = rollout_step(job, layout, lengths), rollout_step(_job(), layout, lengths)
    # Eight sequences of 256 tokens are four rows of 512.
    reward_job = replace(job, model=REWARD, batch=BatchSpec(512, 4 * 512, 256), rollout=None)
    reward_job = replace(reward_job, passes=LossPasses(forwards=1), precision=Precision("rewards", *["bfloat16"] * 3))
    assert result.scoring == pytest.approx(dict(estimate(reward_job, layout).time)["passes"])
    assert plain.scoring == 0
    assert result.batch_seconds - plain.batch_seconds == pytest.approx(result.scoring)
    assert dict(estimate(job, layout).time)["scoring"] > 0
    assert "scoring" not in dict(estimate(_job(), layout).time)


def _with_critic(job, critic=CRITIC):
    return replace(job, critic=critic)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=4),
        Layout(dp_shard=4, zero=1),
        Layout(dp_shard=4, zero=2),
        Layout(dp_shard=4, zero=3),
        Layout(tp=2, dp_shard=2, zero=3, sequence_parallel=True),
    ],
    ids=["ddp", "zero-1", "zero-2", "zero-3", "tp"],
)
def test_a_critic_takes_the_bytes_of_its_states(layout):
    job = _with_critic(_job(devices=4))
    plain, planned = rank_training_memory(replace(job, critic=None), layout), rank_training_memory(job, layout)
    states = state_bytes(CRITIC, layout, 0, job.precision, job.optim)
    resting = states.total - (0 if layout.zero == 0 else states.grads)
    assert planned.critic == pytest.approx(resting, rel=1e-5)
    assert replace(planned, critic=0) == plain
    assert rank_generation_memory(job, layout).critic == planned.critic


def test_the_update_of_the_policy_needs_more_than_that_of_its_critic():
    """Untied, the policy has the gradient of its head besides; tied, the critic's update has one row more."""
    tied = {**CONFIG, "tie_word_embeddings": True}
    for config in (CONFIG, tied):
        job = replace(_job(devices=2), model=from_hf(config), rollout=None)
        critic = replace(job, model=from_hf(with_score_head(config)))
        for layout in (Layout(dp_replicate=2), Layout(dp_shard=2, zero=3), Layout(tp=2)):
            policy, other = rank_memory(job, layout), rank_memory(critic, layout)
            transient = policy.total - policy.params - policy.optimizer
            assert other.total - other.params - other.optimizer < transient


def test_a_critic_offloads_what_the_policy_does():
    job = _with_critic(_job(devices=2, prompts=2))
    layout = Layout(dp_shard=2, zero=3)
    whole = rank_training_memory(job, layout).critic
    optimizer = state_bytes(CRITIC, layout, 0, job.precision, job.optim).optimizer
    offloaded = replace(layout, offload="optimizer")
    assert rank_training_memory(job, offloaded).critic == pytest.approx(whole - optimizer, rel=1e-5)
    assert rank_training_memory(job, replace(layout, offload="states")).critic == 0


def test_a_critic_takes_host_memory_where_states_are_offloaded():
    job, first = _with_critic(_job(devices=2)), np.zeros(1, np.int64)

    def host_bytes(of, offload):
        rows = batch_layouts([Layout(dp_shard=2, zero=3, offload=offload)])
        return host_memory(of, rows, rank_share(of, rows, first))[0]

    alone, critic = replace(job, critic=None), job.of_critic
    for offload in ("optimizer", "states"):
        assert host_bytes(job, offload) == host_bytes(alone, offload) + host_bytes(critic, offload)
    assert host_bytes(job, "activations") == host_bytes(alone, "activations")


def test_a_critic_takes_the_seconds_of_its_updates_and_of_its_values():
    plain = _job(forwards=1, updates=2, passes=2)
    job, layout = _with_critic(plain), Layout(microbatch=2)
    alone = dict(estimate(job.of_critic, layout).time)
    values = alone.pop("passes")
    assert values > 0
    time, before = dict(estimate(job, layout).time), dict(estimate(plain, layout).time)
    assert time.pop("critic") == pytest.approx(sum(alone.values()) + values / 2)
    assert time == pytest.approx(before)
    lengths = BatchLengths((100,) * 4, ((157, 157),) * 4)
    ours, theirs = rollout_step(job, layout, lengths), rollout_step(plain, layout, lengths)
    of_critic = replace(job, batch=BatchSpec(512, 2 * 512, 256.0)).of_critic
    kinds = dict(estimate(of_critic, layout).time)
    assert ours.log_probs - theirs.log_probs == pytest.approx(2 * kinds.pop("passes"))
    assert ours.train[0] - theirs.train[0] == pytest.approx(sum(kinds.values()))


def test_the_search_leaves_out_layouts_whose_cache_does_not_fit():
    # Without tp, three quarters of the cache fit beside the states.
    spec = {"slots": 64, "prompts": 64, "group_size": 16, "longest_prompt": 2048, "max_new_tokens": 2048}
    job = _job(devices=4, **spec)
    cache = cache_bytes(MODEL, 64, 4096, "bfloat16")
    memory = round(rank_generation_memory(job, Layout(dp_replicate=4)).total - cache / 4)
    job = replace(job, cluster=replace(job.cluster, device=replace(DEVICE, memory=memory)), margin=0.0)
    best = plan(job, PINS, top=3, front=False)
    for item in (best.best, *best.others):
        assert item.peak_memory <= usable_memory(job)
        assert rank_generation_memory(job, item.layout).total <= usable_memory(job)
    assert best.best.layout != plan(replace(job, rollout=None), PINS, top=0, front=False).best.layout
    tiny = replace(job, cluster=replace(job.cluster, device=replace(DEVICE, memory=cache // 8)))
    with pytest.raises(FitError):
        plan(tiny, PINS, top=0, front=False)


@pytest.mark.parametrize("critic", [None, CRITIC], ids=["alone", "critic"])
def test_many_layouts_at_once_have_the_bytes_of_each(critic):
    job = _with_critic(_job(devices=4, reference=True, longest_prompt=4096, max_new_tokens=4096), critic)
    candidates = make_candidates(job, layout_grid(job, PINS))
    none = CHOICES["recompute"].index("none")
    offload = CHOICES["offload"].index("none")
    many = np.maximum(candidates.device_bytes(none, -1, offload).max(axis=0), candidates.generation_bytes(offload))
    for row in range(0, len(many), 5):
        alone = estimate_many(job, batch_layouts([candidates.layouts.row(row)])).memory[0]
        assert many[row] == pytest.approx(alone, rel=1e-9)
