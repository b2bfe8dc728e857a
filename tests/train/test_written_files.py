"""Files that an earlier version wrote (tests/fixtures/written_files) are read as that version would read them."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
from tests.train.conftest import losses
from tests.train.test_earlier_versions import at_home

from kumi.cli import main
from kumi.data import open_store
from kumi.plan.search.ranking import TIE_TOLERANCE
from kumi.storage import checkpoint

ARCHIVE = Path(__file__).parents[1] / "fixtures/written_files/written_files.tar.gz"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "written_files"


@pytest.fixture
def files(unpacked, monkeypatch):
    """The folder of the archive, as the working directory."""
    monkeypatch.chdir(unpacked)
    return unpacked


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_run_goes_on_with_the_losses_of_one_that_did_not_end(files, capsys):
    at_home(files, "half")
    expected = json.loads((files / "expected.json").read_text())["losses"]
    command = ["train", "half.toml", "cluster.devices_per_node=1", "--allow-change", "train.steps"]
    assert main(command) == 0
    assert "resumed after step 4" in capsys.readouterr().out
    assert losses(files / "half") == pytest.approx({int(step): loss for step, loss in expected.items()}, rel=1e-9)


def test_the_stored_layout_is_the_run_s(files, capsys):
    assert main(["describe", "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["tp"] == 2
    saved = checkpoint.open(checkpoint.latest(files / "run/checkpoints"))
    assert saved.meta["layout"] == json.loads((files / "run/plan.json").read_text())["layout"]


def test_a_checkpoint_becomes_the_model_that_was_exported(files, tmp_path):
    assert (
        main(["convert", "run/checkpoints/step_000004", str(tmp_path / "hf"), "--to", "hf", "--dtype", "float32"]) == 0
    )
    expected = json.loads((files / "expected.json").read_text())["sha256"]
    assert sha256(tmp_path / "hf/model.safetensors") == expected["run/hf/model.safetensors"]


def test_adapters_are_merged_into_their_base_which_has_moved(files, tmp_path):
    base = ["--to", "hf", "--base", "run/hf"]
    assert main(["convert", "adapted/adapter", str(tmp_path / "merged"), *base]) == 0
    assert main(["convert", "adapted/checkpoints/step_000004", str(tmp_path / "same"), *base]) == 0
    assert sha256(tmp_path / "merged/model.safetensors") == sha256(tmp_path / "same/model.safetensors")


def test_a_store_opens_and_has_the_documents_of_its_run(files):
    prepared, own = open_store(files / "tokens/tokens"), open_store(files / "run/data/tokens")
    assert prepared.train_tokens == own.train_tokens > 1000
    assert prepared.documents == own.documents == 60
    assert prepared.content == own.content


def _with_keys_of(stored, value):
    """Return `value` without the keys that `stored` lacks, which later versions have added, and with numbers that equal
    those near them: from Python 3.12 on, `sum` rounds less."""
    if isinstance(stored, list):
        return [_with_keys_of(*pair) for pair in zip(stored, value, strict=True)]
    if not isinstance(stored, dict):
        return pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
    return {name: _with_keys_of(stored[name], item) for name, item in value.items() if name in stored}


def test_a_stored_plan_is_estimated_alike_and_a_new_search_ties_with_it(files, capsys):
    """Estimates have become more exact: the head is an FSDP unit of its own, and GPUs have other kernels than CPUs."""
    stored = json.loads((files / "plan.json").read_text())["best"]
    assert main(["plan", "plan.toml", "plan.margin=0.02", "--json"]) == 0
    pinned = json.loads(capsys.readouterr().out)["best"]
    for key in ("layout", "fits"):
        assert _with_keys_of(stored[key], pinned[key]) == stored[key], key
    assert pinned["peak_memory"] == pytest.approx(stored["peak_memory"], rel=0.01)
    assert pinned["step_seconds"] == pytest.approx(stored["step_seconds"], rel=0.1)
    sent, before = (
        sum(message["bytes"] * message["count"] for message in plan["collectives"]) for plan in (pinned, stored)
    )
    assert sent == before
    assert main(["plan", "planned.toml", "plan.margin=0.02", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["best"]
    assert chosen["step_seconds"] <= (1 + TIE_TOLERANCE) * pinned["step_seconds"]
