"""A resume refuses checkpoints of another model, optimizer or data, and never crops them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.train.conftest import back_to

from kumi.cli import main
from kumi.config import load, open_run
from kumi.convert import kumi_checkpoint
from kumi.convert.merge import _adapters_in_checkpoint
from kumi.errors import RefusedError
from kumi.spec.lora import Lora
from kumi.spec.saved_tensors import model_digest, model_shapes
from kumi.storage import checkpoint
from kumi.train.resume import last_checkpoint, restore_state, resume_notes

SMALLER = "model.config.intermediate_size=32"


@pytest.fixture
def stopped(small, tmp_path, monkeypatch):
    """A run that ended after step 4 of 6, in the working directory."""
    folder = small.copy(tmp_path)
    back_to(folder / "run", 4)
    monkeypatch.chdir(folder)
    return folder


def run_with(*overrides):
    return open_run(load("run.toml", overrides))


def rewritten(change, drop=()):
    """Write the last checkpoint again, `change` applied to its meta, without the tensors in `drop`."""
    saved = checkpoint.open("run/checkpoints/step_000004")
    tensors = {name: saved.read(name) for name in saved.tensors if name not in drop}
    pieces = [checkpoint.Piece(name, tuple(data.shape), (0,) * data.dim(), data) for name, data in tensors.items()]
    meta = {**saved.meta, **change}
    checkpoint.save("run/checkpoints/step_000005", pieces, {key: meta[key] for key in meta if meta[key] is not None})


@pytest.mark.parametrize("override", [SMALLER, "model.config.num_hidden_layers=1", "model.config.rope_theta=5e5"])
def test_another_model_is_refused_before_anything_is_written(stopped, capsys, override):
    config = (stopped / "run/config.toml").read_bytes()
    assert main(["train", "run.toml", override]) == 2
    assert f"--allow-change {override.partition('=')[0]}" in capsys.readouterr().err
    code = main(["train", "run.toml", override, "--allow-change", override.partition("=")[0]])
    printed = capsys.readouterr()
    if "rope_theta" in override:  # no tensor has another shape, and it was asked for
        assert code == 0
        assert "step_000004: continues with rope_theta: 'unset' -> 500000.0\n" in printed.out
    else:
        assert code == 2
        assert "step_000004: 'model/" in printed.err
        assert "restore the run's model, or start a new run in another train.out" in printed.err
        assert (stopped / "run/config.toml").read_bytes() == config


def test_a_config_that_was_edited_in_its_folder_is_refused_with_what_differs(stopped):
    """The run file names the folder, so that the edit is no change of the run file."""
    with pytest.raises(
        RefusedError, match=r"another config\.json \(intermediate_size: 64 -> 32\).*--allow-change model"
    ):
        resume_notes(run_with(SMALLER))
    with pytest.raises(RefusedError, match=r"mlp\.\w+_proj\.weight' is .*64.* in the checkpoint, .*32.* in the model"):
        resume_notes(run_with(SMALLER), ["model"])
    with pytest.raises(RefusedError, match=r"model\.layers\.1\.\S+' is \(.*\) in the checkpoint, missing in the model"):
        last_checkpoint(run_with("model.config.num_hidden_layers=1"))
    with pytest.raises(RefusedError, match=r"layers\.2\.\S+' is missing in the checkpoint, \(.*\) in the model"):
        last_checkpoint(run_with("model.config.num_hidden_layers=3"))
    assert resume_notes(run_with("model.config.torch_dtype=float32")) == []  # which is none of the model's


@pytest.mark.parametrize(
    ("change", "drop", "sentence"),
    [
        (
            {},
            ["optim/model.norm.weight/exp_avg"],
            r"norm.weight/exp_avg' is missing in the checkpoint, \(32,\) in the m",
        ),
        (
            {"optimizer": "sgd"},
            [],
            "has optimizer states of 'sgd', but optim.kind is 'adamw'; set optim.kind=sgd, or start",
        ),
    ],
)
def test_states_of_another_optimizer_are_refused(stopped, change, drop, sentence):
    rewritten(change, drop)
    with pytest.raises(RefusedError, match=sentence):
        last_checkpoint(run_with())


def test_other_data_are_refused(stopped):
    run = run_with()
    with pytest.raises(RefusedError, match=r"with digest .*, but tokens has 0123; restore the data files"):
        restore_state(last_checkpoint(run), SimpleNamespace(content="0123", folder="tokens"), run)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"model": None}, "has no digest of the model, so only names, shapes and config.json were compared"),
        ({"model": None, "hf_config": None}, "has no digest of the model, so only names, shapes were compared"),
        (
            {"model": "0", "kumi": "0.9"},
            "kumi 0.9 computed the model's digest otherwise, so only names, shapes and config.json",
        ),
    ],
)
def test_a_resume_says_what_could_not_be_compared(stopped, change, line):
    rewritten(change)
    lines = resume_notes(run_with())
    assert len(lines) == (line is not None)
    assert all(line in printed for printed in lines)


def test_the_digest_of_a_model_is_of_what_it_computes(stopped):
    spec = run_with().base
    assert model_digest(spec) == model_digest(replace(spec, lora=Lora(), notes=("read so",)))
    assert model_digest(spec) != model_digest(replace(spec, norm_eps=2 * spec.norm_eps))
    other = [replace(layer, parallel=True) for layer in spec.layers]
    assert model_digest(spec) != model_digest(replace(spec, layers=tuple(other)))


def test_adapters_of_a_larger_model_are_not_cropped(stopped):
    base, lora = run_with().base, Lora(r=2, targets=("o_proj",))
    larger = {
        name: torch.zeros(shape[0] + 8, *shape[1:]) for name, shape in model_shapes(replace(base, lora=lora)).items()
    }
    pieces = [checkpoint.Piece(name, tuple(data.shape), (0,) * data.dim(), data) for name, data in larger.items()]
    meta = {"hf_config": {}, "lora": {"r": 2, "targets": ["o_proj"]}}
    checkpoint.save("larger/step_000001", pieces, meta)
    with pytest.raises(RefusedError, match=r"lora_A\.weight' is \(10, 32\) in the checkpoint, \(2, 32\) in the model"):
        _adapters_in_checkpoint(kumi_checkpoint.open_saved_model(checkpoint.step_folder("larger", 1)), base)
