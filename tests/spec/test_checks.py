from dataclasses import replace

import pytest

from kumi.spec.batch import BatchSpec
from kumi.spec.checks import illegal, unsupported_by_trainer
from kumi.spec.cluster import ClusterSpec, Device, Host
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.lora import Lora
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS

LAYER = LayerSpec(Attention(4, 2, 16, Rope(10000.0)), MLP(128))
MODEL = ModelSpec("llama", 256, 64, (LAYER,) * 6, 1e-5, 128)
EXPERTS = replace(LAYER, mlp=MoE(12, 2, 32))
MIXED = replace(MODEL, family="mixtral", layers=(LAYER, *[EXPERTS] * 5))
BATCH = BatchSpec(64, 64 * 24)
UNKNOWN, KNOWN = Host(), Host(2**40, 1e10)


def illegal_in(layout, batch=BATCH, devices=None, model=MODEL, host=UNKNOWN):
    cluster = ClusterSpec("test", Device("cpu", "cpu", 2**34), devices or layout.world_size, host=host)
    return illegal(model, layout, cluster, batch)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_replicate=4, microbatch=2),
        Layout(dp_shard=4, zero=3),
        Layout(dp_replicate=2, dp_shard=2, zero=1),
        Layout(tp=4, cp=2, pp=3),
        Layout(tp=4, sequence_parallel=False, dp_shard=2, zero=3, pp=2),
        Layout(dp_replicate=2, cp=2, zero=1),
        Layout(pp=8),
        Layout(pp=4, schedule="interleaved", stages=2),
        Layout(pp=3, schedule="zb-v", stages=2, recompute="full", recompute_layers=2),
        Layout(pp=3, schedule="dualpipe", stages=2, stage_layers=(0, 1, 2, 2, 1, 0)),
        Layout(recompute="selective", recompute_layers=0),
    ],
)
def test_legal_layouts_have_no_problems(layout):
    assert illegal_in(layout) == []


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=4, zero=1, ep=4), Layout(dp_shard=2, tp=2, zero=1, ep=2, expert_tp=2), Layout(tp=4, ep=4)],
)
def test_experts_borrow_ranks_from_sharded_data_context_and_tensor_parallelism(layout):
    assert illegal_in(layout, model=MIXED) == []


def test_tensor_parallelism_may_leave_the_node_and_outnumber_key_value_heads():
    cluster = ClusterSpec("test", Device("GPU", "cuda", 2**34), 2, nodes=2)
    assert illegal(MODEL, Layout(tp=4), cluster, BATCH) == []


@pytest.mark.parametrize("offload", ["optimizer", "states", "activations"])
def test_what_is_known_of_the_host_decides_whether_it_can_be_used(offload):
    assert illegal_in(Layout(offload=offload), host=KNOWN) == []
    assert illegal_in(Layout(offload=offload)) == [
        f"offload='{offload}' needs host.memory and host.device_bandwidth, which the description of the cluster does "
        "not give; add it to a cluster file, or set offload = 'none'"
    ]


