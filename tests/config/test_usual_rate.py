"""The learning rate of a run file that names none is that of its objective, and a description says it."""

from __future__ import annotations

import pytest
from test_model_head import LLAMA

from kumi.config import dump, from_dict, plan_from_dict
from kumi.objectives import OBJECTIVES
from kumi.objectives.policy_presets import POLICY_GRADIENTS
from kumi.report.run_description import describe_plan, render_description
from kumi.spec.optim import Optim


def _plan(kind, init="pretrained", **changes):
    return plan_from_dict(
        {
            "model": {"config": LLAMA, "init": init},
            "cluster": {"source": "h100-sxm", "nodes": 1, "devices_per_node": 1},
            "batch": {"seq_len": 512, "tokens_per_step": 8192},
            "objective": {"kind": kind},
            **(ROLLOUTS if kind in POLICY_GRADIENTS else {}),
            **({"reference": {"model": "org/teacher"}} if kind == "distill" else {}),
            **changes,
        }
    )


ROLLOUTS = {"rollout": {}, "rewards": [{"kind": "exact"}]}
RATES = {"sft": 2e-5, "dpo": 5e-7, "kto": 1e-6, "orpo": 5e-6, "simpo": 5e-7, "cpo": 1e-6, "reward": 3e-6}
RATES |= dict.fromkeys(POLICY_GRADIENTS, 1e-6)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_an_objective_has_a_rate_for_pretrained_weights(kind):
    assert _plan(kind).optim.lr == RATES.get(kind, 3e-4)
    assert _plan(kind, lora={}).optim.lr == pytest.approx(10 * RATES.get(kind, 3e-5), rel=1e-12)
    assert _plan(kind, init="random").optim.lr == 3e-4 == Optim().lr
    assert _plan(kind, optim={"lr": 2e-3}).optim.lr == 2e-3
    assert _plan(kind, optim={"weight_decay": 0.0}).optim.lr == RATES.get(kind, 3e-4)


def test_a_pinned_run_file_has_the_rate():
    config = from_dict(
        {
            "name": "tiny",
            "model": {"source": "org/name"},
            "batch": {"seq_len": 8, "tokens_per_step": 16},
            "objective": {"kind": "dpo"},
            "data": {"sources": [{"path": "x.jsonl"}], "tokenizer": "tok"},
            "train": {"steps": 2, "out": "runs/tiny"},
        }
    )
    assert "lr = 5e-07\n" in dump(config)


def _text(config, capsys):
    from rich.console import Console

    Console(width=200).print(render_description(describe_plan(config)))
    return next((line for line in capsys.readouterr().out.splitlines() if line.startswith("lr ")), None)


def test_a_description_names_the_rate_and_warns_of_a_high_one(capsys):
    def text(*words, **changes):
        return " ".join((_text(_plan(*words, **changes), capsys) or "").split())

    assert text("dpo") == "lr 5e-07, the usual one of dpo on pretrained weights"
    assert text("dpo", lora={}) == "lr 5e-06, the usual one of dpo on pretrained weights"
    assert text("dpo", optim={"lr": 1e-6}) == "lr 1e-06; 5e-07 is usual for dpo on pretrained weights"
    expected = "lr 0.0003, 600 times the 5e-07 that is usual for dpo on pretrained weights: so high a rate may ruin the"
    assert text("dpo", optim={"lr": 3e-4}).startswith(expected)
    assert text("dpo", "random") == text("lm") == ""
