"""A store of examples: what its units are, and that its bytes depend on nothing else than its inputs."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_rows import chat, contents, message, trained_texts, write_rows
from kumi.data import Source, Tokenizer, inspect, load_tokenizer, pool, prepare, shards
from kumi.data.selection import Selection, document_digests
from kumi.errors import ConfigError


@pytest.fixture(autouse=True, scope="module")
def small_units():
    """Jobs of 8 KiB, so that small inputs are cut as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MIN_BYTES", 8 << 10)
        yield


def test_every_row_is_trained_as_generated_or_a_fault(stored_chats, chats, chat_tokens):
    expected = []
    for row in chats:
        if not isinstance(row, dict) or "messages" not in row or len(row["messages"]) < 5:
            continue
        replies = [m for m in row["messages"] if m["role"] == "assistant"]
        spans = [
            (f"({m['reasoning_content']}) " if "reasoning_content" in m else "") + m["content"] + "<|im_end|>"
            for m in replies
        ]
        expected += [[span] for span in spans] if "reasoning_content" in replies[0] else [spans]
    both = trained_texts(stored_chats, chat_tokens) + trained_texts(stored_chats, chat_tokens, "validation")
    assert sorted(both) == sorted(expected)
    entry = stored_chats.sources[0]
    assert (entry.kind, entry.rows) == ("chat", 300)
    assert entry.faults == dict.fromkeys(("broken-json", "empty-completion", "no-reply", "other-kind"), 1)
    split = sum(isinstance(row, dict) and "reasoning_content" in row.get("messages", [{}])[-1] for row in chats)
    assert entry.samples == {"1": 296 - split, "2": split}
    assert entry.train_units + entry.validation_units == 296 + split
    assert (entry.used, entry.ignored) == (("messages",), ("id",))


def test_the_counts_are_those_of_the_tokens(stored_chats):
    (entry,) = stored_chats.sources
    roles = np.zeros(6, np.int64)
    for side in ("train", "validation"):
        file = stored_chats.open_units(entry, side)
        parts = file.tokens_between(0, file.unit_count)
        roles += np.bincount(parts.mask >> 1, minlength=6)
        assert len(parts.ids) == getattr(entry, f"{side}_tokens")
        assert int((parts.mask & 1).sum()) == getattr(entry, f"{side}_trained") > 0
        assert file.unit_count == getattr(entry, f"{side}_units")
    names = ("template", "system", "user", "assistant", "tool", "developer")
    assert entry.roles == dict(zip(names, roles.tolist(), strict=True))
    assert min(entry.roles[name] for name in names[:4]) > 0


def test_faults_have_their_lines_in_the_whole_file(stored_chats):
    faults = [json.loads(line) for line in (stored_chats.folder / "faults.jsonl").read_text().splitlines()]
    assert [fault["line"] for fault in faults] == [51, 121, 201, 241]


def test_equal_rows_are_on_one_side_whatever_their_ids(stored_chats):
    (entry,) = stored_chats.sources
    train, held_out = (stored_chats.open_units(entry, side).columns["digest"] for side in ("train", "validation"))
    assert not set(train.tolist()) & set(held_out.tolist())
    rows = len(set(train.tolist()) | set(held_out.tolist()))
    assert rows == 295  # 296 usable ones; two are equal
    assert 0.1 < len(held_out) / (len(train) + len(held_out)) < 0.3


def test_the_bytes_do_not_depend_on_workers_or_on_the_cut(
    chat_source, stored_chats, chat_tokens, tmp_path, monkeypatch
):
    prepare([chat_source], chat_tokens, tmp_path / "three", validation=0.2, workers=3)
    assert contents(tmp_path / "three") == contents(stored_chats.folder)
    monkeypatch.setattr(shards, "_MIN_BYTES", 1 << 30)
    prepare([chat_source], chat_tokens, tmp_path / "whole", validation=0.2, workers=1)
    assert without_fingerprint(tmp_path / "whole") == without_fingerprint(stored_chats.folder)


def without_fingerprint(folder: Path) -> dict[str, Any]:
    files: dict[str, Any] = contents(folder)
    meta = json.loads(files["meta.json"])
    return {**files, "meta.json": {name: value for name, value in meta.items() if name != "fingerprint"}}


def no_work(*arguments: Any) -> None:
    raise AssertionError("work was done again")


KILLED = """
import sys
from kumi.data import Source, load_tokenizer, prepare, shards
shards._MIN_BYTES = 8 << 10
prepare([Source(sys.argv[1])], load_tokenizer(sys.argv[2]), sys.argv[3], validation=0.2, workers=2)
"""


