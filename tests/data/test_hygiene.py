"""Duplicates among the rows of sources, and overlaps with other files: `kumi data check`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kumi.data.hygiene import check_lines, check_sources
from kumi.data.hygiene.hashed_words import gram_hashes, text_digest, words_of
from kumi.errors import ConfigError
from kumi.spec.data_source import Source

CHATS = Path(__file__).parents[2] / "examples" / "chat" / "chats.jsonl"
VOCABULARY = [f"{first}{second}" for first in ("ba", "ke", "mi", "to", "ru") for second in ("lan", "ver", "sol", "dim")]


def sentence(seed, words=120):
    chance = random.Random(seed)
    return " ".join(chance.choice(VOCABULARY) + str(chance.randrange(99)) for _ in range(words))


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_exact_duplicates_of_chats_differ_in_white_space_only(tmp_path):
    first, second = sentence(1), sentence(2)
    rows = [chat("a b", first), chat("a b", second), chat(" a  b\n", first), chat("a b", first.upper())]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    result = check_sources([Source(str(path))])
    assert (result["rows"], result["exact"]["rows"], result["exact"]["of"]) == (4, 1, 1)
    (example,) = result["exact"]["examples"]
    assert (example["file"], example["line"], example["of"]["line"]) == (str(path), 3, 1)
    assert example["text"] == example["of"]["text"] == f"a b {first}"[:160]
    assert result["near"] is None


def test_labels_tell_rows_of_feedback_apart(tmp_path):
    rows = [{"prompt": "p", "completion": "c", "label": label} for label in (True, False, True)]
    result = check_sources([Source(str(write_rows(tmp_path / "a.jsonl", rows)))])
    assert [example["line"] for example in result["exact"]["examples"]] == [3]


def test_near_duplicates_are_those_above_the_threshold(tmp_path):
    pytest.importorskip("rensa")
    # Of 116 shingles, a changed word of the middle changes 5, and a changed last half 58 and more.
    words = sentence(1).split()
    close = [*words[:50], "other", *words[51:]]
    far = [*words[:60], *sentence(2).split()[60:]]
    rows = [{"text": " ".join(text)} for text in (words, close, far, words)] + [{"text": "?!"}, {"text": "?!!"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    result = check_sources([Source(str(path))], near=True)
    assert [(e["line"], e["of"]["line"]) for e in result["near"]["examples"]] == [(2, 1)]
    assert [(e["line"], e["of"]["line"]) for e in result["exact"]["examples"]] == [(4, 1)]


def test_the_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "rensa", None)
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match=r"near duplicates need rensa.*kumi\[hygiene\]"):
        check_sources([Source(str(path))], near=True)


def test_overlaps_need_thirteen_words_in_a_row(tmp_path):
    question = sentence(5, 40)
    words = question.split()
    shared = f"Well, {' '.join(words[10:23]).upper()}!"
    rows = [chat("q", shared), chat("q", " ".join(words[10:22])), chat("q", sentence(6))]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    short = " ".join(words[:9])
    test_set = write_rows(
        tmp_path / "bench.jsonl", [{"question": question, "choices": ["x", "y"]}, {"question": "too short"}]
    )
    text = tmp_path / "bench.txt"
    text.write_text(short)
    result = check_sources([Source(str(path))], against=[test_set, text])
    first, second = result["against"]
    assert [first[key] for key in ("rows", "too_short", "hits", "matched")] == [2, 1, 1, 1]
    assert first["examples"] == [
        {"file": str(path), "line": 1, "of": {"line": 1}, "words": " ".join(words_of(" ".join(words[10:23])))}
    ]
    assert second["hits"] == 0
    # A text of 8 to 12 words is looked for as a whole.
    write_rows(path, [chat("q", f"so {short} it is")])
    assert check_sources([Source(str(path))], against=[text])["against"][0]["hits"] == 1


def test_validation_data_comes_first(tmp_path):
    own = write_rows(tmp_path / "own.jsonl", [{"text": "a b c"}])
    path = write_rows(tmp_path / "a.jsonl", [{"text": "d"}, {"text": "a b  c"}])
    source = Source(str(path), validation=str(own))
    target = tmp_path / "rows.jsonl"
    # A file that two sources read has no duplicates because of that.
    result = check_sources([source, Source(str(path))], write=target)
    assert [source["rows"] for source in result["sources"]] == [3, 0]
    (row,) = map(json.loads, target.read_text().splitlines())
    assert (row["file"], row["line"], row["reason"]) == (str(path), 2, "exact")
    assert row["of"] == {"file": str(own), "line": 1}
    assert row["digest"] == text_digest("a b c")


def test_lines_escape_the_data(tmp_path):
    rows = [{"text": "a \x1b[31m"}, {"text": "a \x1b[31m"}, {"other": 1}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    target = tmp_path / "rows.jsonl"
    lines = list(check_lines(check_sources([Source(str(path))], against=[path], write=target)))
    assert lines == [
        f"{path}: 2 rows, 1 that cannot be read or used",
        "exact duplicates: 1 of 2 rows (50.0%); they repeat 1 of the others",
        f"  {path}:2 of {path}:1",
        "    a \\x1b[31m",
        f"{path}: 0 rows of the data share text with 0 of its 3 rows (3 are too short to compare)",
        f'1 rows listed; data.exclude_rows = "{target}" leaves them out',
    ]


def test_copies_in_the_example_are_counted():
    rows = [json.loads(line) for line in CHATS.read_text().splitlines()]
    assert all(isinstance(message["content"], str) for row in rows for message in row["messages"])
    texts = [
        json.dumps([[m.get("reasoning_content"), m["content"], m.get("tool_calls")] for m in row["messages"]])
        for row in rows
    ]
    result = check_sources([Source(str(CHATS))])
    assert (result["rows"], result["exact"]["rows"]) == (len(rows), len(rows) - len(set(texts)))


def test_both_sides_of_a_pair_count(tmp_path):
    rows = [{"prompt": "p", "chosen": "c", "rejected": r} for r in ("r", "other", "r")]
    result = check_sources([Source(str(write_rows(tmp_path / "a.jsonl", rows)))])
    assert [(e["line"], e["text"]) for e in result["exact"]["examples"]] == [(3, "p c r")]


def test_a_file_to_compare_with_must_have_a_format(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    for name, reason in (("missing.jsonl", "it is no file"), ("a.bin", "no known format")):
        (tmp_path / "a.bin").write_bytes(b"")
        with pytest.raises(ConfigError, match=reason):
            check_sources([Source(str(path))], against=[tmp_path / name])


def test_hashes_of_words():
    assert words_of("It's 2 km, 東京 ist-schön") == ["it", "s", "2", "km", "東", "京", "ist", "schön"]
    words = [str(number) for number in range(1000)]
    hashes = gram_hashes(words, 13)
    assert len(set(hashes.tolist())) == len(hashes) == 988
    assert gram_hashes(words[5:18], 13).tolist() == [hashes[5]]
    assert gram_hashes(words[:3], 13).tolist() == gram_hashes(words[:3], 3).tolist()
    # Hashes are the same in every process: signatures of different machines are compared.
    assert gram_hashes(["a", "b"], 2).tolist() == [2736877506306182907]


def test_datatrove_lists_the_same_rows(tmp_path, monkeypatch):
    pytest.importorskip("datatrove", reason="datatrove is not installed; it is compared where it is")
    pytest.importorskip("rensa")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    from datatrove_duplicates import find_duplicates

    rows = [chat("question", sentence(number)) for number in range(60)]
    for number in range(20):
        words = rows[number]["messages"][1]["content"].split()
        words[7 * number % 100] = f"changed{number}"
        rows.append(chat("question", " ".join(words if number % 2 else words[:-1])))
    random.Random(0).shuffle(rows)
    files = [write_rows(tmp_path / f"{part}.jsonl", rows[part::3]) for part in range(3)]
    target = tmp_path / "list.jsonl"
    check_sources([Source(str(tmp_path / "*.jsonl"))], near=True, write=target)
    ours = [json.loads(line) for line in target.read_text().splitlines()]
    theirs = list(find_duplicates([str(file) for file in files], "text", tmp_path / "work", tasks=3, workers=2))
    assert len(ours) == 20
    assert theirs == ours
