import json
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from kumi.config import dump, from_dict, json_schema, load, load_plan, plan_from_dict
from kumi.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


def minimal(**sections):
    return {
        "name": "tiny",
        "model": {"config": {"model_type": "llama"}, "init": "random"},
        "batch": {"seq_len": 8, "tokens_per_step": 16},
        "data": {"sources": [{"path": "x.txt"}], "tokenizer": "tok"},
        "train": {"steps": 2, "out": "runs/tiny"},
        **sections,
    }


def message(written):
    with pytest.raises(ConfigError) as caught:
        from_dict(written)
    return str(caught.value)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_every_example_loads_and_survives_a_round_trip(example):
    config = load(example)
    assert from_dict(tomllib.loads(dump(config))) == config


def test_unknown_keys_are_named_with_their_path_and_a_suggestion():
    assert message(minimal(layout={"tpp": 2})) == "layout.tpp: unknown key; did you mean 'tp'?"
    assert message(minimal(lauout={})) == "lauout: unknown key; did you mean 'layout'?"
    assert message(minimal(learning={})).startswith("learning: unknown key")
    assert (
        message(minimal(train={"steps": 1, "out": "x", "lr": 1})) == "train.lr: unknown key; did you mean 'optim.lr'?"
    )
    wrong_source = {"sources": [{"path": "x", "wieght": 2}], "tokenizer": "tok"}
    assert message(minimal(data=wrong_source)) == "data.sources.0.wieght: unknown key; did you mean 'weight'?"


def test_a_key_of_another_objective_is_refused_with_the_kinds_that_have_it():
    text = message(minimal(objective={"kind": "reward", "beta": 0.1}))
    assert "beta is not a key of kind='reward', but of 'dpo', 'kto', 'orpo', 'simpo', 'cpo'" in text
    assert "its keys are margin, center_rewards" in text


