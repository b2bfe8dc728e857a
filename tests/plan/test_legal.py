"""Every rule has the same result for a batch of layouts as for one layout."""

from dataclasses import replace

import pytest

from kumi.plan.layout_batch import batch_layouts
from kumi.plan.search.candidates import legal_mask
from kumi.spec.batch import BatchSpec
from kumi.spec.checks import illegal
from kumi.spec.cluster import ClusterSpec, Device, Host
from kumi.spec.job import Job
from kumi.spec.layout import CONTEXT, OFFLOAD, RECOMPUTE, Layout
from kumi.spec.lora import Lora
from kumi.spec.model import MLP, Attention, LayerSpec, Mamba, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.peft import with_adapters
from kumi.spec.precision import PRECISIONS
from kumi.spec.schedules import SCHEDULES

ROPE = Rope(10000.0)
DENSE = LayerSpec(Attention(12, 4, 16, ROPE), MLP(96))
EXPERTS = LayerSpec(Attention(12, 4, 16, ROPE), MoE(12, 2, 32, shared_intermediate_size=64))
MAMBA = LayerSpec(Mamba(8, 16, 8, 4, 4, 16), None)
HYBRID = (MAMBA, replace(DENSE, mlp=None), replace(EXPERTS, attention=None))
MODELS = {
    "dense": ModelSpec("llama", 256, 64, (DENSE,) * 10, 1e-5, 512),
    "experts": ModelSpec("mixtral", 256, 64, (EXPERTS,) * 6, 1e-5, 512),
    "hybrid": ModelSpec("nemotron_h", 256, 64, HYBRID * 3, 1e-5, 512),
    "both": ModelSpec("mixtral", 256, 64, (DENSE, *[EXPERTS] * 4), 1e-5, 512),
}
MODELS["four bits"] = with_adapters(MODELS["dense"], Lora(quantize="nf4"))
BATCH = BatchSpec(96, 96 * 48)
HOSTS = [Host(), Host(2**40, 1e10), Host(2**40, 1e10, 1e9, 2**40)]
# Legal layouts with 48 sequences of 96 tokens. With one field changed, some are still legal.
LEGAL = {
    "dense": [
        Layout(),
        Layout(pp=2, dp_shard=4, zero=1, cp=2, tp=4, microbatch=2, recompute="full", recompute_layers=5),
        Layout(dp_replicate=2, dp_shard=2, zero=3, tp=2, offload="optimizer"),
        Layout(pp=4, schedule="interleaved", stages=3, tp=12, recompute="selective", recompute_layers=3),
        Layout(pp=3, schedule="zb-v", stages=2, recompute="full", recompute_layers=4, sequence_parallel=False),
        Layout(pp=3, schedule="dualpipe", stages=2, dp_replicate=2, cp=2, zero=1),
        Layout(pp=12),
        Layout(cp=2, tp=2, zero=1, context="ulysses"),
    ],
    "experts": [
        Layout(dp_shard=4, zero=2, tp=2, ep=4, expert_tp=2),
        Layout(dp_shard=3, zero=1, tp=2, ep=2),
        Layout(pp=2, dp_shard=3, zero=1, ep=3, cp=2),
    ],
    "hybrid": [Layout(dp_shard=4, zero=1, tp=4, ep=4), Layout(pp=3, dp_shard=2, zero=1, tp=2)],
    "four bits": [Layout(), Layout(pp=2, dp_replicate=4, microbatch=2), Layout(dp_replicate=2, cp=2)],
    "both": [Layout(dp_shard=2, zero=3, cp=2, tp=2, ep=4), Layout(pp=2, schedule="zb-h1", dp_shard=6, zero=1, ep=6)],
}
CHANGES = {
    **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp"), (1, 2, 3, 4, 6, 8, 12)),
    "zero": [0, 1, 2, 3],
    "microbatch": [1, 2, 3, 4, 5, 16],
    "recompute": list(RECOMPUTE),
    "recompute_layers": [None, 0, 1, 2, 3, 4, 5, 6, 9],
    "sequence_parallel": [True, False],
    "schedule": list(SCHEDULES),
    "stages": [1, 2, 3],
    "offload": list(OFFLOAD),
    "context": list(CONTEXT),
}


def job(model, devices, host=HOSTS[1], batch=BATCH):
    cluster = ClusterSpec("test", Device("GPU", "cuda", 2**36), devices, host=host)
    return Job(MODELS[model], cluster, batch, PRECISIONS["bf16"], Optim())


@pytest.mark.parametrize("name", MODELS)
def test_each_single_change_of_legal_layouts(name):
    for base in LEGAL[name]:
        assert legal_mask(job(name, base.world_size), batch_layouts([base])).all(), base
        changed = [replace(base, **{field: value}) for field, values in CHANGES.items() for value in values]
        for host in HOSTS:
            check(job(name, base.world_size, host), changed)
        for layout in changed:
            check(job(name, layout.world_size), [layout])
            check(job(name, layout.world_size, batch=BatchSpec(100, 4800)), [layout])


def check(work, layouts):
    expected = [illegal(work.model, layout, work.cluster, work.batch) for layout in layouts]
    for layout, reasons, legal in zip(layouts, expected, legal_mask(work, batch_layouts(layouts)), strict=True):
        assert legal == (not reasons), (layout, reasons)


def test_no_layout_is_legal_with_an_illegal_batch():
    for batch in (BatchSpec(1024, 1024), BatchSpec(96, 100)):
        check(job("dense", 1, batch=batch), [Layout()])


def test_a_degree_of_zero_divides_nothing():
    names = ("pp", "tp", "ep", "expert_tp", "stages", "microbatch")
    check(job("experts", 1), [Layout(), *(Layout(**{name: 0}) for name in names)])
