"""A run is written down: its layout in the run folder, in checkpoints and in metrics, and all ranks compare it."""

import contextlib
import io
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.train.conftest import back_to, metrics, run_file

from kumi.cli import main
from kumi.config import load, open_run
from kumi.config.pinned_run import layout_keys
from kumi.config.run_plan import parse_plan
from kumi.errors import LayoutError, RefusedError
from kumi.parallel.mesh import init_distributed
from kumi.spec.layout import Layout
from kumi.storage import checkpoint
from kumi.train import start
from kumi.train.compare_ranks import check_agreement


@pytest.fixture
def folder(small, tmp_path, monkeypatch):
    """A copy of the finished run, in the working directory."""
    monkeypatch.chdir(small.copy(tmp_path))
    return tmp_path


def stored():
    """plan.json, and the layout in config.toml."""
    return json.loads(Path("run/plan.json").read_text()), tomllib.loads(Path("run/config.toml").read_text())["layout"]


def layouts():
    """The layout of each step in the metrics."""
    return [entry["layout"] for entry in metrics("run") if "train/loss" in entry]


def saved_layout(step):
    return Layout(**checkpoint.open(f"run/checkpoints/step_{step:06d}").meta["layout"])


def rewrite_plan(**layout):
    """Change the stored layout, as if the search had chosen it when the run began."""
    plan, _ = stored()
    Path("run/plan.json").write_text(json.dumps(plan | {"layout": plan["layout"] | layout}))


def train(*words):
    return main(["train", *words])


def test_the_layout_is_in_the_folder_the_checkpoints_and_the_metrics(folder, capsys):
    run = open_run(load("run.toml"))
    plan, layout = stored()
    assert plan["layout"] == layout == json.loads(json.dumps(layout_keys(run.layout)))
    assert (plan["pinned"], plan["layout"]["microbatch"]) == ({}, 8)
    assert plan["estimate"]["memory_bytes"] == run.memory.total
    assert layouts() == ["microbatch=8"] * 6
    meta = checkpoint.open("run/checkpoints/step_000006").meta
    assert (saved_layout(6), meta["run_digest"]) == (run.layout, run.digest)
    assert main(["describe", "run.toml", "--resolved"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["layout"] == layout


def test_a_resume_keeps_the_layout_though_the_search_would_choose_another(folder, capsys):
    back_to("run", 4)
    rewrite_plan(microbatch=4)
    assert train("run.toml") == 0
    assert layouts() == [f"microbatch={size}" for size in (8, 8, 8, 8, 4, 4)]
    assert (saved_layout(6).microbatch, stored()[1]["microbatch"]) == (4, 4)
    assert "microbatch: " not in capsys.readouterr().out


def test_an_edit_of_the_run_file_changes_it_and_later_starts_keep_that(folder, capsys):
    back_to("run", 2)
    assert train(str(run_file(folder, layout={"microbatch": 2}, train__steps=4)), "--allow-change", "train.steps") == 0
    line = "layout     microbatch: 8 -> 2, because layout.microbatch=2 is pinned now; losses are equal up to rounding"
    assert line in capsys.readouterr().out
    assert stored()[0]["pinned"] == {"microbatch": 2}
    for file in (str(run_file(folder)), "run/config.toml"):
        assert train(file, "train.steps=6", "--allow-change", "train.steps") == 0
        assert "microbatch: " not in capsys.readouterr().out
    assert layouts() == [f"microbatch={size}" for size in (8, 8, 2, 2, 2, 2)]


def test_on_other_machines_a_layout_is_chosen_anew_and_a_finished_run_keeps_its_own(folder, capfd):
    before = stored()
    assert train("run.toml", "cluster.devices_per_node=2") == 0
    assert "already finished" in capfd.readouterr().out
    assert stored() == before
    back_to("run", 4)
    assert train("run/config.toml", "cluster.devices_per_node=2") == 0
    assert "dp_replicate: 1 -> 2, microbatch: 8 -> 4, because the layout needs 1 devices" in capfd.readouterr().out
    assert layouts()[3:] == ["microbatch=8", *["dp_replicate=2 microbatch=4"] * 2]
    assert (stored()[0]["pinned"], stored()[1]["dp_replicate"]) == ({}, 2)


@pytest.mark.parametrize(("text", "reason"), [("{}", "'layout' is missing"), ('{"layout": ', "not valid JSON: ")])
def test_a_damaged_plan_is_refused(folder, capsys, text, reason):
    Path("run/plan.json").write_text(text)
    assert train("run.toml") == 2
    errors = capsys.readouterr().err
    assert f"run/plan.json is damaged ({reason}" in errors
    assert "), so the layout of the run is not known; restore the file, or delete it to let kumi" in errors


@pytest.mark.parametrize(
    ("section", "value", "reason"),
    [
        ("layout", {"tp": "two"}, "tp: must be an integer, got 'two'"),
        ("layout", {"tpp": 2}, "tpp: unknown key; did you mean 'tp'?"),
        ("made_for", {}, "model: required, but not set"),
    ],
)
def test_a_wrong_value_of_a_plan_is_named_in_plain_words(section, value, reason):
    written = {"layout": {}, "pinned": {}, "made_for": {}, "estimate": {}} | {section: value}
    with pytest.raises(RefusedError) as refused:
        parse_plan(written, "run/plan.json")
    assert f"run/plan.json is damaged ({reason}" in str(refused.value)
    assert "restore the file, or delete it" in str(refused.value)


class Meeting:
    """A rendezvous where rank 0 has sent `word`."""

    def __init__(self, **word):
        self.receive = lambda: json.dumps(word)


def test_other_ranks_take_the_layout_of_rank_0_unless_they_pin_another(folder, monkeypatch):
    launched = []
    monkeypatch.setattr(start, "_launch", lambda run, *_: launched.append(run.layout.words) or 0)
    run = open_run(load("run.toml"))
    plan = replace(run.plan, layout=replace(run.layout, microbatch=4)).plain()
    for pins in ({}, {"layout.microbatch": 2}):
        mine = open_run(load("run.toml", pins))
        start._join(mine, Meeting(finished=False, folder_mark="", numerics=str(run.numerics), plan=plan))
    assert launched == ["microbatch=4", "microbatch=2"]


def disagree(folder, mine, other):
    """Return this rank's error if rank 0 has the keys of `mine` and the others those of `other`."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        run = open_run(load("run.toml", mine if dist.get_rank() == 0 else other))
        try:
            check_agreement(run, init_distributed())
        except LayoutError as error:
            return str(error)
    return None


def test_ranks_that_disagree_refuse_to_start_in_one_sentence(folder):
    remedy = "; start all ranks with the same run file and overrides, on machines of one kind"
    pair, dp = {"cluster.devices_per_node": 2, "train.out": "new"}, "dp_replicate=2 microbatch=4"
    assert run_ranks(2, disagree, folder, pair, pair) == [None, None]
    message = f"rank 1 would train with the layout tp=2 microbatch=8, and rank 0 with {dp}{remedy}"
    assert run_ranks(2, disagree, folder, pair, pair | {"layout.tp": 2, "layout.pp": 1}) == [message] * 2
    message = f"rank 1 would train another run than rank 0 (different: optim, train){remedy}"
    assert run_ranks(2, disagree, folder, pair, pair | {"optim.lr": 1.0, "train.seed": 7}) == [message] * 2
