"""The same layouts are legal on columns as by the sentences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kumi.plan.columns import columns
from kumi.plan.legal import legal
from kumi.spec.batch import BatchSpec
from kumi.spec.checks import problems
from kumi.spec.cluster import ClusterSpec, Device, Host
from kumi.spec.job import Job
from kumi.spec.layout import OFFLOAD, RECOMPUTE, SCHEDULES, Layout
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS

ROPE = Rope(10000.0)
DENSE = LayerSpec(Attention(12, 4, 16, ROPE), MLP(96))
EXPERTS = LayerSpec(Attention(12, 4, 16, ROPE), MoE(12, 2, 32, shared_intermediate_size=64))
MODELS = {
    "dense": ModelSpec("llama", 256, 64, (DENSE,) * 10, 1e-5, 512),
    "experts": ModelSpec("mixtral", 256, 64, (EXPERTS,) * 6, 1e-5, 512),
    "both": ModelSpec("mixtral", 256, 64, (DENSE, *[EXPERTS] * 4), 1e-5, 512),
}
DEGREE = some.sampled_from([1, 1, 1, 2, 2, 3, 4, 6, 8])
HOSTS = [Host(), Host(2**40, 1e10), Host(2**40, 1e10, 1e9, 2**40)]


MESH = some.fixed_dictionaries(dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), DEGREE))


@some.composite
def layouts(draw, mesh):
    """A layout of `mesh` that has a fair chance to be legal."""
    schedule = draw(some.sampled_from(SCHEDULES))
    stages = {"interleaved": 3, "zb-v": 2, "dualpipe": 2}.get(schedule, 1) if draw(some.integers(0, 9)) else 2
    return Layout(
        **mesh,
        ep=draw(some.sampled_from([1, 1, 2, 3, 4])),
        expert_tp=draw(some.sampled_from([1, 1, 1, 2, 3])),
        zero=draw(some.sampled_from([0, 1, 2, 3] if mesh["dp_shard"] == 1 else [1, 1, 2, 3, 0])),
        microbatch=draw(some.sampled_from([1, 1, 2, 3])),
        recompute=draw(some.sampled_from(RECOMPUTE)),
        recompute_layers=draw(some.sampled_from([None, None, 0, 1, 3, 5, 9])),
        sequence_parallel=draw(some.booleans()),
        schedule=schedule,
        stages=stages,
        offload=draw(some.sampled_from(("none", *OFFLOAD))),
    )


@given(some.data(), MESH, some.sampled_from(sorted(MODELS)), some.sampled_from(HOSTS), some.sampled_from([24, 48, 96]),
       some.sampled_from([96, 100, 144]))  # fmt: skip
@settings(max_examples=150)
def test_columns_say_what_the_sentences_say(data, mesh, name, host, sequences, seq_len):
    found = data.draw(some.lists(layouts(mesh), min_size=1, max_size=30))
    cluster = ClusterSpec("test", Device("GPU", "cuda", 2**36), found[0].world_size, host=host)
    batch = BatchSpec(seq_len, seq_len * sequences)
    check(Job(MODELS[name], cluster, batch, PRECISIONS["bf16"], Optim()), found)


def check(job, found):
    expected = [problems(job.model, layout, job.cluster, job.batch) for layout in found]
    for layout, said, mask in zip(found, expected, legal(job, columns(found)), strict=True):
        assert mask == (not said), (layout, said)


@pytest.mark.parametrize("name", MODELS)
def test_all_of_a_small_space(name):
    """Every layout of 8 devices: enough legal and illegal ones of each kind to tell a rule that is not there."""
    cluster = ClusterSpec("test", Device("GPU", "cuda", 2**36), 8, host=HOSTS[1])
    job = Job(MODELS[name], cluster, BatchSpec(96, 96 * 48), PRECISIONS["bf16"], Optim())
    found = [
        Layout(pp=pp, dp_shard=dp, tp=tp, cp=8 // (pp * dp * tp), ep=ep, zero=zero, schedule=schedule, stages=stages)
        for pp in (1, 2, 4, 8)
        for dp in (1, 2, 4)
        for tp in (1, 2, 4)
        if pp * dp * tp in (1, 2, 4, 8)
        for ep in (1, 2, 4)
        for zero in (0, 1, 2, 3)
        for schedule in SCHEDULES
        for stages in (1, 2, 3)
    ]
    check(job, found)
    mask = legal(job, columns(found))
    assert 50 < np.count_nonzero(mask) < len(found) / 2


def test_nothing_is_legal_with_a_batch_that_is_not():
    cluster = ClusterSpec("test", Device("GPU", "cuda", 2**36), 1)
    for batch in (BatchSpec(1024, 1024), BatchSpec(96, 100)):
        check(Job(MODELS["dense"], cluster, batch, PRECISIONS["bf16"], Optim()), [Layout()])


def test_impossible_degrees_are_no_division_by_zero():
    cluster = ClusterSpec("test", Device("GPU", "cuda", 2**36), 1)
    job = Job(MODELS["experts"], cluster, BatchSpec(96, 96), PRECISIONS["bf16"], Optim())
    check(job, [Layout(), *(Layout(**{name: 0}) for name in ("pp", "tp", "ep", "expert_tp", "stages", "microbatch"))])
