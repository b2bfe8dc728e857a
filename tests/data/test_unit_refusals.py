"""Stores of examples that were damaged, and rows and templates that stop a preparation."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from chat_rows import TEMPLATE
from kumi.data import encode_rows, open_store, pool, prepare, shards
from kumi.data.chat.masked import TRAINED, EncodedUnit, MaskedSequence, RowRefused
from kumi.errors import DataError, RefusedError
from kumi.spec.data_source import ChatOptions


@pytest.fixture(autouse=True, scope="module")
def small_units():
    """Jobs of 8 KiB, so that small inputs are cut as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MIN_BYTES", 8 << 10)
        yield


def test_the_first_refused_row_stops_where_asked(chat_source, stored_chats, chat_tokens, tmp_path):
    for folder in (tmp_path / "new", shutil.copytree(stored_chats.folder, tmp_path / "old")):
        with pytest.raises(DataError, match=r"chats\.jsonl:51: not a JSON object.*on_error='skip'"):
            prepare([chat_source], chat_tokens, folder, validation=0.2, on_error="fail", workers=1)


def test_too_many_refused_rows_stop_the_preparation(chat_source, stored_chats, chat_tokens, tmp_path):
    strict = ChatOptions(max_refused=0.01)
    with pytest.raises(DataError, match=r"4 of \d+ rows are refused.*chat_template\.jinja.*chats\.jsonl:51: not a"):
        prepare([chat_source], chat_tokens, tmp_path / "new", validation=0.2, workers=1, chat=strict)
    assert not (tmp_path / "new/meta.json").exists()
    allowed = prepare([chat_source], chat_tokens, tmp_path / "new", validation=0.2, workers=1)
    assert allowed.content == stored_chats.content
    with pytest.raises(DataError, match=r"4 of 300 rows are refused"):  # and the same from the finished store
        prepare([chat_source], chat_tokens, tmp_path / "new", validation=0.2, workers=1, chat=strict)


def test_a_template_that_refuses_all_rows_stops_early(chat_source, chat_tokens, tmp_path, monkeypatch):
    (tmp_path / "bad.jinja").write_text(TEMPLATE + "{{ raise_exception('no luck') }}")
    jobs: list[int] = []
    answers = pool.run_jobs

    def counting(todo: list[Any], workers: int) -> Any:
        for number, answer in answers(todo, workers):
            jobs.append(number)
            yield number, answer

    monkeypatch.setattr(pool, "run_jobs", counting)
    with pytest.raises(DataError, match=r"rows are refused.*bad\.jinja.*no luck"):
        prepare(
            [chat_source],
            chat_tokens,
            tmp_path / "out",
            workers=1,
            chat=ChatOptions(template=str(tmp_path / "bad.jinja")),
        )
    assert len(set(jobs)) < len(shards.plan([chat_source], chat_tokens, 0.2, False).units) / 2


@pytest.fixture
def copied(stored_chats, tmp_path) -> Path:
    return Path(shutil.copytree(stored_chats.folder, tmp_path / "copied"))


@pytest.mark.parametrize("suffix", ["bin", "idx", "mask", "turn", "columns.npy"])
def test_a_changed_file_is_refused_and_left_as_it_is(copied, chat_source, chat_tokens, suffix):
    path = next(copied.glob(f"*_train_text_document.{suffix}"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 + 100] ^= 4
    path.write_bytes(raw)
    with pytest.raises(RefusedError, match=r"do not match their checksum in meta\.json"):
        prepare([chat_source], chat_tokens, copied, validation=0.2, workers=1)
    assert path.read_bytes() == raw


@pytest.mark.parametrize("suffix", ["mask", "turn", "columns.npy"])
def test_a_missing_file_or_a_link_is_refused(copied, suffix, tmp_path):
    path = next(copied.glob(f"*_train_text_document.{suffix}"))
    path.rename(tmp_path / "away")
    with pytest.raises(RefusedError, match=re.escape(path.name)):
        open_store(copied)
    path.symlink_to(tmp_path / "away")
    with pytest.raises(RefusedError, match="out of the folder"):
        open_store(copied)


HOSTILE: dict[str, Any] = {
    "kind": ["auto", "chats", 3, None],
    "rows": [-1, "3", None],
    "train_units": [-1, 1 << 40, 2.5, True],
    "train_weighted": [True, 1, None],
    "roles": [[], {"user": -1}, {"user": "x"}],
    "samples": [{"1": None}],
    "faults": [{"x": []}],
    "used": ["messages", [1]],
    "template": [None, {}, {"origin": 1, "digest": "x"}],
    "train_checksums": [{}, {"bin": None}, {"bin": {"block": 0, "crc32": ""}}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in HOSTILE.items() for value in values])
def test_a_hostile_entry_is_refused_in_one_sentence(copied, key, value):
    path = copied / "meta.json"
    meta = json.loads(path.read_text())
    meta["sources"][0][key] = value
    path.write_text(json.dumps(meta))
    with pytest.raises(RefusedError) as error:
        open_store(copied)
    assert "\n" not in str(error.value)


def test_a_store_without_checksums_of_units_is_refused(copied, chat_source, chat_tokens):
    path = copied / "meta.json"
    meta = json.loads(path.read_text())
    del meta["sources"][0]["train_checksums"]
    path.write_text(json.dumps(meta))
    with pytest.raises(RefusedError, match="has no checksums of these units"):
        prepare([chat_source], chat_tokens, copied, validation=0.2, workers=1)


def test_a_unit_whose_only_trained_token_is_its_first_trains_nothing():
    def check(*mask):
        encode_rows._check_unit(EncodedUnit((MaskedSequence([5, 6], mask, [1, 1]),)), "chat")

    check(0, TRAINED)
    with pytest.raises(RowRefused, match="no token of the row would be trained"):
        check(TRAINED, 0)
