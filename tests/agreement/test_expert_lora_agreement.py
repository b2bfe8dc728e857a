"""Planned states, FLOPs, saved activations and messages of experts' adapters, and of modules that are trained in full,
equal measured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_lora_agreement import LORA, resident_bytes
from torch.utils.flop_counter import FlopCounterMode

from kumi.dryrun import dry_run
from kumi.nn.decoder import Decoder
from kumi.nn.lora import insert_adapters
from kumi.spec import ledger
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.lora import Lora
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.sharding import state_bytes
from steps import SPECS
from weights import init_weights

EXPERTS = replace(SPECS["moe"], lora=Lora(4, 5.0, ("q_proj", "experts")))
FULL = replace(SPECS["qwen"], lora=replace(LORA, use_dora=False, modules=("embed_tokens", "norm", "input_layernorm")))
TABLES = replace(SPECS["llama"], lora=replace(LORA, modules=("embed_tokens", "lm_head")))


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (EXPERTS, Layout(dp_shard=2, zero=3, ep=2)),
        pytest.param(EXPERTS, Layout(tp=2, expert_tp=2), marks=pytest.mark.exhaustive),
        (FULL, Layout(tp=2)),
        pytest.param(FULL, Layout(dp_shard=2, zero=1), marks=pytest.mark.exhaustive),
    ],
    ids=["experts-zero3-ep", "experts-expert_tp", "full-tp", "full-zero1"],
)
def test_states_are_those_of_the_ledger(ranks, spec, layout):
    for rank, measured in enumerate(ranks(layout.world_size, resident_bytes, layout, spec)):
        planned = state_bytes(spec, layout, rank, PRECISIONS["bf16"], Optim())
        assert measured == (planned.params, planned.grads, planned.optimizer)


def _measured_step(spec):
    """The FLOPs of a step, and the bytes of activations that the layers' forward saves, over 64 tokens."""
    decoder = Decoder(spec)
    init_weights(decoder, replace(spec, lora=None), 0)
    insert_adapters(decoder, spec, spec.lora, dtype=torch.float32)
    ids = torch.arange(64).view(4, 16)
    saved: dict[int, int] = {}

    def pack(tensor):
        parameters = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = decoder(ids, labels=ids, token_weights=torch.ones(4, 16))[0]
        loss.backward()
    return counter.get_total_flops(), sum(saved.values())


def test_adapters_of_experts_add_the_flops_and_activations_of_the_ledger():
    """The difference to adapters on q_proj alone is that of the experts' adapters."""
    without = replace(EXPERTS, lora=replace(EXPERTS.lora, targets=("q_proj",)))
    (flops, saved), (flops_without, saved_without) = _measured_step(EXPERTS), _measured_step(without)
    assert flops - flops_without == ledger.train_flops(EXPERTS, 64, 16) - ledger.train_flops(without, 64, 16)
    itemsizes = {"compute": 4, "float32": 4, "int64": 8}
    planned, planned_without = (
        sum(
            64 * itemsizes[tensor.dtype] * int(torch.tensor([dim.size for dim in tensor.dims]).prod())
            for op in ledger.ops(spec)
            for tensor in op.saved
        )
        for spec in (EXPERTS, without)
    )
    assert saved - saved_without == planned - planned_without


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (EXPERTS, Layout(tp=4, ep=2, expert_tp=2)),
        pytest.param(EXPERTS, Layout(dp_shard=2, tp=2, ep=2, zero=3), marks=pytest.mark.exhaustive),
        (TABLES, Layout(pp=2, tp=2)),
        (FULL, Layout(dp_shard=2, tp=2, zero=3)),
    ],
    ids=["experts-expert_tp", "experts-zero3-ep", "full-pp", "full-zero3"],
)
def test_the_planner_lists_the_messages_that_a_dry_run_sends(spec, layout):
    peak = (("bfloat16", 1e12),)
    cpu = Device("CPU", "cpu", 1 << 34, ("float32", "bfloat16"), peak)
    job = Job(spec, ClusterSpec("test", cpu, layout.world_size), BatchSpec(16, 16 * 4), PRECISIONS["bf16"], Optim())
    (rank,) = dry_run(job, layout, [0])["ranks"]
    assert [row for row in rank["collectives"] if not row["agrees"]] == []
    for kind in ("params", "optimizer"):
        assert rank["memory"]["kinds"][kind]["measured"] == rank["memory"]["kinds"][kind]["planned"]
    assert abs(rank["memory"]["difference"]) < 0.2