# (layout, part of the sentence), for the plain model, batch and host.
ILLEGAL = [
    (Layout(dp_replicate=5), "dp=5 does not divide the 24 sequences of a step; choose dp = 1, 2, 3, 4, 6, 8, 12 or 24"),
    (
        Layout(microbatch=5),
        "microbatch=5 does not divide the 24 sequences of a rank in a step; set microbatch = 1, 2, 3,",
    ),
    (Layout(zero=4), "zero=4 is not a ZeRO stage"),
    (Layout(dp_replicate=2, zero=2), "set dp_shard = 2 and dp_replicate = 1"),
    (Layout(dp_shard=2), "zero=0 shards no states, but dp_shard=2"),
    (
        Layout(pp=2, dp_shard=2, zero=2),
        "zero=2 with pp=2 would save no memory, because a pipeline keeps unsharded gradients until its last "
        "microbatch; set zero = 1 or 3, or pp = 1",
    ),
    (Layout(recompute="some"), "recompute='some' is unknown; use one of none, selective, full"),
    (Layout(offload="gradients"), "offload='gradients' is unknown; use one of none, optimizer, states"),
    (Layout(microbatch=0), "microbatch=0 must be 1 or more"),
    (Layout(expert_tp=0), "expert_tp=0 must be 1 or more"),
    (Layout(tp=3), "tp=3 does not divide num_attention_heads=4; set tp = 1, 2 or 4"),
    (Layout(tp=8), "tp=8 does not divide num_attention_heads=4; set tp = 1, 2 or 4"),
    (Layout(tp=3), "tp=3 neither divides num_key_value_heads=2 nor is a multiple of it; set tp = 1, 2 or 4"),
    (Layout(tp=3), "tp=3 does not divide intermediate_size=128; set tp = 1, 2 or 4"),
    (
        Layout(cp=3),
        "cp=3 splits sequences into 2 x 3 chunks, which do not divide seq_len=64; set seq_len = 66, or change cp",
    ),
    (Layout(cp=64), "cp=64 splits sequences into 2 x 64 chunks"),
    (
        Layout(tp=3),
        "sequence_parallel=true splits sequences into tp x cp = 3 chunks, which do not divide seq_len=64; set "
        "seq_len = 63, or sequence_parallel = false",
    ),
    (Layout(ep=2, dp_shard=2, zero=1), "ep=2 shards routed experts, but the model has none; set ep = 1"),
    (Layout(expert_tp=2, tp=2), "expert_tp=2 shards routed experts, but the model has none; set expert_tp = 1"),
    (
        Layout(pp=12),
        "pp x stages = 12 x 1 is more than 8: the model has 6 layers, and two stages may have only the embedding or "
        "the head; use at most 8",
    ),
    (
        Layout(pp=2, stage_layers=(1, 2, 3)),
        "stage_layers has 3 entries, but the layout has pp x stages = 2 stages; give one",
    ),
    (Layout(pp=2, stage_layers=(3, 4)), "stage_layers=[3, 4] adds up to 7 layers, but the model has 6; give entries"),
    (Layout(pp=3, stage_layers=(3, 0, 3)), "stage_layers=[3, 0, 3] has a stage without layers, which only the first"),
    (Layout(pp=2, schedule="zb"), "schedule='zb' is unknown; use one of 1f1b, gpipe"),
    (Layout(pp=2, stages=2), "schedule='1f1b' needs 1 stage per rank, not stages=2"),
    (Layout(pp=2, schedule="zb-v"), "schedule='zb-v' needs 2 stages per rank, not stages=1; set stages = 2"),
    (Layout(pp=2, schedule="interleaved"), "schedule='interleaved' needs 2 or more stages per rank, not stages=1"),
    (
        Layout(pp=2, schedule="interleaved", stages=2, microbatch=8),
        "runs microbatches in groups of pp=2, which does not divide the 3 microbatches of a step",
    ),
    (
        Layout(pp=2, schedule="dualpipe", stages=2, microbatch=8),
        "needs at least 2 x pp = 4 microbatches per step, not 3",
    ),
    (
        Layout(recompute_layers=2),
        "recompute_layers=2 with recompute='none' has no effect; set recompute = 'selective' or 'full'",
    ),
    (
        Layout(pp=2, recompute="full", recompute_layers=4),
        "recompute_layers=4 is out of range, because no rank has more than 3 layers; set recompute_layers = 0 to 3, or "
        "leave it out",
    ),
    (Layout(context="ulisses"), "context='ulisses' is unknown; use one of ring, ulysses"),
    (
        Layout(cp=8, context="ulysses"),
        "context='ulysses' cannot distribute the 4 heads of a tp rank, and their keys and values, evenly over cp=8 "
        "ranks; set cp = 1, 2 or 4, or context = 'ring'",
    ),
    (
        Layout(cp=4, tp=2, context="ulysses"),
        "the 2 heads of a tp rank, and their keys and values, evenly over cp=4 ranks",
    ),
    (Layout(offload="states-nvme"), "offload='states-nvme' needs host.nvme and host.nvme_bandwidth, which"),
]


@pytest.mark.parametrize(("layout", "sentence"), ILLEGAL)
def test_each_problem_of_a_layout_has_its_sentence(layout, sentence):
    assert any(sentence in problem for problem in illegal_in(layout)), illegal_in(layout)


