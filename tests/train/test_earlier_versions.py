"""A run folder that an earlier version left in mid-run (tests/fixtures/mid_run) goes on as that version would have."""

import json
import tarfile
from pathlib import Path

import pytest
from tests.train.conftest import losses

from kumi.cli import main
from kumi.config import load, open_run
from kumi.config.stored_config import changed_keys, load_stored_config, read_stored_run, with_stored_values
from kumi.data import Source, load_tokenizer
from kumi.data.shards import plan
from kumi.errors import RefusedError
from kumi.files.run_names import CONFIG_FILE
from kumi.storage import checkpoint

ARCHIVE = Path(__file__).parents[1] / "fixtures/mid_run/mid_run.tar.gz"


def at_home(folder, run="run"):
    """Name `folder` as the place where the tokens of the run in it were prepared, so that they count as prepared."""
    tokens = folder / run / "data/tokens/meta.json"
    meta = json.loads(tokens.read_text())
    prepared = plan([Source("documents.jsonl")], load_tokenizer(folder / run / "data/tokenizer"), 0.1, False)
    tokens.write_text(json.dumps(meta | {"fingerprint": prepared.fingerprint}))


@pytest.fixture
def mid_run(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "mid_run"
    monkeypatch.chdir(folder)
    at_home(folder)
    return folder


def test_it_resumes_with_the_losses_of_the_run_that_was_not_killed(mid_run, capsys):
    assert main(["train", "run.toml", "cluster.devices_per_node=1"]) == 0
    printed = capsys.readouterr()
    assert "resumed after step 8" in printed.out
    assert "step_000008: has no digest of the model, so only names, shapes and config.json were compared" in printed.out
    assert "run/data/tokens: verified by its digests; added checksums of its blocks to meta.json" in printed.err
    expected = {int(step): loss for step, loss in json.loads((mid_run / "losses.json").read_text()).items()}
    assert losses(mid_run / "run") == pytest.approx(expected, rel=1e-9)
    # The layout, which this version did not store, is added to the folder and to the next checkpoint.
    plan = json.loads((mid_run / "run/plan.json").read_text())
    assert plan["layout"] == checkpoint.open(checkpoint.latest(mid_run / "run/checkpoints")).meta["layout"]
    assert plan["pinned"] == {"zero": 1}
    assert main(["train", "run.toml", "cluster.devices_per_node=1"]) == 0
    printed = capsys.readouterr()
    assert "resume " not in printed.out  # the last checkpoint has a digest
    assert printed.err == ""


def test_keys_that_the_stored_configuration_lacks_are_no_change(mid_run):
    stored = (mid_run / "run" / CONFIG_FILE).read_text()
    for line in ('compress = "none"\n', "seed = 0\n"):
        assert line in stored
        stored = stored.replace(line, "")
    (mid_run / "run" / CONFIG_FILE).write_text(stored)
    changed = changed_keys(load_stored_config(mid_run / "run"), open_run(load("run.toml")).config)
    assert [key for key, _ in changed if not key.startswith("layout.")] == []  # which is written down only since


def now_in_force(*overrides):
    config = load("run.toml", overrides)
    return with_stored_values(config, read_stored_run(config))


def test_a_later_default_is_not_in_force_unless_the_run_file_asks_for_it(mid_run, monkeypatch):
    """As if the default of `optim.grad_clip` had become 1 when `optim.eps` was added."""
    monkeypatch.setattr("kumi.config.stored_config.EARLIER_VALUES", {"optim.eps": {"optim.grad_clip": 0.0}})
    stored = (mid_run / "run" / CONFIG_FILE).read_text()
    (mid_run / "run" / CONFIG_FILE).write_text(stored.replace("eps = 1e-08\n", "").replace("grad_clip = 1.0\n", ""))
    assert now_in_force().optim.grad_clip == 0
    assert load_stored_config(mid_run / "run").optim.grad_clip == 0
    for asked in ("optim.grad_clip=1.0", "optim.eps=1e-8"):
        assert now_in_force(asked).optim.grad_clip == 1
    (mid_run / "run" / CONFIG_FILE).write_text(stored.replace("eps = 1e-08\n", ""))  # which had asked for 1
    assert now_in_force().optim.grad_clip == 1
    (mid_run / "run" / CONFIG_FILE).unlink()
    assert now_in_force().optim.grad_clip == 1


def test_a_configuration_of_a_later_version_is_refused(mid_run):
    with open(mid_run / "run" / CONFIG_FILE, "a") as file:
        file.write("[later]\nkey = 1\n")
    with pytest.raises(RefusedError, match="is not valid in this version of kumi"):
        load_stored_config(mid_run / "run")