def start(source: Source, tokens: Tokenizer, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", KILLED, source.path, str(tokens.folder), str(out)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def test_a_killed_preparation_goes_on_where_it_was(chat_source, stored_chats, chat_tokens, tmp_path, monkeypatch):
    out = tmp_path / "out"
    process = start(chat_source, chat_tokens, out)
    while len(list(out.glob("cache/*/unit.json"))) < 3:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "meta.json").exists()
    jobs: list[Any] = []
    answers = pool.run_jobs
    monkeypatch.setattr(pool, "run_jobs", lambda todo, workers: answers(jobs.extend(todo) or todo, workers))
    prepare([chat_source], chat_tokens, out, validation=0.2, workers=1)
    assert 0 < len(jobs) <= len(shards.plan([chat_source], chat_tokens, 0.2, False).units) - 3
    assert contents(out) == contents(stored_chats.folder)
    assert not (out / "cache").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_ten_kills_at_random_leave_the_same_bytes(chat_source, stored_chats, chat_tokens, tmp_path, seed):
    draw = random.Random(seed)
    out = tmp_path / "out"
    begin = time.monotonic()
    assert start(chat_source, chat_tokens, tmp_path / "timed").wait() == 0
    whole = time.monotonic() - begin
    for _ in range(10):
        process = start(chat_source, chat_tokens, out)
        time.sleep(draw.uniform(0.1, 1.0) * whole)
        process.send_signal(signal.SIGKILL)
        process.wait()
    prepare([chat_source], chat_tokens, out, validation=0.2, workers=2)
    assert contents(out) == contents(stored_chats.folder)


def test_a_process_killed_while_it_removed_the_units_leaves_none(chat_source, stored_chats, chat_tokens, tmp_path):
    out = tmp_path / "out"
    prepare([chat_source], chat_tokens, out, validation=0.2, workers=1)
    (out / "cache").mkdir()
    (out / "cache/unit").write_bytes(b"tokens")
    prepare([chat_source], chat_tokens, out, validation=0.2, workers=1)
    assert contents(out) == contents(stored_chats.folder)


@pytest.mark.exhaustive
def test_ten_kills_of_workers_leave_the_same_bytes(chat_source, stored_chats, chat_tokens, tmp_path):
    draw = random.Random(1)
    out = tmp_path / "out"
    kills = 0
    while kills < 10:
        process = start(chat_source, chat_tokens, out)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None and not children.read_text().split():
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 2))
        workers = children.read_text().split() if process.poll() is None else []
        if workers:
            os.kill(int(draw.choice(workers)), signal.SIGKILL)
        kills += process.wait() != 0
        if (out / "meta.json").exists():
            assert contents(out) == contents(stored_chats.folder)
            shutil.rmtree(out)
    prepare([chat_source], chat_tokens, out, validation=0.2, workers=2)
    assert contents(out) == contents(stored_chats.folder)


def test_own_validation_data_is_all_held_out(chat_source, stored_chats, chat_tokens, tmp_path):
    own = write_rows(tmp_path / "own.jsonl", [chat(number) for number in range(1000, 1020)])
    store = prepare(
        [replace(chat_source, validation=str(own))], chat_tokens, tmp_path / "out", validation=0.2, workers=1
    )
    (entry,) = store.sources
    assert (entry.train_units, entry.validation_units) == (
        stored_chats.sources[0].train_units + stored_chats.sources[0].validation_units,
        24,
    )
    assert all("to 10" in text for unit in trained_texts(store, chat_tokens, "validation") for text in unit)
    both = replace(chat_source, path=f"{{{chat_source.path},{own}}}", validation=str(own))
    with pytest.raises(ConfigError, match=r"names .*own\.jsonl, which is also trained on"):
        prepare([both], chat_tokens, tmp_path / "both", workers=1)