@pytest.mark.parametrize(
    ("layout", "batch", "devices", "sentence"),
    [
        (
            Layout(),
            BatchSpec(64, 100),
            None,
            "seq_len=64 does not divide tokens_per_step=100; set tokens_per_step = 128",
        ),
        (Layout(), BatchSpec(256, 512), None, "seq_len=256 is longer than max_position_embeddings=128"),
        (Layout(dp_replicate=2), BATCH, 4, "the layout needs 2 devices"),
    ],
)
def test_each_problem_of_the_batch_and_the_cluster_has_its_sentence(layout, batch, devices, sentence):
    assert any(sentence in problem for problem in illegal_in(layout, batch, devices)), illegal_in(
        layout, batch, devices
    )


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(ep=8, dp_shard=8, zero=1), "ep=8 does not divide num_experts=12; set ep = 1, 2, 3, 4, 6 or 12"),
        (
            Layout(expert_tp=3, tp=3),
            "expert_tp=3 does not divide the experts' width of 32; set expert_tp = 1, 2, 4, 8, 16 or 32",
        ),
        (
            Layout(ep=4, dp_shard=2, zero=1),
            "ep x expert_tp = 4 does not divide the dp_shard x cp x tp = 2 ranks that "
            "share the experts; choose a product of 1 or 2",
        ),
    ],
)
def test_each_problem_of_experts_has_its_sentence(layout, sentence):
    assert any(sentence in problem for problem in illegal_in(layout, model=MIXED)), illegal_in(layout, model=MIXED)


def test_tensor_parallelism_does_not_split_blocks_of_four_bit_elements():
    packed = replace(MODEL, lora=Lora(quantize="nf4"))
    assert illegal_in(Layout(dp_shard=2, zero=3), model=packed) == []
    (sentence,) = illegal_in(Layout(tp=2), model=packed)
    assert "leaves a rank 32 columns of model.layers.0.self_attn.o_proj.weight" in sentence
    wide = replace(packed, layers=(replace(LAYER, attention=replace(LAYER.attention, head_dim=32)),) * 6)
    assert illegal_in(Layout(tp=2), model=wide) == []


def test_a_batch_that_does_not_divide_is_not_blamed_on_the_schedule():
    assert illegal_in(Layout(pp=2, schedule="dualpipe", stages=2), BatchSpec(64, 100)) == [
        "seq_len=64 does not divide tokens_per_step=100; set tokens_per_step = 128"
    ]


JOB = Job(MODEL, ClusterSpec("test", Device("GPU", "cuda", 2**34), 1), BATCH, PRECISIONS["bf16"], Optim())


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32", "fp64"])
def test_data_parallelism_with_adamw_can_be_trained(kind):
    job = replace(JOB, precision=PRECISIONS[kind])
    assert unsupported_by_trainer(job, Layout(dp_replicate=2, dp_shard=4, zero=3, microbatch=2, recompute="full")) == []


@pytest.mark.parametrize(
    ("schedule", "stages"),
    {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe": 2}.items(),
)
def test_every_pipeline_can_be_trained(schedule, stages):
    assert (
        unsupported_by_trainer(JOB, Layout(pp=2, schedule=schedule, stages=stages, stage_layers=(1,) * 2 * stages))
        == []
    )


@pytest.mark.parametrize(
    ("layout", "change", "sentence"),
    [
        (Layout(tp=2, sequence_parallel=False), {"model": MIXED}, "sequence_parallel=false with tp=2 is not supported"),
        (
            Layout(tp=2, zero=1),
            {"model": MIXED},
            "zero=1 with dp_shard x cp = 1 would shard only the experts, over 2 tp",
        ),
        (Layout(dp_shard=3, zero=3), {"model": MIXED}, "zero=3 shards each expert's matrices over 3 ranks"),
        (Layout(tp=64), {"model": replace(JOB.model, vocab_size=100)}, "tp=64 leaves ranks without rows of the vocab"),
        (Layout(dp_shard=2, zero=1, offload="states"), {}, "2 or more ranks, not zero=1 over 2; set zero = 3"),
        (Layout(zero=3, offload="states-nvme"), {}, "2 or more ranks, not zero=3 over 1; set zero = 3"),
        (
            Layout(offload="activations", recompute="selective"),
            {},
            "offload='activations' is not supported with recompute='selective'",
        ),
        (
            Layout(offload="optimizer-nvme"),
            {"optim": Optim(kind="muon")},
            "optim.kind='muon' is not supported with offload='optimizer-nvme', which is implemented for 'adamw' only; "
            "set offload = 'none' or 'activations', or optim.kind = 'adamw'",
        ),
        (Layout(), {"precision": PRECISIONS["fp8"]}, "precision.kind='fp8' needs a CUDA device"),
        (
            Layout(),
            {"precision": PRECISIONS["bf16-pure"]},
            "precision.kind='bf16-pure' can be planned for but not trained; set precision.kind to one of bf16",
        ),
        (Layout(), {"model": replace(MIXED, family="gpt")}, "a gpt model can be planned for but not trained"),
    ],
)
def test_what_can_only_be_planned_is_said(layout, change, sentence):
    messages = unsupported_by_trainer(replace(JOB, **change), layout)
    assert len(messages) == 1
    assert sentence in messages[0]
