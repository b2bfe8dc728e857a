"""A run that generates texts gets a layout that can generate, where the run file leaves the choice."""

from __future__ import annotations

import pytest

from kumi.config.jobs import plan_input
from kumi.config.load import plan_from_dict
from kumi.plan.session import plan

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "max_position_embeddings": 131072,
}
REPLIES = {"name": "sums", "kind": "exact_match", "path": "sums.jsonl"}


def _input(**changes):
    written = {
        "model": {"config": MODEL},
        "cluster": {"source": "h100-sxm", "nodes": 1},
        # One row for all devices, which only parts of sequences or of the model can share.
        "batch": {"seq_len": 131072, "tokens_per_step": 131072},
        **changes,
    }
    return plan_input(plan_from_dict(written))


@pytest.mark.parametrize(
    "generates", [{"sample": {"prompts": ["a"], "every": 5}}, {"eval": {"tasks": [REPLIES]}}], ids=["samples", "task"]
)
def test_runs_that_generate_have_no_stages_and_no_parts_of_sequences(generates):
    limited = _input(**generates)
    assert limited.pinned == {"pp": 1, "cp": 1}
    assert _input().pinned == {}
    layout = plan(limited.job, limited.pinned).best.layout
    assert (layout.pp, layout.cp) == (1, 1)


def test_pins_of_the_run_file_stay():
    assert _input(sample={"prompts": ["a"], "every": 5}, layout={"cp": 2}).pinned == {"pp": 1, "cp": 2}
    assert _input(sample={"prompts": ["a"]}, layout={"cp": 2}).pinned == {"cp": 2}
