"""The length of a run in steps or epochs, and the shares of sources by weights or epochs."""

import json

import pytest
from tests.config.test_chosen_numerics import RUN

from kumi.config import load, load_plan
from kumi.config.resolve import resolve, with_prepared_data
from kumi.config.run_length import run_mixture, run_steps, sequences_of_epochs, source_epochs
from kumi.config.stored_config import changed_keys
from kumi.data import Source, prepare
from kumi.data.bpe import train as train_tokenizer
from kumi.errors import ConfigError
from kumi.report.run_description import describe_resolved, render_description
from kumi.train.run_summary import train_output

TRAIN = {key: value for key, value in RUN["train"].items() if key != "steps"}
PATHS = ("a.jsonl", "b.jsonl")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KUMI_NUMERICS", "reference")
    monkeypatch.setattr("kumi.config.local_machine._gpus", list)
    monkeypatch.chdir(tmp_path)


def of(*sources, **train):
    return load(RUN | {"train": TRAIN | train, "data": RUN["data"] | {"sources": list(sources) or [{"path": "a"}]}})


def prepared(tmp_path):
    """The run's prepared data: two sources of different sizes."""
    for path, count in zip(PATHS, (50, 20), strict=True):
        lines = (json.dumps({"text": f"{path} {number} " * (number % 9 + 1)}) for number in range(count))
        (tmp_path / path).write_text("\n".join(lines))
    sources = [Source(path) for path in PATHS]
    tokenizer = train_tokenizer(sources, 300, tmp_path / "run" / "data" / "tokenizer")
    return prepare(sources, tokenizer, tmp_path / "run" / "data" / "tokens")


@pytest.mark.parametrize(
    ("sources", "train", "error"),
    [
        ([], {}, "train: the run has no length; give either steps or epochs"),
        ([], {"steps": 5, "epochs": 2.0}, "train: steps=5 and epochs=2 both set the length of the run; give only one"),
        ([], {"epochs": 0}, "train.epochs: must be greater than 0, got 0"),
        ([{"path": "a", "epochs": 1}, {"path": "b"}], {"steps": 5}, "data: epochs is set for 1 of 2 sources, so"),
        (
            [{"path": "a", "epochs": 2, "weight": 3}],
            {"steps": 5},
            "data: source 'a' has epochs=2 and weight=3, which both set its share; give only one of them",
        ),
        (
            [{"path": "a"}, {"path": "b", "weight": 3}],
            {"epochs": 2},
            "train.epochs=2 reads every source equally often, so weight=3 of source 'b' cannot set its share; give the",
        ),
        ([{"path": "a", "max": 0}], {"steps": 5}, "data.sources.0.max: must be greater than 0, got 0"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(sources, train, error):
    with pytest.raises(ConfigError) as refused:
        of(*sources, **train)
    assert str(refused.value).startswith(error)


def test_sources_have_the_same_bounds_in_python():
    for field, value in (("epochs", 0.0), ("epochs", float("nan")), ("max", 0)):
        with pytest.raises(ConfigError, match=rf"data source 'a': {field}={value} must be"):
            Source("a", **{field: value})


def test_own_validation_files_are_documents_to_evaluate():
    sections = RUN | {"eval": {"every": 2}, "data": RUN["data"] | {"validation": 0.0}}
    with pytest.raises(ConfigError, match=r"eval\.every=2 has no documents to evaluate"):
        load(sections)
    load(sections, {"data.sources": [{"path": "a", "validation": "b"}]})


def test_weights_share_steps_and_epochs_share_rows():
    weighted = ({"path": "a", "weight": 2.0}, {"path": "b"})
    assert source_epochs(of(*weighted, steps=5)) is None
    assert source_epochs(of({"path": "a"}, {"path": "b"}, epochs=3)) == (1.0, 1.0)
    passes = ({"path": "a", "epochs": 2}, {"path": "b", "epochs": 0.5})
    assert source_epochs(of(*passes, steps=5)) == source_epochs(of(*passes, epochs=3)) == (2, 0.5)
    assert source_epochs(of({"path": "a", "weight": 2.0}, epochs=3)) == (1.0,)


def test_steps_follow_from_prepared_data(tmp_path):
    sources = tuple({"path": path, "epochs": epochs} for path, epochs in zip(PATHS, (1, 4), strict=True))
    config = of(*sources, epochs=2.5)
    run = resolve(config)
    assert run_steps(config) is run.planned_steps is None
    with pytest.raises(ConfigError, match=r"train\.epochs: the steps follow from the data, which is not prepared; run"):
        _ = run.steps
    batch = describe_resolved(run)["batch"]
    assert (batch["steps"], batch["tokens"], batch["epochs"]) == (None, None, 2.5)
    assert "2.5 epochs; steps follow from the data, which is not prepared" in shown(run)
    assert train_output(config).max_steps == 0
    store = prepared(tmp_path)
    rows = [source.rows for source in run_mixture(config, store).sources]
    assert rows[0] > rows[1] > 3
    sequences = round(2.5 * (rows[0] + 4 * rows[1]))
    assert sequences_of_epochs(config, store) == sequences
    run = with_prepared_data(run)
    assert run.steps == run_steps(config) == -(-sequences // run.batch.sequences)
    assert with_prepared_data(run) is run
    assert f"{run.steps} steps" in shown(run)
    assert train_output(config).max_steps == run.steps
    assert resolve(config).digest == run.digest != resolve(of(*sources, epochs=3.5)).digest
    with pytest.raises(
        ConfigError, match=rf"train\.trace_step=10000 is after the last step, which is {run.steps}; use"
    ):
        resolve(of(*sources, epochs=2.5, trace_step=10000))
    assert run_steps(load_plan({"model": RUN["model"], "batch": RUN["batch"]})) is None


def shown(run):
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(render_description(describe_resolved(run)))
    return captured.get()


def test_warm_up_is_a_share_of_the_steps_of_epochs(tmp_path):
    config = of(*({"path": path} for path in PATHS), epochs=4)
    before = resolve(config)
    assert before.optim.warmup_steps == 0
    prepared(tmp_path)
    after = with_prepared_data(before)
    assert after.optim.warmup_steps == -(-after.steps * 3 // 100) > 0


def test_more_epochs_are_a_change_of_that_key():
    assert [key for key, _ in changed_keys(of(epochs=2), of(epochs=3))] == ["train.epochs"]
    assert [key for key, _ in changed_keys(of(steps=2), of(epochs=3))] == ["train.steps", "train.epochs"]
