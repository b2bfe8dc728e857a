"""Reward models: the scores of transformers, on any layout, alone or with other rewards, through kills; refusals."""

import contextlib
import json
import math
import shutil

import pytest
import transformers
from tests.rollout.conftest import history, rollout_file, train
from tests.rollout.reward_folders import END, edit_config, make_reward_model, oracle, prepared, write_byte_tokenizer
from tests.train.conftest import losses

from kumi.config import load, open_run
from kumi.data import load_tokenizer
from kumi.errors import KumiError, LayoutError
from kumi.rollout.group import read_reply
from kumi.storage import checkpoint
from kumi.train.reward_model_files import check_reward_models

QUALITY = {"kind": "model", "name": "quality", "source": "rm", "weight": 0.5}
LETTERS = {"kind": "function", "name": "letters", "file": "reward.py:letters"}
STEPS = {"steps": 4, "out": "run", "doctor": False}
ROLLOUT = {"prompts": 4, "group_size": 3, "max_new_tokens": 8, "updates": 2, "samples_every": 0}
LAYOUTS = {
    "zero-3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "ddp": {"dp_replicate": 2},
    "zero-1": {"dp_shard": 2, "zero": 1},
    "tp-zero-3": {"tp": 2, "dp_shard": 2, "zero": 3},
}
OFTEN = ("zero-3", "tp")


def scored(folder, layout=None, **changes):
    """Run with the reward model, and return the exit code."""
    layout = layout or {}
    ranks = math.prod(degree for name, degree in layout.items() if name != "zero")
    changes = {"rewards": [QUALITY, LETTERS], "rollout": ROLLOUT, "train": STEPS, **changes}
    return train(folder, layout=layout, cluster={"devices_per_node": ranks}, **changes)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with data, and a reward model in `rm` with the tokenizer of the runs."""
    folder = prepared(tmp_path_factory.mktemp("base"))
    make_reward_model(folder / "rm", folder / "same")
    return folder


@pytest.fixture(scope="module")
def alone(base):
    assert scored(base) == 0
    return base / "run"


@pytest.fixture
def begun(base, tmp_path):
    """A folder with the same data and the same reward model, without a run."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    return tmp_path


def last_batch(out):
    """The replies of the last batch with their parts, by number of the prompt and of the reply."""
    [journal] = (out / "rollouts").iterdir()
    lines = [json.loads(line) for line in journal.read_text().splitlines() if line]
    replies = {(one["prompt"], one["sample"]): read_reply(one) for line in lines for one in line.get("replies", ())}
    parts = {one["prompt"]: one["parts"] for line in lines for one in line.get("scored", ())}
    return replies, parts


def test_scores_are_those_of_transformers(base, alone):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base / "rm", dtype="float64").eval()
    tokenizer, rows = load_tokenizer(base / "same"), (base / "prompts.jsonl").read_text().splitlines()
    prompts = {entry["prompt"]: json.loads(rows[entry["row"]])["prompt"] for entry in history(alone)}
    replies, parts = last_batch(alone)
    assert len(replies) == 12
    sequences = [[*tokenizer.backend.encode(prompts[number]).ids, *reply.ids] for (number, _), reply in replies.items()]
    own = [parts[number][sample]["quality"] for number, sample in replies]
    assert own == pytest.approx(oracle(model, sequences), rel=0, abs=1e-10)
    assert max(own) - min(own) > 0.1
    # The sum has the weights, as for all kinds.
    rewards = {entry["prompt"]: entry["rewards"] for entry in history(alone)}
    for (number, sample), quality in zip(replies, own, strict=True):
        total = 0.5 * quality + parts[number][sample]["letters"]
        assert rewards[number][sample] == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
)
def test_a_layout_has_the_rewards_of_one_process(alone, begun, name):
    assert scored(begun, LAYOUTS[name]) == 0
    own, other = history(begun / "run"), history(alone)
    assert [entry["checksums"] for entry in own] == [entry["checksums"] for entry in other]
    for entry, expected in zip(own, other, strict=True):
        assert entry["rewards"] == pytest.approx(expected["rewards"], rel=1e-10, abs=1e-10)
    assert losses(begun / "run") == pytest.approx(losses(alone), rel=1e-9, abs=1e-12)


