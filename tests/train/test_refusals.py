"""Bad input: exit code 2, one sentence with the values and the remedy, and no file written or overwritten."""

import contextlib
import hashlib
import json
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
from tests.train.conftest import back_to, run_file

from kumi.cli import main
from kumi.config import load, resolve
from kumi.errors import LayoutError, RefusedError
from kumi.launch.standing import LaunchedRank
from kumi.storage import checkpoint
from kumi.train import run_folder
from kumi.train.finish import _compare
from kumi.train.metrics import read_metrics, truncate_metrics
from small_llama import SMALL_LLAMA


def content(folder, besides):
    """Return every file under `folder` with a hash of its bytes, except locks, logs and tokens, which can be remade."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", *besides))
    files = (path for path in files if not {"logs", "tokens"} & set(path.parts))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def refused(small, tmp_path, capfd):
    """refused(changes of the run file) -> the error; checks its exit code and that the folder has not changed."""
    folder = small.copy(tmp_path)

    def check(prepare=lambda folder: None, besides=(), **changes):
        prepare(folder)
        run = run_file(folder, **changes)
        before = content(folder, besides)
        with contextlib.chdir(folder):
            assert main(["train", str(run)]) == 2
        assert content(folder, besides) == before
        error = capfd.readouterr().err.strip()
        assert "\n" not in error, error
        return error

    return check


def new_run(folder):
    shutil.rmtree(folder / "run")


def test_unknown_key(refused):
    error = refused(layout={"tpp": 2})
    assert error == "ConfigError: layout.tpp: unknown key; did you mean 'tp'?"


def test_missing_data_file(refused):
    error = refused(new_run, data={"tokenizer": {"vocab_size": 300}, "sources": [{"path": "nothing/*.jsonl"}]})
    assert "nothing/*.jsonl" in error


def test_tokenizer_larger_than_the_vocabulary_of_the_model(refused):
    error = refused(new_run, data__tokenizer={"vocab_size": 999})
    assert "data.tokenizer.vocab_size=999 is larger than the model's vocab_size=320; use at most 320" in error


def test_given_tokenizer_larger_than_the_vocabulary_of_the_model(refused, small):
    error = refused(new_run, data__tokenizer=str(small.folder / "run" / "hf"), model__config__vocab_size=280)
    assert "has 300 entries, but the model's vocab_size is 280" in error


def test_a_degree_that_does_not_divide(refused):
    error = refused(new_run, cluster__devices_per_node=3, layout={"pp": 1, "cp": 1})
    assert "LayoutError: dp=3 does not divide the 8 sequences of a step; choose dp = 1, 2, 4 or 8" in error


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ([1, 2], "stage_layers=[1, 2] adds up to 3 layers, but the model has 2; give entries that add up to 2"),
        ([2], "stage_layers has 1 entries, but the layout has pp x stages = 2 stages; give one entry per stage"),
    ],
)
def test_stages_that_are_not_those_of_the_model(refused, sizes, sentence):
    layout = {"pp": 2, "stage_layers": sizes}
    assert sentence in refused(new_run, cluster__devices_per_node=2, layout=layout)


def test_a_trace_of_a_step_that_never_comes(refused):
    sentence = "train.trace_step=9 is after the last step, train.steps=6; use 1 to 6, or 0 to record no step"
    assert sentence in refused(new_run, train__trace_step=9)


def test_compiled_layers_that_should_put_gradients_off(refused):
    layout = {"pp": 2, "schedule": "zb-h1"}
    error = refused(new_run, cluster__devices_per_node=2, layout=layout, train__compile=True)
    assert "layout.schedule=zb-h1 defers weight gradients, which compiled layers cannot do" in error


def test_unsupported_architecture(refused):
    error = refused(new_run, model={"init": "random", "config": {"model_type": "mamba", "vocab_size": 320}})
    assert "ModelError" in error
    assert "mamba" in error
    assert "docs/models.md" in error


def test_not_enough_disk(refused, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = refused(new_run)
    assert "1000 B" in error


def test_a_folder_of_something_else(refused):
    def occupy(folder):
        new_run(folder)
        (folder / "run").mkdir()
        (folder / "run" / "thesis.tex").write_text("years of work")

    assert "has 1 files that kumi did not write (thesis.tex)" in refused(occupy)


def test_data_that_were_prepared_before_are_the_run_s_own(small, tmp_path, monkeypatch, capsys):
    folder = small.copy(tmp_path)
    new_run(folder)
    monkeypatch.chdir(folder)
    run = str(run_file(folder, data__cache="run/data", train__steps=1, optim={}))
    assert main(["data", "prepare", run]) == 0
    (folder / "run/config.part").write_text("")  # of a start that was killed
    (folder / "run/data/thesis.tex").write_text("years of work")
    capsys.readouterr()
    assert main(["train", run]) == 2
    assert "run has 1 files that kumi did not write (data/thesis.tex)" in capsys.readouterr().err
    (folder / "run/data/thesis.tex").unlink()
    assert main(["train", run]) == 0


def test_a_run_folder_without_its_configuration(refused):
    assert "run has checkpoints but no config.toml" in refused(lambda folder: (folder / "run/config.toml").unlink())


def test_a_damaged_probe(tmp_path):
    (tmp_path / "probe.safetensors").write_bytes(b"x")
    with pytest.raises(RefusedError, match=r"probe\.safetensors is damaged .* delete it and run the same command"):
        _compare(None, SimpleNamespace(out=tmp_path), tmp_path)


def test_a_folder_of_another_run(refused):
    error = refused(optim={"lr": 1e-4, "warmup_steps": 2}, train={"steps": 8, "out": "run"})
    assert "optim.lr: 0.01 -> 0.0001" in error
    assert "train.steps: 6 -> 8" in error
    assert "--allow-change optim.lr --allow-change train.steps" in error


def test_weights_that_are_not_there(refused):
    def model(folder):
        new_run(folder)
        (folder / "base").mkdir()
        shutil.copy(folder.parent / folder.name / "run.toml", folder / "base" / "unrelated.toml")
        (folder / "base" / "config.json").write_text(json.dumps(SMALL_LLAMA))

    assert "base has no .safetensors or .bin file; add the weights, or set model.init=random" in refused(
        model, model={"source": "base"}
    )


@pytest.mark.parametrize("harm", ["truncated", "flipped"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_checkpoint(refused, harm, ranks):
    def damage(folder):
        back_to(folder / "run", 4)
        shard = max(
            (folder / "run" / "checkpoints" / "step_000004").glob("*.safetensors"), key=lambda p: p.stat().st_size
        )
        raw = bytearray(shard.read_bytes())
        if harm == "truncated":
            raw = raw[:-100]
        else:
            raw[len(raw) // 2] ^= 4
        shard.write_bytes(raw)

    # The number of ranks may change, and is noted, before the checkpoint is read.
    error = refused(damage, besides=["config.toml", "plan.json"], cluster__devices_per_node=ranks)
    assert error.startswith("RefusedError: run/checkpoints/step_000004")
    assert ".safetensors" in error
    assert "step_000002" in error


@pytest.mark.parametrize("key", ["nonsense", "optim.lrr"])
def test_a_change_of_what_there_is_not(small, tmp_path, capfd, key):
    folder = small.copy(tmp_path)
    with contextlib.chdir(folder):
        assert main(["train", str(run_file(folder)), "--allow-change", key]) == 2
    assert f"RefusedError: --allow-change {key}: no key of a run file has this name" in capfd.readouterr().err


def test_allow_change_goes_on_with_the_new_value(small, tmp_path):
    folder = small.copy(tmp_path)
    with contextlib.chdir(folder):
        before = content(folder / "run" / "hf", ())
        run = run_file(folder, train={"steps": 8, "out": "run"}, export={"dtype": "bfloat16"})
        assert main(["train", str(run), "--allow-change", "train.steps"]) == 0
    assert checkpoint.latest(folder / "run" / "checkpoints").name == "step_000008"
    assert content(folder / "run" / "hf.1", ()) == before
    card = (folder / "run" / "hf" / "README.md").read_text()
    assert "| steps | 8 |" in card


def test_a_folder_in_use(small, tmp_path, capfd, monkeypatch):
    folder = small.copy(tmp_path)
    monkeypatch.setattr(run_folder.lock_folder.__wrapped__, "__defaults__", (0.2,))
    with contextlib.chdir(folder):
        run = run_file(folder)
        with run_folder.claim_run_folder(folder / "run", load(run)):
            assert main(["train", str(run)]) == 2
    assert "run is in use by another kumi process" in capfd.readouterr().err


def test_a_link_of_the_users_own_stops_no_resume(small, tmp_path):
    out = shutil.copytree(small.folder / "run", tmp_path / "run")
    assert {path.name for path in out.iterdir()} <= set(run_folder.RUN_FILES)
    (out / "latest").symlink_to("checkpoints/step_000006")
    with contextlib.chdir(small.folder):
        config = load("run.toml")
    with run_folder.claim_run_folder(out, config) as resumed:
        assert resumed
    (out / "checkpoints").rename(tmp_path / "elsewhere")
    (out / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match=r"checkpoints: is a link to .*let train.out be a folder there, or a link"):
        run_folder.claim_run_folder(out, config).__enter__()


def test_a_run_that_would_read_what_it_writes(refused):
    error = refused(new_run, data__sources=[{"path": "."}])
    assert "train.out: run lies inside data source '.'" in error
    assert "add 'run/**' to the source's exclude" in error
    error = refused(data__sources=[{"path": ".", "exclude": ["run/**"]}])
    assert "data.cache: tokens lies inside data source '.'" in error


def test_weights_of_another_model_are_refused_before_the_data_are_made(refused):
    def model(folder):
        shutil.move(folder / "run" / "hf", folder / "base")
        new_run(folder)
        config = json.loads((folder / "base" / "config.json").read_text())
        (folder / "base" / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))

    error = refused(model, model={"source": "base"})
    assert "'model.layers.0.mlp.gate_proj.weight' is (64, 32) in model.safetensors, but (96, 32) in the model" in error


@pytest.mark.parametrize(
    ("nodes", "place", "words"),
    [
        (2, None, "cluster.nodes=2, but this process was started alone"),
        (1, LaunchedRank(0, 2, 0), "needs 1 ranks, but WORLD_SIZE=2"),
    ],
)
def test_a_launcher_that_does_not_fit_the_layout(nodes, place, words, small):
    from kumi.train.start import _check_ranks

    with contextlib.chdir(small.folder):
        run = resolve(load("run.toml", [f"cluster.nodes={nodes}"]))
    with pytest.raises(LayoutError, match=words):
        _check_ranks(run, place)
    if nodes == 1:
        _check_ranks(run, LaunchedRank(0, 1, 0))


def test_two_starts_of_different_runs_at_once(small, tmp_path):
    """The second finds the folder empty, waits for the first, and must not take it over then."""
    with contextlib.chdir(small.folder):
        config = load("run.toml")
    out, first = tmp_path / "run", run_folder.claim_run_folder(tmp_path / "run", config)
    first.__enter__()
    (out / "config.toml").rename(tmp_path / "config.toml")
    failed = []

    def second():
        try:
            with run_folder.claim_run_folder(out, config.model_copy(update={"name": "other"})):
                pass
        except RefusedError as error:
            failed.append(str(error))

    waiting = threading.Thread(target=second)
    waiting.start()
    time.sleep(0.3)  # for it to have looked, and to wait
    (tmp_path / "config.toml").rename(out / "config.toml")
    first.__exit__(None, None, None)
    waiting.join()
    assert "name: 'small' -> 'other'" in failed[0]


def test_broken_lines_of_metrics_are_dropped_and_no_others(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\nbroken \xff\n[1]\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_metrics(file, 2)
    assert read_metrics(file) == [{"step": 1}, {"step": 2}]
    assert read_metrics(tmp_path / "gone.jsonl") == []
