"""The rollouts of a run file for the planner: lengths with their sources, a second model, layouts that are refused."""

import json
from functools import partial

import pytest

from kumi.config.jobs import plan_input
from kumi.config.load import plan_from_dict
from kumi.errors import LayoutError
from kumi.plan.rollout_step import rollout_step
from kumi.plan.session import plan
from kumi.report.brief import brief
from kumi.report.rollout_lines import length_line, memory_line, rollout_data, time_line

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
}


def _input(**changes):
    """The planner's input of a run of GRPO on a node of H100, changed by `section__key=value`."""
    written = {
        "model": {"config": MODEL, "init": "random"},
        "cluster": {"source": "h100-sxm", "nodes": 1},
        "batch": {"seq_len": 1024, "tokens_per_step": 65536},
        "objective": {"kind": "grpo"},
        "rollout": {"prompts": 16, "group_size": 8, "max_new_tokens": 512},
        "rewards": [{"kind": "function", "file": "reward.py:correct"}],
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            written.setdefault(section, {})[name] = value
        else:
            written[section] = value
    return plan_input(plan_from_dict(written))


def test_lengths_are_their_bounds_unless_the_run_file_has_them():
    spec = _input().job.rollout
    assert (spec.prompt_tokens, spec.longest_prompt, spec.prompts_from) == (512, 512, "assumed")
    assert (spec.reply_tokens, spec.replies_from) == (512, "assumed")
    spec = _input(rollout__prompt_tokens=60, rollout__reply_tokens=100).job.rollout
    assert (spec.prompt_tokens, spec.longest_prompt, spec.prompts_from) == (60, 60, "run file")
    assert (spec.reply_tokens, spec.replies_from) == (100, "run file")
    assert _input(rollout=None, objective={"kind": "lm"}, rewards=[]).job.rollout is None


def test_steps_of_the_run_tell_the_tokens_of_replies(tmp_path):
    entries = [{"step": step, "rollout/length": 10.0 * step} for step in range(1, 21)] + [{"step": 21}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"step": 2')
    of = partial(_input, rollout__reply_tokens=100, train={"steps": 30, "out": str(tmp_path)})
    spec = of().job.rollout
    # The mean of the latest ten batches: 110 to 200.
    assert (spec.reply_tokens, spec.replies_from) == (155, "measured")
    assert of(rollout__max_new_tokens=120).job.rollout.reply_tokens == 120


def test_a_reference_is_a_second_model_unless_adapters_are_switched_off():
    assert not _input().job.rollout.reference
    compared = {"kind": "grpo", "kl": "k3", "beta": 0.01}
    assert _input(objective=compared).job.rollout.reference
    assert not _input(objective=compared, lora={}).job.rollout.reference


def test_log_probs_are_those_that_the_batches_need():
    assert _input().job.passes.forwards == 0
    # Two updates with a batch, one after the other: the first has the old log-probs itself.
    assert _input(rollout__updates=2).job.passes.mean_forwards(2) == 0.5
    assert _input(rollout__passes=2).job.passes.forwards == 1
    assert _input(objective={"kind": "grpo", "kl": "reward", "beta": 0.01}).job.passes.forwards == 2


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_stages_and_parts_of_sequences_are_refused_and_never_chosen(axis):
    with pytest.raises(LayoutError, match=rf"\[rollout\] needs layout.{axis} = 1, but it is 2"):
        _input(**{f"layout__{axis}": 2})
    inputs = _input()
    report = plan(inputs.job, inputs.pinned, top=8, front=False)
    assert {(item.layout.pp, item.layout.cp) for item in (report.best, *report.others)} == {(1, 1)}


def test_plan_and_description_say_seconds_memory_and_what_is_assumed():
    inputs = _input(rollout__updates=2, rollout__reply_tokens=100)
    report = plan(inputs.job, inputs.pinned, top=0, front=False)
    data = rollout_data(inputs.job, report.best)
    seconds = rollout_step(inputs.job, report.best.layout)
    assert data["seconds"] == seconds.as_dict()
    assert data["seconds"]["updates"] == 2
    memory = data["memory"]
    assert memory["cache"] > 0
    assert memory["critic"] == 0
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
    [line] = [line.text for line in brief(report) if line.label == "rollout"]
    assert line == f"{time_line(data)}; {length_line(data)}"
    assert ", log-probs " in line
    assert ", 2 updates of " in line
    assert line.endswith(
        "prompts of 512 tokens (assumed, as many as a row leaves beside the longest reply), "
        "replies of 100 (rollout.reply_tokens)"
    )
    assert "per rank while it generates 16 replies of up to 1,024 tokens with their prompts: weights " in memory_line(
        data
    )
    json.dumps(data)
