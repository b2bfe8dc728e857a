"""The objective decides the head: its job has a reward model, whose plan no other trainer gets."""

from __future__ import annotations

import pytest

from kumi.config.jobs import job
from kumi.config.load import plan_from_dict
from kumi.errors import ConfigError, ModelError
from kumi.export import TRAINERS, unsupported
from kumi.plan.memory.device_memory import rank_memory
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params, params

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}
LABEL = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def _job(kind, **changes):
    model = LLAMA | changes.pop("config", {})
    written = {
        "model": {"config": model},
        "cluster": {"source": "h100-sxm", "nodes": 1},
        "batch": {"seq_len": 512, "tokens_per_step": 65536},
        "objective": {"kind": kind},
        **changes,
    }
    return job(plan_from_dict(written))


def test_a_reward_model_has_a_score_in_place_of_logits():
    language, reward = _job("dpo"), _job("reward")
    assert (language.model.head, reward.model.head) == ("lm", "score")
    assert num_params(reward.model) == num_params(language.model) + 256
    assert params(reward.model)[-1].name == "score.weight"
    assert reward.model.notes[-1].startswith("score.weight (1, 256) is the head, in place of that of LlamaForCausalLM")
    assert _job("reward", config=LABEL).model.notes == ()
    layout = Layout(dp_shard=8, zero=3, microbatch=16)
    # A chunk of 2**27 logits takes at least ten bytes each; of a score there is the gradient of the hidden states.
    tokens = 16 * 512
    assert rank_memory(language, layout, 0).head > 10 * min(tokens * 32000, 2**27)
    assert rank_memory(reward, layout, 0).head <= tokens * 256 * (2 + 4)
    adapted = _job("reward", lora={"r": 4}).model
    assert [param.name for param in params(adapted) if not param.frozen][-1] == "score.weight"


def test_other_objectives_and_trainers_need_logits():
    with pytest.raises(ConfigError, match=r"objective.kind='sft' needs a language model, but LlamaForSeq.* no logits"):
        _job("sft", config=LABEL)
    with pytest.raises(ConfigError, match=r"sample.prompts with objective.kind='reward': .* remove sample.prompts"):
        _job("reward", sample={"prompts": ["a"]})
    with pytest.raises(ModelError, match=r"a granite model cannot become a reward model"):
        _job("reward", config={"model_type": "granite", "architectures": ["GraniteForCausalLM"]})
    for trainer in TRAINERS:
        assert any("objective.kind='reward'" in reason for reason in unsupported(_job("reward"), Layout(), trainer))
        assert not any("objective.kind" in reason for reason in unsupported(_job("lm"), Layout(), trainer))