def test_a_resumed_run_has_the_same_rewards_and_refuses_another_reward_model(alone, begun, capsys):
    assert scored(begun, train={**STEPS, "steps": 2}) == 0
    meta = checkpoint.open(begun / "run" / "checkpoints" / "step_000002").meta
    assert meta["reward_models"]["quality"]["folder"] == str((begun / "rm").resolve())
    words = ("--allow-change", "train.steps")
    changes = {"rewards": [QUALITY, LETTERS], "rollout": ROLLOUT, "train": STEPS, "layout": {}}
    make_reward_model(begun / "rm", begun / "same", seed=1)
    capsys.readouterr()
    assert train(begun, *words, **changes) != 0
    error = capsys.readouterr().err
    assert "scored by the reward model of 'quality'" in error
    assert "--allow-change rewards" in error
    make_reward_model(begun / "rm", begun / "same")
    assert train(begun, *words, **changes) == 0
    assert losses(begun / "run") == losses(alone)
    assert history(begun / "run") == history(alone)


def test_another_tokenizer_reads_the_text_again(begun):
    # Every byte is a token of the reward model, as its tokenizer has no merges.
    write_byte_tokenizer(begun / "same", begun / "bytes")
    make_reward_model(begun / "rm", begun / "bytes")
    rewards = [{**QUALITY, "weight": 1.0}]
    assert scored(begun, rewards=rewards, train={**STEPS, "steps": 1}) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(begun / "rm", dtype="float64").eval()
    policy, other = load_tokenizer(begun / "same"), load_tokenizer(begun / "bytes")
    rows = [json.loads(line)["prompt"] for line in (begun / "prompts.jsonl").read_text().splitlines()]
    texts = {entry["prompt"]: rows[entry["row"]] for entry in history(begun / "run")}
    replies, parts = last_batch(begun / "run")
    for (number, sample), reply in replies.items():
        text = policy.backend.decode(reply.ids.tolist(), skip_special_tokens=True)
        ids = other.encode(texts[number]) + other.encode(text) + ([] if reply.truncated else [END])
        own = parts[number][sample]["quality"]
        assert own is None if not text.strip() else own == pytest.approx(oracle(model, [ids])[0], rel=0, abs=1e-10)


REFUSED = {
    "absent": ({}, {"source": "nowhere"}, "is neither a folder nor a hub id"),
    "language": ({"architectures": ["GPT2LMHeadModel"]}, {}, "GPT2LMHeadModel, which gives logits and no score"),
    "labels": ({"id2label": {"0": "bad", "1": "good"}, "num_labels": None}, {}, "which have one label"),
    "padding": ({"pad_token_id": None}, {}, "has no pad_token_id in its config.json"),
    "padding outside": ({"pad_token_id": 320}, {}, "has pad_token_id 320 in its config.json"),
    "vocabulary": ({"vocab_size": 100}, {}, "entries for a model with vocab_size=100; restore the tokenizer"),
    "weights": ({"n_layer": 2}, {}, "h.1."),
    "tokens": ({}, {"source": "others", "reads": "tokens"}, "needs the policy's tokenizer, but"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_score_is_refused_before_the_run(begun, name):
    config, keys, words = REFUSED[name]
    edit_config(begun / "rm", **config)
    write_byte_tokenizer(begun / "same", begun / "bytes")
    make_reward_model(begun / "others", begun / "bytes")
    tokenizer = str(begun / "same")
    run_file = rollout_file(begun, rewards=[{**QUALITY, **keys}], data__tokenizer=tokenizer)
    with contextlib.chdir(begun), pytest.raises(KumiError) as caught:
        check_reward_models(open_run(load(run_file)))
    assert words in str(caught.value)


def test_a_layout_on_which_the_reward_model_cannot_lie_is_refused_and_not_chosen(begun):
    make_reward_model(begun / "rm", begun / "same", n_head=1)
    changes = {"rewards": [QUALITY], "cluster": {"devices_per_node": 2}}
    with contextlib.chdir(begun):
        with pytest.raises(
            LayoutError, match=r"reward 'quality' has a model that cannot lie on this layout: tp=2 does"
        ):
            open_run(load(rollout_file(begun, layout={"tp": 2}, **changes)))
        assert open_run(load(rollout_file(begun, **changes))).layout.tp == 1
