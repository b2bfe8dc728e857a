"""Tables [[rewards]] of a run file."""

import pytest
from pydantic import ValidationError

from kumi.config.load import plan_from_dict
from kumi.config.reward_section import RewardSection, reward_specs
from kumi.config.validation_messages import describe_errors
from kumi.errors import ConfigError
from kumi.rewards.reward_spec import REWARD_KINDS, BoxedReward, LengthReward

# The keys without a default that works.
REQUIRED = {
    "function": {"file": "rewards.py:reward"},
    "regex": {"pattern": "a"},
    "json-schema": {"schema_file": "a.json"},
    "model": {"source": "runs/rm/hf"},
    "judge": {"url": "http://judge/v1/chat/completions", "model": "m", "prompt": "{reply}"},
}


@pytest.mark.parametrize("kind", REWARD_KINDS)
def test_each_kind_has_the_defaults_of_its_dataclass(kind):
    keys = REQUIRED.get(kind, {})
    assert reward_specs([RewardSection(kind=kind, **keys)]) == [REWARD_KINDS[kind](**keys)]


def test_a_table_sets_the_keys_of_its_kind():
    written = [
        {"kind": "boxed", "name": "right", "weight": 2, "compare": "math-verify", "tolerance": 0.5},
        {"kind": "length", "soft_tokens": 10},
    ]
    assert reward_specs([RewardSection.model_validate(keys) for keys in written]) == [
        BoxedReward(name="right", weight=2.0, compare="math-verify", tolerance=0.5),
        LengthReward(soft_tokens=10),
    ]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "kind: required, but not set"),
        ({"kind": "exakt"}, "kind: must be 'function', 'exact'"),
        ({"kind": "exact", "colum": "a"}, "colum: unknown key; did you mean 'column'?"),
        ({"kind": "exact", "pattern": "a"}, "pattern is not a key of kind='exact', but of 'regex', 'judge'"),
        ({"kind": "exact", "weight": "1"}, "weight: must be a number, got '1'"),
        ({"kind": "code", "memory_mb": 0.5}, "memory_mb: must be an integer"),
        ({"kind": "code", "tests": "unit"}, "tests: must be 'assert' or 'stdin', got 'unit'"),
        ({"kind": "length", "soft_tokens": 0}, "reward 'length': soft_tokens=0 is not a number of tokens"),
    ],
)
def test_a_wrong_table_is_refused_in_a_sentence(keys, sentence):
    with pytest.raises(ValidationError) as error:
        RewardSection.model_validate(keys)
    assert sentence in describe_errors(error.value, RewardSection)


MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ([{"kind": "exact"}, {"kind": "exact"}], "rewards: two rewards have the name 'exact'"),
        ([{"kind": "exact", "weight": 0.0}], "rewards: every reward has weight=0"),
        ([{"kind": "exact"}], "rewards: objective.kind='lm' trains on the rows of the data"),
        ([{"kind": "exact", "colum": "a"}], "rewards.0.colum: unknown key; did you mean 'column'?"),
    ],
)
def test_rewards_of_a_run_file_are_checked(tables, sentence):
    written = {"model": {"config": MODEL, "init": "random"}, "batch": {"seq_len": 64, "tokens_per_step": 64}}
    with pytest.raises(ConfigError) as error:
        plan_from_dict({**written, "rewards": tables})
    assert sentence in str(error.value)
