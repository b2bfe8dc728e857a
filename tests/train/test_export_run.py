"""`kumi convert RUN OUT`: a checkpoint of a run, chosen by name, comes out as training's own export does."""

from __future__ import annotations

import contextlib
import json
import math
import shutil

import pytest
from safetensors.torch import load_file
from tests.train.conftest import metrics, run_file

from kumi.cli import main
from kumi.convert.hf.card import check_verified
from kumi.errors import ConfigError, RefusedError
from kumi.storage import checkpoint
from kumi.train.export_run import export_run

# The lines of a card that say how it was verified, and that differ between a run's export and a conversion.
VERIFIED = ("| verified |", "| SHA-256")


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """A folder with a run whose best evaluation is not its last, with two sources; tests only read it."""
    folder = small.copy(tmp_path_factory.mktemp("best"))
    file = run_file(
        folder,
        train={"steps": 8, "out": "best-run"},
        eval={"every": 1},
        checkpoint={"every": 2, "keep": 9, "best": "eval/loss"},
        # A rate that grows until the loss does, whatever the kernels' rounding.
        optim={"lr": 3.0, "warmup_steps": 8, "schedule": "constant"},
        data__sources=[{"path": "documents.jsonl"}, {"path": "documents_of_others.jsonl"}],
        data__cache="tokens-of-two",
    )
    lines = (folder / "documents.jsonl").read_text().splitlines()
    (folder / "documents_of_others.jsonl").write_text("\n".join(line.replace("model", "MODEL") for line in lines))
    with contextlib.chdir(folder):
        assert main(["train", str(file)]) == 0
    return folder / "best-run"


def _best_step(run):
    return json.loads((run / "checkpoints" / "best.json").read_text())["step"]


def _card(folder):
    lines = (folder / "README.md").read_text().splitlines()
    return [line for line in lines if not line.startswith(VERIFIED)]


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def test_an_export_to_a_url_is_that_to_a_folder(run, tmp_path, capsys, monkeypatch):
    """Also its card, which has the facts of the run."""
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("KUMI_CACHE", str(tmp_path / "cache"))
    assert main(["convert", str(run), str(tmp_path / "out"), "--checkpoint", "best"]) == 0
    assert main(["convert", str(run), f"file://{tmp_path}/store/out", "--checkpoint", "best"]) == 0
    assert f"file://{tmp_path}/store/out" in capsys.readouterr().out
    assert _files(tmp_path / "store/out") == _files(tmp_path / "out")
    assert _card(tmp_path / "store/out") == _card(tmp_path / "out")


def test_a_run_on_a_store_is_exported_as_one_in_a_folder(run, tmp_path, capsys, monkeypatch):
    """The best checkpoint by default; also one that is neither the best nor the last."""
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("KUMI_CACHE", str(tmp_path / "cache"))
    best = _best_step(run)
    other = next(step for step in (2, 4, 6) if step != best)
    for words in ((), ("--checkpoint", "last"), ("--checkpoint", str(other))):
        name = words[-1] if words else "default"
        assert main(["convert", str(run), str(tmp_path / name), *words]) == 0
        chosen = capsys.readouterr().out.splitlines()[0]
        assert main(["convert", f"file://{run}", str(tmp_path / f"url-{name}"), *words]) == 0
        assert capsys.readouterr().out.splitlines()[0] == chosen
        assert _files(tmp_path / name) == _files(tmp_path / f"url-{name}")
    assert main(["convert", f"file://{run}", str(tmp_path / "none"), "--checkpoint", "999"]) == 2
    assert f"file://{run}: has no checkpoint of step 999; its steps are " in capsys.readouterr().err


