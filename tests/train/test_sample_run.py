"""Samples during training: a page every k steps, the same on every layout, and refused where none can be drawn."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from tests.train.conftest import losses, run_file

from kumi.cli import main
from kumi.config import load, resolve
from kumi.data import load_tokenizer
from kumi.errors import ConfigError
from kumi.train.run_folder import RUN_FILES
from kumi.train.samples import encode_prompts
from kumi.train.start import check_run
from text_models import CHAT

SAMPLE = {
    "prompts": ["the model", "```\n# no heading\x1b[2J", "a token"],
    "every": 2,
    "max_new_tokens": 6,
    "temperature": 0.9,
}


def trained(small, folder, **changes) -> Path:
    """Train four steps in `folder` with samples after every second one; return the run folder."""
    small.copy(folder)
    path = run_file(folder, sample=SAMPLE, train={"steps": 4, "out": "sampled"}, precision={"kind": "fp64"}, **changes)
    with contextlib.chdir(folder):
        assert main(["train", str(path)]) == 0
    return folder / "sampled"


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory) -> Path:
    return trained(small, tmp_path_factory.mktemp("alone"))


def test_a_page_every_two_steps_in_which_nothing_is_markup(alone):
    pages = {path.name: path.read_text() for path in (alone / "samples").iterdir()}
    assert sorted(pages) == ["step-2.md", "step-4.md"]
    assert pages["step-2.md"] != pages["step-4.md"].replace("step 4", "step 2")
    page = pages["step-4.md"]
    assert page.startswith("# Samples after step 4\n\n## Prompt 1\n\n```text\nthe model\n```\n\nReply (")
    assert "````text\n```\n# no heading\\x1b[2J\n````" in page
    assert "nats a token" in page
    assert {path.name for path in alone.iterdir()} <= set(RUN_FILES)


def test_samples_change_nothing_of_the_training(small, alone, tmp_path):
    small.copy(tmp_path)
    path = run_file(tmp_path, train={"steps": 4, "out": "plain"}, precision={"kind": "fp64"})
    with contextlib.chdir(tmp_path):
        assert main(["train", str(path)]) == 0
    assert losses(tmp_path / "plain") == losses(alone)


@pytest.mark.parametrize(
    "layout", [{"dp_shard": 2, "zero": 3}, pytest.param({"tp": 2}, marks=pytest.mark.exhaustive)], ids=["zero-3", "tp"]
)
def test_pages_of_two_ranks_are_those_of_one(small, alone, tmp_path, layout):
    out = trained(small, tmp_path, cluster={"devices_per_node": 2}, layout=layout)
    for name in ("step-2.md", "step-4.md"):
        assert (out / "samples" / name).read_text() == (alone / "samples" / name).read_text()


def test_prompts_of_a_file_are_those_of_the_run_file(small, alone, tmp_path, monkeypatch):
    rows = [json.dumps({"prompt": prompt, "id": number}) + "\n" for number, prompt in enumerate(SAMPLE["prompts"])]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    monkeypatch.setitem(SAMPLE, "prompts", "prompts.jsonl")
    out = trained(small, tmp_path)
    assert (out / "samples/step-4.md").read_text() == (alone / "samples/step-4.md").read_text()


def test_messages_of_a_file_are_rendered_up_to_the_reply(tmp_path, monkeypatch):
    """A run whose tokenizer has a chat template, and one whose tokenizer has none."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHAT, "with")
    shutil.copytree(CHAT, "without", ignore=shutil.ignore_patterns("*.jinja"))
    Path("documents.jsonl").write_text('{"text": "a"}\n')
    Path("prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "a<|im_end|>"}\n')

    def prompts(folder):
        data = {"data__tokenizer": folder, "sample": {"prompts": "prompts.jsonl"}}
        path = run_file(tmp_path, model__config__vocab_size=1024, **data)
        run = resolve(load(path))
        check_run(run)
        return encode_prompts(run)

    tokenizer = load_tokenizer("with")
    chat, plain = prompts("with").ids
    assert tokenizer.decode(chat) == prompts("with").texts[0]
    assert tokenizer.decode(chat).endswith("<|im_start|>assistant\n")
    assert plain == tokenizer.encode("a<|im_end|>")
    assert prompts("with").stop_ids == {tokenizer.eos_id, tokenizer.backend.token_to_id("<|im_end|>")}
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1: has messages, but without has no chat template"):
        prompts("without")
    Path("prompts.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"sample\.prompts prompts\.jsonl .*: is no file"):
        prompts("with")


def test_prompts_are_texts_or_a_file(tmp_path):
    with pytest.raises(ConfigError, match=r"sample\.prompts: must be a list of texts, or the name of a file, got 3"):
        load(run_file(tmp_path, sample={"prompts": 3}))


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_a_layout_without_generation_is_refused_before_anything_is_written(small, tmp_path, capsys, axis):
    small.copy(tmp_path)
    path = run_file(
        tmp_path, sample=SAMPLE, train={"steps": 4, "out": "sampled"}, cluster={"devices_per_node": 2}, layout={axis: 2}
    )
    with contextlib.chdir(tmp_path):
        assert main(["train", str(path)]) == 2
    assert f"sample.every=2 needs layout.{axis} = 1, but it is 2" in capsys.readouterr().err
    assert not (tmp_path / "sampled").exists()
