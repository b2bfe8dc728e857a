"""Runs on preferences and on replies with labels: the reference is computed once, in any layout, and compared with the
policy before the first step."""

from __future__ import annotations

import contextlib
import math
import random

import numpy as np
import pytest
from tests.train.conftest import back_to, losses, metrics, run_file

from chat_rows import message, save_tokenizer, write_rows
from kumi.cli import main
from kumi.data import Source, reference_file
from kumi.data.bpe import train as train_tokenizer

WORDS = ["the", "json", "value", "is", "a", "list", "of", "keys", "and", "numbers"]


def _reply(draw, *, good):
    """A reply of the first or of the last words, so that a model learns at once which kind is preferred."""
    return message("assistant", " ".join(draw.choices(WORDS[:5] if good else WORDS[5:], k=draw.randrange(4, 16))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("preferences"), random.Random(0)
    bpe = train_tokenizer([Source("{stdlib}/json/*.py")], 300, folder / "bpe")
    save_tokenizer(bpe, folder / "tokenizer")
    pairs, replies = [], []
    for number in range(90):
        prompt = [message("user", f"ask {number} " + " ".join(draw.choices(WORDS, k=4)))]
        pairs.append({"prompt": prompt, "chosen": [_reply(draw, good=True)], "rejected": [_reply(draw, good=False)]})
        replies.append({"prompt": prompt, "completion": [_reply(draw, good=number % 3 > 0)], "label": number % 3 > 0})
    write_rows(folder / "pairs.jsonl", pairs)
    write_rows(folder / "replies.jsonl", replies)
    return folder


def _run(folder, kind, **changes):
    path = "replies.jsonl" if kind == "kto" else "pairs.jsonl"
    return run_file(
        folder,
        data={"sources": [{"path": path}], "tokenizer": "tokenizer", "validation": 0.1, "cache": kind, "workers": 1},
        model__config__max_position_embeddings=256,
        batch={"seq_len": 256, "tokens_per_step": 2048},
        objective={"kind": kind},
        **{
            "optim": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
            "train": {"steps": 4, "out": "run"},
            **changes,
        },
    )


def _train(folder, kind, *overrides, **changes):
    with contextlib.chdir(folder):
        return main(["train", str(_run(folder, kind, **changes)), *overrides])


def _stored(folder, kind, side="train"):
    return sorted((folder / kind / "tokens").glob(f"*_{side}_*.reference.*"))


def _losses(folder, out):
    with contextlib.chdir(folder):
        return losses(out)


def test_dpo_begins_at_log_2_and_goes_on_where_it_was(folder):
    assert _train(folder, "dpo") == 0
    first = _losses(folder, "run")
    assert first[1] == pytest.approx(math.log(2), abs=1e-6)
    assert first[4] < first[1] - 0.01
    with contextlib.chdir(folder):
        step = metrics("run")[0]
        back_to("run", 2)
    assert step["train/rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert step["train/logps/chosen"] == pytest.approx(-math.log(300), rel=0.1)
    # The reference is computed again, by the weights before the first step.
    before = [path.read_bytes() for path in _stored(folder, "dpo")]
    for path in _stored(folder, "dpo"):
        path.unlink()
    assert _train(folder, "dpo") == 0
    assert _losses(folder, "run") == first
    assert [path.read_bytes() for path in _stored(folder, "dpo")] == before


LAYOUTS = [
    {"pp": 2},
    pytest.param({"cp": 2}, marks=pytest.mark.exhaustive),
    pytest.param({"tp": 2}, marks=pytest.mark.exhaustive),
    pytest.param({"dp_shard": 2, "zero": 3}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reference_of_one_layout_serves_another(folder, layout):
    assert _train(folder, "dpo", train={"steps": 1, "out": "one"}) == 0
    before = {path: path.stat().st_mtime_ns for path in _stored(folder, "dpo")}
    out = "_".join(layout)
    changes = {"cluster": {"devices_per_node": 2}, "layout": layout, "train": {"steps": 2, "out": out}}
    assert _train(folder, "dpo", **changes) == 0
    assert {path: path.stat().st_mtime_ns for path in _stored(folder, "dpo")} == before
    assert _losses(folder, out)[1] == pytest.approx(math.log(2), abs=1e-6)
    sums = _sums(folder, "dpo")
    for path in _stored(folder, "dpo"):
        path.unlink()
    assert _train(folder, "dpo", **changes, export={"enabled": False}, checkpoint={"every": 0}) == 0  # it is finished
    assert _train(folder, "dpo", **{**changes, "train": {"steps": 2, "out": f"{out}_2"}}) == 0
    assert _sums(folder, "dpo") == pytest.approx(sums, rel=1e-5, nan_ok=True)


def _sums(folder, kind):
    [path] = _stored(folder, kind)
    return _read(path, kind).sums.tolist()


def _read(path, kind, units=None):
    count = (path.stat().st_size - reference_file._HEAD.itemsize) // 8 - 2
    units = count // (4 if kind == "kto" else 7)
    sums = reference_file.read_sums(path, units if kind == "kto" else 2 * units, units)
    assert sums is not None
    return sums


def test_kto_begins_at_a_half(folder):
    assert _train(folder, "kto", train={"steps": 4, "out": "kto_run"}) == 0
    with contextlib.chdir(folder):
        first, *_, last = (entry for entry in metrics("kto_run") if "train/loss" in entry)
    assert first["train/loss"] == pytest.approx(0.5, abs=1e-6)
    assert first["train/kl"] == pytest.approx(0, abs=1e-4)
    assert last["train/rewards/chosen"] != 0
    assert not np.isnan(_read(_stored(folder, "kto")[0], "kto").mismatched).all()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("sums", "the stored sums themselves disagree"),
        ("trained", "the mask disagrees: the reference was computed for other trained tokens"),
        ("tokens", "the data disagrees: the reference was computed for other tokens"),
        ("fingerprint", "the policy disagrees: its weights are not those"),
    ],
)
def test_a_reference_that_is_not_the_policy_is_refused_with_the_cause(folder, capfd, damage, reason):
    assert _train(folder, "dpo", train={"steps": 1, "out": "whole"}) == 0
    paths = _stored(folder, "dpo")
    before = [path.read_bytes() for path in paths]
    for path in paths:
        sums = _read(path, "dpo")
        for name in ("sums", "trained", "tokens", "fingerprint"):
            setattr(sums, name, np.array(getattr(sums, name)))
        sums.sums[:] -= 1.0
        if damage != "sums":
            getattr(sums, damage)[:] += 1.0
        reference_file.write_sums(path, sums)
    capfd.readouterr()
    assert _train(folder, "dpo", train={"steps": 1, "out": f"damaged_{damage}"}) == 2
    error = capfd.readouterr().err
    assert "the reference is the policy before its first step, but a sequence of" in error
    assert reason in error
    for path, content in zip(paths, before, strict=True):
        path.write_bytes(content)


def test_another_reference_is_named_and_adapters_can_be_left_out(folder, capfd):
    """A policy that starts from a trained model, with the untrained one as its reference, and with itself."""
    assert _train(folder, "simpo", train={"steps": 1, "out": "untrained"}, optim={"lr": 1e-30, "warmup_steps": 0}) == 0
    assert _train(folder, "simpo", train={"steps": 4, "out": "trained"}) == 0
    model = {"source": "trained/hf", "init": "pretrained"}
    train = {"steps": 2, "out": "other"}
    capfd.readouterr()
    assert _train(folder, "dpo", model=model, train=train, reference={"model": "untrained/hf"}) == 0
    assert "another model than the policy, so not compared with it at step 0" in capfd.readouterr().out
    assert abs(_losses(folder, "other")[1] - math.log(2)) > 0.01
    lora = {"r": 4, "alpha": 8.0}
    for kind in ("stored", "adapters-off"):
        train = {"steps": 3, "out": kind}
        assert _train(folder, "dpo", model=model, train=train, reference={"kind": kind}, lora=lora) == 0
    stored, off = _losses(folder, "stored"), _losses(folder, "adapters-off")
    assert stored[1] == pytest.approx(math.log(2), abs=1e-6)
    assert off == pytest.approx(stored, abs=1e-5)
    assert off[3] != off[1]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("reference.kind='adapters-off'", "needs adapters that can be left out"),
        ("objective.kind='simpo'", "compares with no reference model"),
        ("reference.model='nowhere/at-all'", "reference.model"),
    ],
)
def test_a_reference_without_meaning_is_refused(folder, capfd, override, reason):
    changes = {"reference": {"model": "here"}} if "simpo" in override else {}
    assert _train(folder, "dpo", override, **changes) == 2
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.exhaustive)])
def test_a_run_goes_on_in_another_layout_as_it_was(folder, kind):
    """In float64, where only the order of sums differs."""
    out, precision = f"{kind}_64", {"kind": "fp64"}
    assert _train(folder, kind, precision=precision, train={"steps": 4, "out": out}, checkpoint={"every": 2}) == 0
    first = _losses(folder, out)
    with contextlib.chdir(folder):
        back_to(out, 2)
    other = {"cluster": {"devices_per_node": 2}, "layout": {"pp": 2}, "precision": precision}
    allowed = ("--allow-change", "layout.pp", "--allow-change", "cluster.devices_per_node")
    assert _train(folder, kind, *allowed, **other, train={"steps": 4, "out": out}, checkpoint={"every": 2}) == 0
    assert _losses(folder, out) == pytest.approx(first, rel=1e-10)
