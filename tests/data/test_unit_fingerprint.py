"""The fingerprint of a store has all inputs of its units, and that of text has not changed."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace

import pytest

from chat_rows import TEMPLATE, chat, trained_texts, write_rows
from kumi.data import Source, pool, prepare, shards
from kumi.spec.data_source import ChatOptions


@pytest.fixture(autouse=True, scope="module")
def small_units():
    """Jobs of 8 KiB, so that small inputs are cut as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MIN_BYTES", 8 << 10)
        yield


@pytest.mark.parametrize(
    "options",
    [
        {"date": "2026-01-01"},
        {"template_kwargs": {"mode": 1}},
        {"timeout_s": 6.0},
        {"memory_gib": 3.0},
        {"stop_tokens": ("<|im_end|>", "<|endoftext|>")},
    ],
)
def test_each_option_of_chats_is_part_of_the_fingerprint(chat_source, stored_chats, chat_tokens, options):
    plan = shards.plan([chat_source], chat_tokens, 0.2, False, ChatOptions(**options))
    assert plan.fingerprint != stored_chats.fingerprint
    assert shards.plan([chat_source], chat_tokens, 0.2, False).fingerprint == stored_chats.fingerprint


def test_other_masks_of_the_same_tokens_are_another_content(chat_source, stored_chats, chat_tokens, tmp_path):
    rows = [chat(number) for number in range(1, 5)]
    source = Source(str(write_rows(tmp_path / "a.jsonl", rows)))
    every = prepare([source], chat_tokens, tmp_path / "all", workers=1)
    last = prepare([source], chat_tokens, tmp_path / "last", workers=1, chat=ChatOptions(turns="last"))
    digests = [store.sources[0].train_digest[:64] for store in (every, last)]
    assert digests[0] == digests[1]
    assert every.content != last.content
    assert every.fingerprint != last.fingerprint


def no_work(*arguments):
    raise AssertionError("work was done again")


def test_the_text_of_the_template_counts_and_not_its_place(
    chat_source, stored_chats, chat_tokens, tmp_path, monkeypatch
):
    shutil.copytree(stored_chats.folder, tmp_path / "copy")
    (tmp_path / "same.jinja").write_text(TEMPLATE)
    (tmp_path / "other.jinja").write_text(TEMPLATE.replace("user", "human") + " ")
    with monkeypatch.context() as patch:
        patch.setattr(pool, "run_jobs", no_work)
        named = ChatOptions(template=str(tmp_path / "same.jinja"), max_refused=0.5)
        again = prepare([chat_source], chat_tokens, tmp_path / "copy", validation=0.2, chat=named)
        assert again.fingerprint == stored_chats.fingerprint
    named = ChatOptions(template=str(tmp_path / "other.jinja"))
    assert shards.plan([chat_source], chat_tokens, 0.2, False, named).fingerprint != stored_chats.fingerprint


def test_sources_of_text_keep_their_fingerprint(tokens, texts, write_jsonl, tmp_path):
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", texts)))
    plan = shards.plan([source], tokens, 0.1, True)
    # The formula of the versions before examples.
    options = {"tokenizer": tokens.digest, "eos": tokens.eos_id, "bos": tokens.bos_id, "validation": 0.1}

    def plain(file):
        return {name: value for name, value in asdict(file).items() if name != "blocks"}

    files = [*map(plain, shards.files_of(source))]
    keys = []
    for unit in plan.units:
        segments = [asdict(segment) | {"file": plain(segment.file)} for segment in unit.segments]
        keys.append(shards.digest({"version": 1, "options": options | {"text_key": "text"}, "segments": segments}))
    assert len(keys) > 1
    assert plan.fingerprint == shards.digest([1, options, [[source.path, files]], keys])


def test_columns_and_bytes_make_another_store_and_weights_do_not(chat_tokens, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", [chat(n) | {"other": chat(n + 100)["messages"]} for n in range(1, 5)])
    source = Source(str(path), kind="chat")
    first = prepare([source], chat_tokens, tmp_path / "out", workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "run_jobs", no_work)
        again = prepare([replace(source, weight=3.0)], chat_tokens, tmp_path / "out", workers=1)
    assert (again.content, again.sources[0].weight) == (first.content, 3.0)
    renamed = replace(source, columns={"messages": "other"})
    other = prepare([renamed], chat_tokens, tmp_path / "out", workers=1)
    assert other.content != first.content
    assert trained_texts(other, chat_tokens)[0][0].startswith("answer 0 to 101")
    path.write_text(path.read_text().replace("answer", "zanswe"))
    changed = prepare([source], chat_tokens, tmp_path / "out", workers=1)
    assert trained_texts(changed, chat_tokens)[0][0].startswith("zanswe 0 to 1 ")
