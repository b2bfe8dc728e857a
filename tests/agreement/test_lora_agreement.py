"""Planned states and FLOPs of adapters equal measured ones, states to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kumi.dryrun import dry_run
from kumi.nn.decoder import Decoder
from kumi.nn.lora import insert_adapters
from kumi.parallel import build, init_adamw, unwrap
from kumi.parallel.stage_modules import local_shard
from kumi.plan.memory.device_memory import rank_memory
from kumi.spec import ledger
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.lora import Lora
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.spec.optim import Optim
from kumi.spec.peft import with_adapters
from kumi.spec.precision import PRECISIONS
from kumi.spec.sharding import state_bytes
from steps import SPECS, forward_backward, mesh_of
from weights import init_weights

LORA = Lora(3, 5.0, ("q_proj", "down_proj"), use_dora=True)


def _bytes(tensors):
    return sum(local_shard(tensor).nbytes for tensor in tensors)


def resident_bytes(layout, spec):
    """The measured bytes of parameters, gradients and optimizer states on a rank, in bf16."""
    mesh = mesh_of(layout)
    model = build(spec, mesh, PRECISIONS["bf16"], weights=0)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(spec), Optim())
    forward_backward(model, mesh, 0, 3)
    grads = [value.grad for value in model.parameters() if value.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return _bytes(model.parameters()), _bytes(grads), _bytes(states)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2, zero=3), Layout(tp=2)], ids=["one", "zero3", "tp2"])
def test_states_are_those_of_the_ledger(ranks, layout):
    spec = with_adapters(SPECS["qwen"], LORA)
    for rank, measured in enumerate(ranks(layout.world_size, resident_bytes, layout, spec)):
        planned = state_bytes(spec, layout, rank, PRECISIONS["bf16"], Optim())
        assert measured == (planned.params, planned.grads, planned.optimizer)


def test_flops_leave_out_gradients_of_frozen_matrices():
    spec = with_adapters(SPECS["llama"], Lora(3, 5.0))
    decoder = Decoder(spec)
    init_weights(decoder, replace(spec, lora=None), 0)
    insert_adapters(decoder, spec, spec.lora, dtype=torch.float32)
    ids = torch.arange(64).view(4, 16)
    weights = torch.full(ids.shape, 1.0)
    with FlopCounterMode(display=False) as counter:
        decoder(ids, labels=ids, token_weights=weights)[0].backward()
    planned = ledger.train_flops(spec, 64, 16)
    # The first layer's input needs no gradient, for the embedding below it is frozen, too.
    first = [op for op in ledger.layer_ops(spec, 0) if op.name.endswith(("q_proj", "k_proj", "v_proj"))]
    spared = sum(op.forward_flops(64, 16) for op in first)
    spared += sum(2 * 64 * 3 * op.source.size for op in first)
    attention = sum(op.forward_flops(64, 16) for op in ledger.ops(spec) if op.kind == "attention")
    counted = counter.get_total_flops()
    # PyTorch counts recomputed scores in attention's backward.
    assert planned - spared <= counted <= planned - spared + 0.5 * attention + 1


def _job(spec):
    peak = (("bfloat16", 2e14), ("float32", 2e13))
    device = Device("GPU", "cuda", 1 << 34, ("float32", "bfloat16"), peak, 1.5e12)
    return Job(spec, ClusterSpec("test", device, 1), BatchSpec(16, 64), PRECISIONS["bf16"], Optim())


def test_plans_count_gradients_and_states_of_adapters_only():
    whole, adapted, packed = (
        rank_memory(_job(one), Layout())
        for one in (
            SPECS["llama"],
            with_adapters(SPECS["llama"], LORA),
            with_adapters(SPECS["llama"], replace(LORA, quantize="nf4")),
        )
    )
    spec = with_adapters(SPECS["llama"], LORA)
    planned = state_bytes(spec, Layout(), 0, PRECISIONS["bf16"], Optim())
    assert (adapted.params, adapted.grads, adapted.optimizer) == (planned.params, planned.grads, planned.optimizer)
    assert adapted.params < 0.6 * whole.params
    assert adapted.optimizer < 0.2 * whole.optimizer
    assert packed.params < adapted.params
    assert adapted.total < whole.total


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, tp=2, zero=3),
        pytest.param(Layout(dp_replicate=2, tp=2, sequence_parallel=False), marks=pytest.mark.exhaustive),
        Layout(pp=2, tp=2, recompute="full"),
    ],
    ids=["zero3-sp", "ddp-tp", "pp-sp"],
)
def test_the_planner_lists_the_messages_that_a_dry_run_sends(layout):
    _agrees(with_adapters(SPECS["llama"], replace(LORA, targets=("all-linear",))), layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, zero=3),
        Layout(tp=2, dp_shard=2, zero=3, recompute="selective"),
        pytest.param(Layout(dp_shard=2, zero=1), marks=pytest.mark.exhaustive),
        pytest.param(Layout(dp_shard=2, zero=2), marks=pytest.mark.exhaustive),
        pytest.param(Layout(pp=2, cp=2, zero=3, recompute="full"), marks=pytest.mark.exhaustive),
    ],
    ids=["zero3", "zero3-tp", "zero1", "zero2", "pp-cp-zero3"],
)
def test_a_dry_run_sends_and_keeps_four_bits(layout):
    layer = LayerSpec(Attention(4, 2, 32, Rope(10000.0)), MLP(256))
    model = ModelSpec("llama", 250, 128, (layer,) * 3, 1e-5, 128)
    memory = _agrees(with_adapters(model, Lora(4, 8.0, quantize="nf4")), layout)["kinds"]
    plain = rank_memory(_cpu_job(with_adapters(model, Lora(4, 8.0)), layout), layout)
    # The embedding, the head and the adapters are not packed.
    assert memory["params"]["measured"] < 0.7 * plain.params
    assert memory["gathered"]["measured"] < 0.8 * plain.gathered


def _cpu_job(spec, layout):
    cpu = Device("CPU", "cpu", 1 << 34, ("float32", "bfloat16"), (("bfloat16", 1e12),))
    return Job(spec, ClusterSpec("test", cpu, layout.world_size), BatchSpec(16, 16 * 4), PRECISIONS["bf16"], Optim())


def _agrees(spec, layout):
    (rank,) = dry_run(_cpu_job(spec, layout), layout, [0])["ranks"]
    assert [row for row in rank["collectives"] if not row["agrees"]] == []
    for kind in ("params", "optimizer"):
        assert rank["memory"]["kinds"][kind]["measured"] == rank["memory"]["kinds"][kind]["planned"]
    assert abs(rank["memory"]["difference"]) < 0.2
    return rank["memory"]