def test_the_last_checkpoint_comes_out_as_the_export_of_training(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.chdir(run.parent)  # data.cache is relative
    assert main(["convert", str(run), str(out), "--checkpoint", "last", "--verify"]) == 0
    assert capsys.readouterr().out.startswith("model      the last checkpoint, of step 8\n")
    assert _files(out) == _files(run / "hf")
    assert _card(out) == _card(run / "hf")
    assert "tokenizer.json" in _files(out)
    check_verified(out)


def test_the_best_checkpoint_is_the_default_where_the_run_keeps_one(run, tmp_path, capsys):
    step = _best_step(run)
    assert step < 8
    assert main(["convert", str(run), str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["chosen"] == f"the best checkpoint, of step {step}, which the run keeps by checkpoint.best"
    assert (result["to"], result["verified"]) == ("hf", False)
    assert main(["convert", str(run), str(tmp_path / "best"), "--checkpoint", "best"]) == 0
    assert main(["convert", str(run), str(tmp_path / "step"), "--checkpoint", str(step)]) == 0
    assert _files(tmp_path / "out") == _files(tmp_path / "best") == _files(tmp_path / "step")
    saved = checkpoint.open(run / "checkpoints" / f"step_{step:06d}")
    written = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    assert written.equal(saved.read("model/model.norm.weight"))
    assert not written.equal(load_file(run / "hf" / "model.safetensors")["model.norm.weight"])


def test_the_card_has_the_evaluation_of_the_checkpoint(run, tmp_path):
    step = _best_step(run)
    export_run(run, tmp_path / "best", verify=False)
    entries = {entry["step"]: entry for entry in metrics(run) if "eval/loss" in entry}
    best, last = entries[step], entries[8]
    card = (tmp_path / "best" / "README.md").read_text()
    assert f"| steps | {step} |" in card
    assert f"After step {step}, on held-out data of {best['eval/tokens']:,} tokens.\n" in card
    assert "It is the best evaluation of the run by eval/loss." in card
    assert "| data | loss (nats a token) | perplexity |" in card
    names = ["", *(key.removeprefix("eval/loss") for key in best if key.startswith("eval/loss/"))]
    assert len(names) == 3
    for name in names:
        loss = best[f"eval/loss{name}"]
        perplexity = math.exp(loss)
        shown = f"{perplexity:.4f}" if perplexity < 1e4 else f"{perplexity:.4g}"
        assert f"| {name[1:] or 'all'} | {loss:.4f} | {shown} |" in card
    of_last = (run / "hf" / "README.md").read_text()
    assert f"| all | {last['eval/loss']:.4f} |" in of_last
    assert f"The best evaluation of the run by eval/loss was {best['eval/loss']:.4f}, after step {step}." in of_last


def test_no_local_path_is_in_a_card(run, tmp_path):
    export_run(run, tmp_path / "out", verify=False)
    for folder in (run / "hf", tmp_path / "out"):
        assert str(run.parent) not in (folder / "README.md").read_text()


def test_a_checkpoint_between_evaluations_names_the_step_of_the_last_one(small, tmp_path):
    folder = small.copy(tmp_path)
    export_run(folder / "run", tmp_path / "out", checkpoint="4", verify=False)
    assert "The run did not evaluate the model on held-out data." in (tmp_path / "out" / "README.md").read_text()
    entry = {"step": 3, "eval/loss": 2.0, "eval/tokens": 7}
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    export_run(folder / "run", tmp_path / "again", checkpoint="4", verify=False)
    card = (tmp_path / "again" / "README.md").read_text()
    assert "After step 3, the last evaluation before this checkpoint, on held-out data of 7 tokens." in card
    assert "| all | 2.0000 | 7.3891 |" in card


def test_other_formats_and_dtypes(run, tmp_path):
    step = _best_step(run)
    assert export_run(run, tmp_path / "kumi", to="kumi", checkpoint="best").to == "kumi"
    saved = checkpoint.open(run / "checkpoints" / f"step_{step:06d}")
    written = checkpoint.open(tmp_path / "kumi").read("model/model.norm.weight")
    assert written.equal(saved.read("model/model.norm.weight"))
    copy = shutil.copytree(run, tmp_path / "copy")
    config = (copy / "config.toml").read_text()
    assert 'dtype = "auto"' in config
    (copy / "config.toml").write_text(config.replace('dtype = "auto"', 'dtype = "bfloat16"'))
    for dtype, expected in ((None, written.bfloat16()), ("float32", written)):
        export_run(copy, tmp_path / str(dtype), dtype=dtype, verify=False)
        assert load_file(tmp_path / str(dtype) / "model.safetensors")["model.norm.weight"].equal(expected)


def test_a_run_that_has_moved(run, tmp_path):
    """Neither its data nor its folder are where they were, and the tokenizer is in the run's folder."""
    moved = shutil.copytree(run, tmp_path / "moved")
    for meta in moved.glob("checkpoints/*/meta.json"):
        assert str(run.parent) in meta.read_text()
    away = run.rename(run.with_name("gone"))
    try:
        tokens = away.parent / "tokens-of-two"
        tokens.rename(away.parent / "gone-tokens")
        shutil.copytree(away.parent / "gone-tokens" / "tokenizer", moved / "data" / "tokenizer")
        export_run(moved, tmp_path / "out", checkpoint="last")
        assert _files(tmp_path / "out") == _files(moved / "hf")
    finally:
        away.rename(run)
        (run.parent / "gone-tokens").rename(run.parent / "tokens-of-two")


def test_without_its_configuration_a_run_still_has_its_weights(run, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(run / "checkpoints", bare / "checkpoints")
    export_run(bare, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype.itemsize == 4
    assert "made by | kumi convert" in (tmp_path / "out" / "README.md").read_text()


def _damaged(run, tmp_path, step):
    copy = shutil.copytree(run, tmp_path / "damaged")
    (shard,) = (copy / "checkpoints" / f"step_{step:06d}").glob("shard_*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    return copy


def test_a_damaged_checkpoint_is_never_chosen(run, tmp_path):
    damaged = _damaged(run, tmp_path, 8)
    chosen = export_run(damaged, tmp_path / "out", checkpoint="last", verify=False).chosen
    *steps, _ = [checkpoint.step_of(folder) for folder in checkpoint.list_complete(run / "checkpoints")]
    assert chosen == f"the last checkpoint, of step {steps[-1]} (damaged, and not chosen: step_000008)"
    existing = ", ".join(f"step {step}" for step in steps)
    existing += rf", best \(step {_best_step(run)}\), last \(step {steps[-1]}\)"
    with pytest.raises(RefusedError, match=f"step_000008.*is damaged.*choose one of {existing}"):
        export_run(damaged, tmp_path / "no", checkpoint="8")
    assert not (tmp_path / "no").exists()


def test_a_half_written_checkpoint_is_never_chosen(small, tmp_path):
    folder = small.copy(tmp_path) / "run"
    shutil.copytree(folder / "checkpoints/step_000006", folder / "checkpoints/step_000007.tmp")
    chosen = export_run(folder, tmp_path / "out", verify=False).chosen
    assert chosen == "the last checkpoint, of step 6, because the run keeps no best one"
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; choose one of step 2, step 4, step 6, last"):
        export_run(folder, tmp_path / "no", checkpoint="7")


def test_a_damaged_best_checkpoint_is_refused(run, tmp_path):
    damaged = _damaged(run, tmp_path, _best_step(run))
    for checkpoint_name in (None, "best"):
        with pytest.raises(RefusedError, match=r"is damaged.*choose one of step .*, last \(step 8\)"):
            export_run(damaged, tmp_path / "no", checkpoint=checkpoint_name)
    (damaged / "checkpoints/best.json").write_text("{")
    with pytest.raises(RefusedError, match=r"best\.json: not valid JSON.*choose one of step"):
        export_run(damaged, tmp_path / "no")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "{out}", "--checkpoint", "newest"], "neither 'best' nor 'last' nor a step; choose one of step"),
        (["{run}", "{out}", "--checkpoint", "999"], "has no checkpoint of step 999; choose one of step"),
        (["{run}", "{out}", "--to", "adapter"], "has no checkpoint of adapters; use --to hf"),
        (["{run}", "{out}", "--config", "x"], "only Megatron checkpoints need one"),
        (["{run}", "{out}", "--layout", "tp=2"], "only kumi checkpoints are sharded by a layout"),
        (["{run}", "{run}/hf"], "exists and is not empty"),
        (["{run}/hf", "{out}", "--checkpoint", "last"], "is one model, not a run folder"),
        (["{run}/hf", "{out}", "--to", "adapter"], "is not the folder of a run"),
    ],
)
def test_refusals(run, tmp_path, capsys, words, message):
    assert main(["convert", *(word.format(run=run, out=tmp_path / "out") for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_generate_and_eval_choose_the_same_checkpoint(run, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"text": "the model learns"}\n')
    step = _best_step(run)
    best = f"the best checkpoint, of step {step}"
    for flags, words in (
        ([], f"{best}, which the run keeps by checkpoint.best"),
        (["--checkpoint", "best"], best),
        (["--checkpoint", "last"], "the last checkpoint, of step 8"),
        (["--checkpoint", "4"], "the checkpoint of step 4"),
    ):
        assert main(["eval", str(run), "--data", str(tmp_path / "texts.jsonl"), "--json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["models"][0]["chosen"] == words
        assert main(["generate", str(run), "--prompt", "the", "--max-new-tokens", "1", *flags]) == 0
        assert f"model      {words}\n" in capsys.readouterr().err
