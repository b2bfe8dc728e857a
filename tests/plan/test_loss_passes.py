"""The passes that an objective's loss needs, in the time of a step and in a dry run."""

from __future__ import annotations

import pytest

from kumi.config import job, plan_from_dict
from kumi.dryrun.program import dry_step
from kumi.plan.estimate import estimate
from kumi.spec.layout import Layout
from kumi.spec.ledger import head_ops
from kumi.spec.loss_passes import LossPasses

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
KINDS = {
    "lm": ({}, LossPasses()),
    "sft": ({"objective": {"kind": "sft"}}, LossPasses()),
    "dpo": ({"objective": {"kind": "dpo"}}, LossPasses(True, 0)),
    "kto": ({"objective": {"kind": "kto"}}, LossPasses(True, 1)),
    "dpo-off": ({"objective": {"kind": "dpo"}, "lora": LORA, "reference": OFF}, LossPasses(True, 1)),
    "kto-off": ({"objective": {"kind": "kto"}, "lora": LORA, "reference": OFF}, LossPasses(True, 3)),
    "reward": ({"objective": {"kind": "reward"}}, LossPasses()),
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


def test_a_dry_run_computes_the_head_twice():
    small = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    sections = {"model": {"config": small, "init": "random"}, "batch": {"seq_len": 64, "tokens_per_step": 256}}
    jobs = [_job(**sections, objective={"kind": kind}) for kind in ("lm", "dpo")]
    lm, dpo = (dry_step(item, Layout(), 0) for item in jobs)
    assert dpo.flops - lm.flops == head_ops(jobs[0].model)[-1].forward_flops(256, 64)