def test_every_wrong_key_is_reported_at_once():
    text = message(minimal(optim={"lr": -1}, batch={"seq_len": 8}))
    assert "batch.tokens_per_step: required, but not set; add, for example, tokens_per_step = 65536 in [batch]" in text
    assert "optim.lr: must be greater than 0, got -1" in text


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"train": {"steps": "4", "out": "x"}}, "train.steps: must be an integer, got '4'"),
        ({"train": {"steps": 4.0, "out": "x"}}, "train.steps: must be an integer, got 4.0"),
        ({"train": {"steps": True, "out": "x"}}, "train.steps: must be an integer, got true"),
        ({"train": {"steps": 10**30, "out": "x"}}, f"must be less than or equal to 1000000000000, got {10**30}"),
        ({"train": {"steps": 4, "out": ""}}, "train.out: must not be empty, got ''"),
        ({"train": {"steps": 4, "out": "a\0"}}, r"train.out: must be text without null bytes, got 'a\x00'"),
        ({"optim": {"lr": float("inf")}}, "optim.lr: must be a finite number, got inf"),
        ({"optim": {"lr": "1e-3"}}, "optim.lr: must be a number, got '1e-3'"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas.1: must be less than 1, got 1.0"),
        ({"optim": {"betas": [0.9, 0.9, 0.9]}}, "optim.betas: must be a list of at most 2, got [0.9, 0.9, 0.9]"),
        ({"data": {"sources": [], "tokenizer": "x"}}, "data.sources: must be a list of at least 1, got []"),
        ({"data": {"sources": [{"path": "x"}], "tokenizer": 5}}, "data.tokenizer: must be text in quotes, got 5"),
        (
            {"data": {"sources": [{"path": "x"}], "tokenizer": {}}},
            "tokenizer.vocab_size: required, but not set; add, for example, vocab_size = 32768 in [data.tokenizer]",
        ),
        (
            {"data": {"sources": [{"path": "x"}, {}], "tokenizer": "x"}},
            'data.sources.1.path: required, but not set; add, for example, path = "data/*.jsonl" in entry 2 of '
            "data.sources",
        ),
        ({"log": {"trackers": "wandb"}}, "log.trackers: must be a list, got 'wandb'"),
        (
            {"eval": {"every": 5}, "data": {"sources": [{"path": "x"}], "tokenizer": "x", "validation": 0}},
            "hold out a share of the documents with data.validation, or set eval.every=0",
        ),
        ({"checkpoint": 5}, "checkpoint: must be a table of keys, got 5"),
        ({"export": {"push": "name"}}, "export.push: must be a hub id, org/name, got 'name'"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence_and_never_converted(sections, error):
    assert message(minimal(**sections)).endswith(error)


def test_a_model_is_described_once():
    assert "give either source or config" in message(minimal(model={"init": "random"}))
    assert "an inline config has no weights" in message(minimal(model={"config": {}}))


def test_a_plan_needs_a_model_and_a_batch_and_takes_every_run_file(tmp_path):
    plan = plan_from_dict({"model": {"config": {"model_type": "llama"}}, "batch": minimal()["batch"]})
    assert (plan.name, plan.data, plan.train) == ("plan", None, None)
    file = tmp_path / "run.toml"
    file.write_text(dump(from_dict(minimal())))
    assert load_plan(file, ["layout.tp=2"]).model_dump() == load(file, ["layout.tp=2"]).model_dump()
    missing = (
        r"batch: required, but not set; add the table \[batch\] with, .*; layout\.tpp: unknown key; did you mean 'tp'"
    )
    with pytest.raises(ConfigError, match=missing):
        plan_from_dict({"model": {"source": "x"}, "layout": {"tpp": 1}})


@pytest.mark.parametrize(
    "missing",
    ["name", "model", "batch", "data", "train", "batch.seq_len", "batch.tokens_per_step", "data.sources", "train.out"],
)
def test_a_file_without_a_key_is_valid_with_the_line_that_its_error_adds(missing, tmp_path):
    written = minimal()
    section, _, key = missing.partition(".")
    del (written[section] if key else written)[key or section]
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(written))
    with pytest.raises(ConfigError, match=f"^{missing}: required, but not set; add") as refused:
        load(file)
    file.write_text(with_advice(file.read_text(), str(refused.value).partition("; without these keys")[0]))
    load(file)


def with_advice(text, error):
    """Return the run file `text` with the tables and keys that `error` says to add."""
    for table, lines in re.findall(r"add the table \[([\w.]+)\] with, for example, (.*)", error):
        text += f"\n[{table}]\n" + re.sub(r", (?=\w+ = )", "\n", lines)
    for line, table in re.findall(r"add, for example, (.*?) in \[([\w.]+)\]", error):
        text = text.replace(f"[{table}]", f"[{table}]\n{line}")
    for line in re.findall(r"add, for example, (.*?) above the first table", error):
        text = f"{line}\n{text}"
    return text


def test_overrides_set_values_lists_and_inline_configs(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(dump(from_dict(minimal())))
    config = load(file, ["optim.lr=2e-5", "data.sources.0.weight=3", "train.out=a/b", "model.config.hidden_size=64"])
    assert config.optim.lr == 2e-5
    assert config.data.sources[0].weight == 3
    assert config.train.out == "a/b"
    assert config.model.config == {"model_type": "llama", "hidden_size": 64}


@pytest.mark.parametrize("override", ["optim.lr", "=3", "a..b=1", "data.sources.4.path=x", "name.first=x"])
def test_what_is_not_an_override_is_refused(tmp_path, override):
    file = tmp_path / "run.toml"
    file.write_text(dump(from_dict(minimal())))
    with pytest.raises(ConfigError):
        load(file, [override])


def test_files_that_are_no_run_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such run file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load("\0")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "bad.toml")


def test_the_schema_is_json_and_knows_every_section():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) >= {"name", "model", "cluster", "batch", "data", "optim", "layout", "train"}


def test_every_key_has_a_sentence():
    def undescribed(schema, path):
        for key, item in schema.get("properties", {}).items():
            if "$ref" not in item and "description" not in item:
                yield f"{path}.{key}"

    schema = json_schema()
    missing = [name for section, item in schema["$defs"].items() for name in undescribed(item, section)]
    assert missing == []


def test_a_run_file_that_is_for_planning_alone_is_said_to_be_one(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text('[model]\nsource = "x"\n[batch]\nseq_len = 8\ntokens_per_step = 8\n')
    with pytest.raises(
        ConfigError,
        match=r"train: required, but not set; add the .*; without these keys the file is valid for `kumi plan`",
    ):
        load(file)
    with pytest.raises(ConfigError) as refused:
        load(file, ["layout.tpp=2"])
    assert "kumi plan" not in str(refused.value)


@pytest.mark.parametrize("text", ["15s", "1m30s", "2 m"])
def test_the_silence_of_a_lost_node_is_a_duration(text):
    assert from_dict(minimal(recover={"lost": text})).recover.lost == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [("500 ms", "from 1s to 1h"), ("2h", "from 1s to 1h"), ("15", "; write a number and one of d, h")],
)
def test_the_silence_of_a_lost_node_has_limits(text, reason):
    assert f"recover.lost: '{text}' is not a duration{'' if reason[0] == ';' else ' '}{reason}" in message(
        minimal(recover={"lost": text})
    )