def test_text_has_own_validation_data_and_a_maximum_too(tokens, texts, write_jsonl, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    own = write_jsonl(tmp_path / "own.jsonl", ["one", "two"])
    source = Source(str(path), max=40, validation=str(own))
    store = prepare([source], tokens, tmp_path / "out", workers=1)
    assert (store.sources[0].train_documents, store.sources[0].validation_documents) == (40, 2)
    file = store.row_sources("train", 64, 0)[0].file
    chosen = [tokens.decode(file.document(n)[:-1].tolist()) for n in range(40)]
    ids = [np.array([*tokens.encode(text), tokens.eos_id], file.tokens.dtype) for text in texts]
    digests = [int(document_digests(one, np.array([len(one)]))[0]) for one in ids]
    limit = sorted(digests)[39]
    assert sorted(chosen) == sorted(text for text, digest in zip(texts, digests, strict=True) if digest <= limit)


def test_the_training_units_with_the_smallest_digests_are_used(chat_source, stored_chats, chat_tokens, tmp_path):
    store = prepare([replace(chat_source, max=100)], chat_tokens, tmp_path / "out", validation=0.2, workers=3)
    (entry,) = store.sources
    whole = np.sort(stored_chats.open_units(stored_chats.sources[0], "train").columns["digest"])
    assert np.array_equal(np.sort(store.open_units(entry, "train").columns["digest"]), whole[:100])
    assert entry.train_units == 100
    assert entry.validation_units == stored_chats.sources[0].validation_units
    prepared = {tuple(unit) for unit in trained_texts(store, chat_tokens)}
    assert prepared <= {tuple(unit) for unit in trained_texts(stored_chats, chat_tokens)}


@pytest.mark.parametrize("count", [1, 2, 5, 9, 10, 11])
def test_a_selection_takes_the_smallest_and_of_equal_ones_the_first(count):
    digests = np.array([5, 3, 3, 9, 3, 1, 7, 9, 9, 2], np.uint64)
    choice = Selection(iter([digests[:4].copy(), digests[4:].copy()]), count)
    chosen = np.concatenate([choice.admits(part) for part in np.split(digests, [3, 7])])
    expected = np.argsort(digests, kind="stable")[:count]
    assert chosen.nonzero()[0].tolist() == sorted(expected.tolist())


def test_pairs_labels_and_prompts_are_units(chat_tokens, tmp_path):
    asked = [message("user", "why")]
    pairs = [
        {"prompt": asked, "chosen": [message("assistant", f"yes {n}")], "rejected": [message("assistant", f"no {n}")]}
        | ({"margin": 0.5} if n else {})
        for n in range(4)
    ]
    labels = [
        {"prompt": asked, "completion": [message("assistant", f"so {n}")], "label": bool(n % 2)} for n in range(4)
    ]
    prompts = [{"prompt": [message("user", f"how {n}")], "answer": f"ä{n}", "grade": n} for n in range(4)]
    names = {"pairs": pairs, "labels": labels, "prompts": prompts}
    sources = [Source(str(write_rows(tmp_path / f"{name}.jsonl", rows))) for name, rows in names.items()]
    store = prepare(sources, chat_tokens, tmp_path / "out", workers=1)
    pair, label, prompt = (store.open_units(source, "train") for source in store.sources)
    assert [source.kind for source in store.sources] == ["preference", "feedback", "prompt"]
    assert trained_texts(replace(store, sources=store.sources[:1]), chat_tokens) == [
        [f"yes {n}<|im_end|>", f"no {n}<|im_end|>"] for n in range(4)
    ]
    assert pair.columns["documents"].tolist() == [2] * 4
    assert np.array_equal(pair.columns["margin"], np.float32([np.nan, 0.5, 0.5, 0.5]), equal_nan=True)
    assert label.columns["label"].tolist() == [0, 1, 0, 1]
    assert [prompt.extra_of(n) for n in range(4)] == prompts
    assert store.sources[2].train_trained == 0
    assert chat_tokens.decode(prompt.tokens_of(3).ids.tolist()).endswith("how 3<|im_end|>\n<|im_start|>assistant\n")


def test_weights_are_stored_only_where_one_is_not_1(chat_tokens, stored_chats, tmp_path):
    assert not list(stored_chats.folder.glob("*.weight"))
    rows = [chat(number) for number in range(1, 5)]
    rows[2]["messages"][2]["weight"] = 0.25
    store = prepare([Source(str(write_rows(tmp_path / "a.jsonl", rows)))], chat_tokens, tmp_path / "out", workers=1)
    file = store.open_units(store.sources[0], "train")
    assert [set(parts.weights.tolist()) for n in range(4) if (parts := file.tokens_of(n)).weights is not None] == [
        {1.0},
        {1.0},
        {1.0, 0.25},
        {1.0},
    ]


def test_columns_are_printed_before_the_work(chat_source, chat_tokens, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pool, "run_jobs", no_work)
    with pytest.raises(AssertionError):
        prepare([chat_source], chat_tokens, tmp_path / "out", workers=1)
    assert f"source {chat_source.path}: chat; uses messages; ignores id\n" in capsys.readouterr().err


def test_control_tokens_in_texts_are_counted(chat_tokens, tmp_path):
    rows = [{"messages": [message("user", "say <|im_start|>"), message("assistant", "no")]}] * 3
    store = prepare([Source(str(write_rows(tmp_path / "a.jsonl", rows)))], chat_tokens, tmp_path / "out", workers=1)
    assert store.sources[0].special_tokens_in_text == 3
    start_id = chat_tokens.backend.token_to_id("<|im_start|>")
    file = store.open_units(store.sources[0], "train")
    assert (file.tokens_of(0).ids == start_id).sum() == 2


def test_inspect_shows_the_counts_of_examples(stored_chats, chat_tokens):
    (entry,) = inspect(stored_chats.folder, chat_tokens)["sources"]
    assert (entry["kind"], entry["rows"], entry["used"]) == ("chat", 300, ["messages"])
    assert entry["template"]["origin"].endswith("chat_template.jinja")


def test_a_tokenizer_without_a_template_serves_plain_completions(chat_tokens, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(chat_tokens.folder, folder)
    os.unlink(folder / "chat_template.jinja")
    plain = load_tokenizer(folder)
    rows = write_rows(tmp_path / "a.jsonl", [{"prompt": f"one {n} ", "completion": "two"} for n in range(3)])
    store = prepare([Source(str(rows))], plain, tmp_path / "out", workers=1)
    assert trained_texts(store, plain) == [["two<|im_end|>"]] * 3
    chats = write_rows(tmp_path / "b.jsonl", [chat(1)])
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        prepare([Source(str(chats))], plain, tmp_path / "other", workers=1)
