"""`kumi generate`: prompts, files of prompts, chats, memory; and nothing that a model writes steers a terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kumi
from kumi.cli import main
from kumi.errors import ConfigError, FitError
from kumi.inference import planned_memory
from kumi.inference.chat_session import ChatSession, chat
from kumi.inference.generation import Generation, ModelChoice
from kumi.inference.generation_settings import Flags
from kumi.inference.load_model import load_model
from text_models import write_chat_model, write_word_model

# Colours, a title, a cleared screen, a C1 control, a right-to-left override, a bell, a carriage return.
NASTY = ("\x1b[31mred", "\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\u202eevil", "\x07", "\rover", "<end>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("generate") / "tiny")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory) -> Path:
    """A model whose every token is a sequence that terminals obey."""
    folder = tmp_path_factory.mktemp("nasty") / "nasty"
    folder.mkdir()
    return write_word_model(folder, NASTY)


def generated(capsys, *arguments):
    """Return the JSON that `kumi generate` prints."""
    assert main(["generate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_reply_is_that_of_transformers_with_the_same_template(folder, capsys):
    content = generated(capsys, folder, "--prompt", "hello there", "--max-new-tokens", 12, "--temperature", 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "hello there"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = reference.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
    (reply,) = content["replies"]
    assert reply["prompt_tokens"] == ids["input_ids"].shape[1]
    assert reply["ids"] == out.tolist()[: len(reply["ids"])]
    assert reply["reply"] == tokenizer.decode(reply["ids"], skip_special_tokens=True)
    assert content["settings"]["temperature"] == 0


def test_samples_differ_and_do_not_depend_on_the_batch(folder, capsys):
    options = (folder, "--prompt", "one", "--prompt", "two", "--max-new-tokens", 8, "--temperature", 1.0)
    options += ("--num-return-sequences", 3, "--seed", 4)
    few, many = (generated(capsys, *options, "--batch-size", size)["replies"] for size in (1, 6))
    assert [reply["ids"] for reply in few] == [reply["ids"] for reply in many]
    assert [(reply["prompt"], reply["sample"]) for reply in few] == [(p, s) for p in ("one", "two") for s in range(3)]
    assert len({tuple(reply["ids"]) for reply in few}) == 6


def test_python_gives_the_replies_of_the_command_line(folder, capsys):
    content = generated(capsys, folder, "--prompt", "one", "--max-new-tokens", 6, "--temperature", 0)
    model = load_model(folder)
    for given in (folder, model):
        (reply,) = kumi.generate(given, "one", max_new_tokens=6, temperature=0)
        assert reply.ids == content["replies"][0]["ids"]
    chat_replies = kumi.generate(model, [[{"role": "user", "content": "one"}], "one"], max_new_tokens=6, temperature=0)
    assert [reply.ids for reply in chat_replies] == [reply.ids] * 2
    with pytest.raises(ConfigError, match="greedy"):
        kumi.generate(model, "one", temperature=0, num_return_sequences=2)


def test_a_file_of_prompts_goes_on_where_it_was(folder, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    rows = [{"prompt": text, "id": number} for number, text in enumerate(("one", "two", "three", "four"))]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n")
    arguments = [folder, "--prompts", prompts, "--out", out, "--max-new-tokens", 5, "--temperature", 1]
    assert generated(capsys, *arguments)["earlier"] == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    for complete, part in ((2, b""), (1, lines[1][:30]), (0, lines[0][:12])):
        out.write_bytes(b"".join(lines[:complete]) + part)
        assert generated(capsys, *arguments)["earlier"] == complete
        texts = {json.loads(line)["line"]: json.loads(line)["reply"] for line in out.read_bytes().splitlines()}
        assert texts == {json.loads(line)["line"]: json.loads(line)["reply"] for line in lines}
    records = sorted(map(json.loads, out.read_text().splitlines()), key=lambda record: record["line"])
    assert [(record["id"], record["prompt"]) for record in records] == [(row["id"], row["prompt"]) for row in rows]
    content = out.read_bytes()
    for changed in (["--temperature", 0.5], ["--seed", 3]):
        assert main(["generate", *map(str, [*arguments, *changed])]) == 2
        assert "other settings" in capsys.readouterr().err
    prompts.write_text(prompts.read_text().replace("two", "2"))
    assert main(["generate", *map(str, arguments)]) == 2
    assert "--prompts has changed" in capsys.readouterr().err
    assert out.read_bytes() == content
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    assert main(["generate", *map(str, [*arguments, "--out", notes])]) == 2
    assert notes.read_text() == "my notes\n"


def obeyed(data: bytes) -> list[str]:
    """Return the characters of `data` that a terminal obeys or that hide text; line breaks and tabs are no such."""
    return [char for char in data.decode() if not (char.isprintable() or char in "\n\t")]


def test_a_terminal_obeys_nothing_that_a_model_or_a_prompt_says(nasty, tmp_path):
    prompt = "".join(NASTY[:-1])
    command = [sys.executable, "-m", "kumi", "generate", str(nasty), "--max-new-tokens", "30", "--temperature", "2"]
    for arguments in (["--prompt", prompt], ["--prompt", prompt, "--num-return-sequences", "9"]):
        done = subprocess.run([*command, *arguments], capture_output=True, check=True)
        assert obeyed(done.stdout + done.stderr) == []
    assert b"\\x1b[31mred" in done.stdout
    assert b"\\u202eevil" in done.stdout
    done = subprocess.run([*command, "--json"], input=prompt.encode(), capture_output=True, check=True)
    assert obeyed(done.stdout) == []
    assert json.loads(done.stdout)["replies"][0]["prompt"] == prompt


def test_chat_remembers_its_turns_and_answers_commands(folder):
    shown = io.StringIO()
    generation = Generation(ModelChoice(folder), Flags(max_new_tokens=4, temperature=0))
    session = ChatSession(generation, shown.write)
    first = session.answer("hello")
    second = session.answer("more")
    assert [message["content"] for message in session.messages] == ["hello", first, "more", second]
    prompts = [generation.settings.encode([session.messages[:count]])[0] for count in (1, 3)]
    new = f"{session.cache.computed} of {len(prompts[1])} prompt tokens computed"
    assert session.cache.computed < len(prompts[1]) - len(prompts[0])
    assert shown.getvalue().count(new) == 1
    (alone,) = kumi.generate(folder, [session.messages[:3]], max_new_tokens=4, temperature=0)
    assert alone.text == second  # the reply to the conversation, not to its last turn
    session.reset()
    assert session.answer("hello") == first
    lines = iter(["", "/help", "/reset", "hello", "x" * 2000, "/exit", "never read"])
    shown.truncate(0)
    chat(generation, lambda _: next(lines), shown.write)
    assert first in shown.getvalue()
    assert "leaves no room for a reply" in shown.getvalue()
    assert next(lines) == "never read"


def test_an_interrupted_reply_ends_the_reply_only(folder):
    shown: list[str] = []

    def write(text: str) -> None:
        shown.append(text)
        if sum(map(len, shown)) > 2 and "interrupted" not in text:
            raise KeyboardInterrupt

    session = ChatSession(Generation(ModelChoice(folder), Flags(max_new_tokens=50, temperature=0)), write)
    text = session.answer("hello")
    assert "interrupted" in shown[-1]
    assert session.messages[1]["content"] == text


def test_a_model_that_does_not_fit_is_refused_with_the_batch_that_does(folder, monkeypatch):
    spec = load_model(folder).decoder.spec
    arguments = (spec, "float32", 200)
    options = {"most": 8, "batch_size": None}
    batch, need = planned_memory.fitting_batch(*arguments, 2**40, **options)
    assert batch == 8
    single = planned_memory.fitting_batch(*arguments, 2**40, **{**options, "batch_size": 1})[1]
    batch, _ = planned_memory.fitting_batch(*arguments, (need.total + single.total) // 2, **options)
    assert 1 <= batch < 8
    with pytest.raises(FitError, match=f"use --batch-size {batch}$"):
        planned_memory.fitting_batch(*arguments, (need.total + single.total) // 2, **{**options, "batch_size": 8})
    with pytest.raises(FitError, match="not even one sequence fits"):
        planned_memory.fitting_batch(*arguments, single.weights, **options)
    monkeypatch.setattr(planned_memory, "free_memory", lambda: single.weights)
    assert main(["generate", str(folder), "--prompt", "hello"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--prompts", "b.txt"], "both set"),
        (["--prompts", "b.txt"], "need each other"),
        (["--prompts", "b.txt", "--out", "o.jsonl"], "no file"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p"),
        (["--prompt", "a", "--dtype", "int8"], "int8"),
        (["--prompt", "a", "--checkpoint", "best"], "checkpoint"),
    ],
)
def test_wrong_flags_are_refused(folder, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_batch_are_those_of_the_files(folder):
    assert load_model(folder, dtype="bfloat16").decoder.head_weight.dtype == torch.bfloat16
