"""Rows that a run's list leaves out: the store is that of files without these rows."""

from __future__ import annotations

import json

import pytest

from chat_rows import write_rows
from kumi.data import Source, prepare, shards
from kumi.data.bpe import train as train_tokenizer
from kumi.data.excluded_rows import _lines_before
from kumi.data.hygiene import check_sources
from kumi.data.records import lines_before
from kumi.errors import ConfigError


@pytest.fixture(autouse=True, scope="module")
def small_units():
    """Jobs of 8 KiB, so that small inputs are cut as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MIN_BYTES", 8 << 10)
        yield


def contents(folder):
    names = (file.name for file in folder.iterdir() if file.suffix in (".bin", ".idx", ".mask", ".turn", ".npy"))
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def test_chats_without_the_listed_rows(chats, chat_source, chat_tokens, stored_chats, tmp_path):
    target = tmp_path / "list.jsonl"
    result = check_sources([chat_source], write=target)
    # Row 290 copies row 7; more are listed by hand, with and without a digest.
    assert result["listed"] == 1
    numbers = [0, 60, 61, 150, 290, 299]
    with target.open("a") as out:
        for number in [*numbers[:4], numbers[5]]:
            out.write(json.dumps({"file": chat_source.path, "line": number + 1}) + "\n")
    store = prepare([chat_source], chat_tokens, tmp_path / "a", validation=0.2, workers=2, exclude_rows=target)
    plain = tmp_path / "without"
    plain.mkdir()
    # The same name, because files of a store are named by their source.
    parts = chat_source.path.split("/")
    path = plain / parts[-2] / parts[-1]
    path.parent.mkdir()
    write_rows(path, [row for number, row in enumerate(chats) if number not in numbers])
    other = prepare([Source(str(path))], chat_tokens, tmp_path / "b", validation=0.2, workers=2)
    ours, theirs = contents(store.folder), contents(other.folder)
    assert len(ours) >= 8
    assert list(ours.values()) == list(theirs.values())
    meta = json.loads((store.folder / "meta.json").read_text())["sources"][0]
    assert (meta["excluded"], meta["rows"]) == (6, 300)
    assert store.fingerprint != stored_chats.fingerprint


def test_texts_without_the_listed_rows(texts, tokens, write_jsonl, tmp_path):
    texts = texts[:120]
    listed = {1, 2, 40, 77, 120}
    (tmp_path / "x").mkdir()
    source = Source(str(write_jsonl(tmp_path / "x" / "a.jsonl", texts)))
    listing = write_rows(tmp_path / "list.jsonl", [{"file": source.path, "line": line} for line in sorted(listed)])
    plan = shards.plan([source], tokens, 0.1, False)
    assert len(plan.units) > 3
    store = prepare([source], tokens, tmp_path / "a", validation=0.1, workers=2, exclude_rows=listing)
    (tmp_path / "y").mkdir()
    rest = [text for line, text in enumerate(texts, 1) if line not in listed]
    other = prepare(
        [Source(str(write_jsonl(tmp_path / "y" / "a.jsonl", rest)))], tokens, tmp_path / "b", validation=0.1, workers=1
    )
    assert list(contents(store.folder).values()) == list(contents(other.folder).values())


def test_rows_of_parquet_files_count_from_the_start(texts, tokens, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, chosen in (
        ("x", texts),
        ("y", [text for line, text in enumerate(texts, 1) if line not in (3, 150, 151)]),
    ):
        (tmp_path / name).mkdir()
        parquet.write_table(pyarrow.table({"text": chosen}), tmp_path / name / "a.parquet", row_group_size=40)
    source, other = (Source(str(tmp_path / name / "a.parquet")) for name in "xy")
    listing = write_rows(tmp_path / "list.jsonl", [{"file": source.path, "line": line} for line in (3, 150, 151)])
    assert sum(len(unit.segments) for unit in shards.plan([source], tokens, 0.1, False).units) > 3
    stores = [
        prepare([source], tokens, tmp_path / "a", validation=0.1, workers=1, exclude_rows=listing),
        prepare([other], tokens, tmp_path / "b", validation=0.1, workers=1),
    ]
    ours, theirs = (list(contents(store.folder).values()) for store in stores)
    assert ours == theirs


def test_lists_that_do_not_fit_are_refused(tokens, write_jsonl, tmp_path):
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", ["one", "two", "one"])))
    target = tmp_path / "list.jsonl"
    check_sources([source], write=target)
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "six"])
    with pytest.raises(ConfigError, match=r"a\.jsonl has another text by now"):
        prepare([source], tokens, tmp_path / "out", workers=1, exclude_rows=target)
    target.write_text(json.dumps({"file": str(tmp_path / "b.jsonl"), "line": 1}))
    with pytest.raises(ConfigError, match=r"b\.jsonl', which no data source reads"):
        prepare([source], tokens, tmp_path / "out", workers=1, exclude_rows=target)
    for line in ('{"file": 1, "line": 1}', '{"file": "a", "line": 0}', "[1]", "{", '{"file": "a"}'):
        target.write_text(line)
        with pytest.raises(ConfigError, match=r"list\.jsonl:1: not a row of a list"):
            prepare([source], tokens, tmp_path / "out", workers=1, exclude_rows=target)
    with pytest.raises(ConfigError, match="cannot be read"):
        prepare([source], tokens, tmp_path / "out", workers=1, exclude_rows=tmp_path / "missing")


def test_an_empty_list_changes_nothing(tokens, write_jsonl, tmp_path):
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", ["one", "two"])))
    (tmp_path / "list.jsonl").write_text("\n")
    store = prepare([source], tokens, tmp_path / "a", workers=1, exclude_rows=tmp_path / "list.jsonl")
    assert store.fingerprint == shards.plan([source], tokens, 0.0, False).fingerprint


def test_lines_before_offsets(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\nab\n\ncde\nf")
    offsets = list(range(path.stat().st_size + 1))
    assert _lines_before(path, offsets) == [lines_before(path, offset) for offset in offsets]


def learned(path, folder, **options):
    """The tokenizer that is trained on a file."""
    trained = train_tokenizer([Source(str(path))], 400, folder, validation=0.1, **options)
    return (trained.folder / "tokenizer.json").read_text()


def test_a_tokenizer_learns_nothing_from_listed_texts(texts, write_jsonl, tmp_path):
    listed = {3, 50, 111}
    lines = [f"{'zyzzyva ' * 40}{text}" if line in listed else text for line, text in enumerate(texts[:120], 1)]
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    listing = write_rows(tmp_path / "list.jsonl", [{"file": str(path), "line": line} for line in sorted(listed)])
    rest = write_jsonl(tmp_path / "b.jsonl", [text for line, text in enumerate(lines, 1) if line not in listed])
    ours, every = learned(path, tmp_path / "t", exclude_rows=listing), learned(path, tmp_path / "every")
    assert ours == learned(rest, tmp_path / "rest") != every
    # The same list gives the same tokenizer, without another training; another list gives another one.
    stamp = (tmp_path / "t" / "tokenizer.json").stat().st_mtime_ns
    assert learned(path, tmp_path / "t", exclude_rows=listing) == ours
    assert (tmp_path / "t" / "tokenizer.json").stat().st_mtime_ns == stamp
    assert learned(path, tmp_path / "t") == every


def test_a_tokenizer_learns_nothing_from_listed_chats(chats, chat_source, tmp_path):
    listed = [number for number, row in enumerate(chats) if "messages" in row][20:23]
    rows = [json.loads(json.dumps(row)) for row in chats]
    for number in listed:
        rows[number]["messages"][-1]["content"] = "zyzzyva " * 200
    path = write_rows(tmp_path / "a.jsonl", rows)
    # The first row is listed with the digest of its text.
    write_rows(tmp_path / "twice.jsonl", [rows[listed[0]]] * 2)
    result = tmp_path / "digest.jsonl"
    check_sources([Source(str(tmp_path / "twice.jsonl"))], write=result)
    digest = json.loads(result.read_text())["digest"]
    entries = [{"file": str(path), "line": number + 1} for number in listed]
    listing = write_rows(tmp_path / "list.jsonl", [entries[0] | {"digest": digest}, *entries[1:]])
    rest = write_rows(tmp_path / "b.jsonl", [row for number, row in enumerate(rows) if number not in listed])
    assert learned(path, tmp_path / "t", exclude_rows=listing) == learned(rest, tmp_path / "rest")
    write_rows(tmp_path / "list.jsonl", [entries[1] | {"digest": digest}])
    with pytest.raises(ConfigError, match=r"a\.jsonl has another text by now"):
        learned(path, tmp_path / "t", exclude_rows=listing)
