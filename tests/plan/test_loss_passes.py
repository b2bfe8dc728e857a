"""The passes that an objective's loss needs, in the time of a step and in a dry run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kumi.config import job, plan_from_dict
from kumi.dryrun.program import dry_step
from kumi.plan.estimate import estimate
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.time.layer_costs import cost_table
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.layout import Layout
from kumi.spec.ledger import head_ops
from kumi.spec.loss_passes import LossPasses

LINK = Link("link", 4, 100e9, 5e-6)
LAYOUT = Layout(dp_shard=8, zero=3, recompute="full")


def _job(**changes):
    sections = {
        "model": {"source": "examples/models/llama-3-8b", "init": "random"},
        "cluster": {"source": "h100-sxm"},
        "batch": {"seq_len": 4096, "tokens_per_step": 4096 * 16},
    }
    return job(plan_from_dict(sections | changes))


LORA = {"r": 8, "alpha": 16.0}
OFF = {"kind": "adapters-off"}
GRPO = {"objective": {"kind": "grpo"}, "rewards": [{"kind": "length"}]}
KINDS = {
    "lm": ({}, LossPasses()),
    "sft": ({"objective": {"kind": "sft"}}, LossPasses()),
    "dpo": ({"objective": {"kind": "dpo"}}, LossPasses(True, 0)),
    "kto": ({"objective": {"kind": "kto"}}, LossPasses(True, 1)),
    "dpo-off": ({"objective": {"kind": "dpo"}, "lora": LORA, "reference": OFF}, LossPasses(True, 1)),
    "kto-off": ({"objective": {"kind": "kto"}, "lora": LORA, "reference": OFF}, LossPasses(True, 3)),
    "reward": ({"objective": {"kind": "reward"}}, LossPasses()),
    # Old log-probs: the only update of a batch computes them itself, as the first of several does, but not of passes.
    "grpo": ({**GRPO, "rollout": {"prompts": 8}}, LossPasses(True, 0)),
    "grpo-updates": ({**GRPO, "rollout": {"prompts": 8, "updates": 4}}, LossPasses(True, 0, 1)),
    "grpo-passes": ({**GRPO, "rollout": {"prompts": 8, "updates": 4, "passes": 2}}, LossPasses(True, 1)),
}


@pytest.mark.parametrize(("changes", "passes"), KINDS.values(), ids=KINDS)
def test_an_objective_has_the_passes_of_its_loss(changes, passes):
    assert _job(**changes).passes == passes


def test_a_step_takes_longer_by_the_passes():
    plain, dpo, kto = (estimate(_job(**KINDS[kind][0]), LAYOUT) for kind in ("lm", "dpo", "kto"))
    times = [dict(item.time) for item in (plain, dpo, kto)]
    # One more product of the head, 2 T D V of a rank's tokens, at about the speed of the forward's products.
    head = head_ops(_job().model)[-1].forward_flops(8192, 4096) / 989e12
    assert 1.0 * head < times[1]["backward"] - times[0]["backward"] < 2.0 * head
    assert times[1]["forward"] == pytest.approx(times[0]["forward"])
    assert "passes" not in times[1]
    # Under ZeRO-3 a rank with one stage computes every microbatch once more.
    assert times[2]["passes"] == pytest.approx(times[1]["forward"], rel=0.2)
    assert kto.step_seconds == pytest.approx(dpo.step_seconds + times[2]["passes"])


SMALL = {
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
# The device and its layout -> how often the head's first product is computed. A chunk of a CPU has 128 tokens.
HEADS = {
    "gpu": ("cuda", Layout(microbatch=2), 2),
    "one chunk": ("cpu", Layout(microbatch=2), 1),
    "two chunks": ("cpu", Layout(microbatch=4), 2),
    "pipeline": ("cpu", Layout(pp=2, microbatch=2), 2),
}


@pytest.mark.parametrize(("kind", "layout", "products"), HEADS.values(), ids=HEADS)
def test_the_plan_and_a_dry_run_compute_the_head_as_often(kind, layout, products):
    sections = {"model": {"config": SMALL, "init": "random"}, "batch": {"seq_len": 64, "tokens_per_step": 512}}
    # Seconds are FLOPs.
    device = Device(
        "clock", kind, 1 << 40, ("bfloat16",), (("bfloat16", 1.0),), matmul=(("", 1.0),), attention=(1.0, 1.0), launch=0
    )
    jobs = [_job(**sections, objective={"kind": kind}) for kind in ("lm", "dpo")]
    jobs = [replace(item, cluster=ClusterSpec("test", device, layout.pp, links=(LINK,))) for item in jobs]
    first = head_ops(jobs[0].model)[-1].forward_flops(512, 64)
    lm, dpo = (dry_step(item, layout, layout.pp - 1) for item in jobs)
    assert dpo.flops - lm.flops == (products - 1) * first
    tables = [cost_table(item, batch_layouts([layout]))[0] for item in jobs]
    seconds = [float(table.head.backward[0]) for table in tables]
    assert seconds[1] - seconds[0] == (products - 1) * first / jobs[0].batch.microbatches(layout)
    assert sum(dpo.memory.values()) <= estimate(jobs[1], layout).memory[-1].total
