from __future__ import annotations

import gzip
import json
import sys
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kumi.data import DataPathError, Fault, Record, read, record_files, records
from kumi.errors import ConfigError

LINES = [
    b'\xef\xbb\xbf{"text": "first"}',
    b"",
    b'{"text": "broken',
    b'{"text": "wrong \xff encoding"}',
    b'{"body": "no text", "id": 3}',
    b'{"text": null}',
    b'{"text": 7}',
    b'{"text": " \\n"}',
    b"[1, 2]",
    b'{"text": "half \\ud800 pair"}',
    b"   ",
    b'{"text": "last \xc3\xa9"}',
]
KINDS = {
    3: "broken-json",
    4: "encoding",
    5: "missing-field",
    6: "missing-field",
    7: "not-a-string",
    8: "empty",
    9: "not-an-object",
    10: "encoding",
}


def check_lines(path):
    items = list(read(path))
    assert [(i.text, i.line) for i in items if isinstance(i, Record)] == [("first", 1), ("last é", 12)]
    faults = {i.line: i for i in items if isinstance(i, Fault)}
    assert {line: fault.kind for line, fault in faults.items()} == KINDS
    assert "the record has: body, id" in faults[5].reason
    assert "is null" in faults[6].reason
    assert "0xff" in faults[4].reason
    assert all(item.file == str(path) for item in items)


def test_jsonl_names_every_fault_with_its_line(tmp_path):
    raw = b"\r\n".join(LINES)
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw[:50]) + gzip.compress(raw[50:]) + b"\0" * 100)
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(compress(raw[:50]) + compress(raw[50:]))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        check_lines(tmp_path / name)


@given(st.lists(st.sampled_from(LINES)), st.sampled_from([b"", b"\n"]), st.data())
def test_ranges_of_a_jsonl_file_hold_every_line_once(tmp_path_factory, lines, end, data):
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    raw = b"\n".join(lines) + end + b'\n{"text": "end"}'
    path.write_bytes(raw)
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(1, len(raw)), max_size=6))})
    joined, passed = [], 0
    for start, stop in pairwise(cuts):
        texts, count = drain(records.read_range(path, "jsonl", "text", start, stop))
        assert records.lines_before(path, start) == passed
        joined += [(item.line + passed, getattr(item, "text", None)) for item in texts]
        passed += count
    whole, count = drain(records.read_range(path, "jsonl", "text"))
    assert joined == [(item.line, getattr(item, "text", None)) for item in whole]
    assert passed == count


def drain(generator):
    items = []
    while True:
        try:
            items.append(next(generator))
        except StopIteration as end:
            return items, end.value


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_off_archive_gives_what_it_holds_and_one_fault(tmp_path, suffix):
    raw = "".join(json.dumps({"text": f"document {n} " * (n % 50 + 1)}) + "\n" for n in range(2000)).encode()
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes((compress(raw) + compress(raw))[:-30])
    *documents, fault = read(path)
    assert len(documents) >= 2000
    assert all(isinstance(item, Record) for item in documents)
    assert (fault.kind, fault.line) == ("unreadable", len(documents) + 1)
    assert "the compressed file is truncated" in fault.reason
    path.write_bytes(compress(raw) + b"rubbish that is no frame")
    *documents, fault = read(path)
    assert len(documents) == 2000
    assert fault.kind == "unreadable"


def test_text_is_one_document_a_file(tmp_path):
    path = tmp_path / "a.txt"
    for raw, expected in [
        ("\ufeffä\r\nb\n".encode(), "ä\r\nb\n"),
        (b"", "empty"),
        (b" \n", "empty"),
        ("line\nä".encode("latin-1"), "encoding"),
        ("wide".encode("utf-16"), "encoding"),
    ]:
        path.write_bytes(raw)
        (item,) = read(path)
        assert (item.text if isinstance(item, Record) else item.kind) == expected
    assert "begins like UTF-16" in item.reason
    (item,) = read(tmp_path / "absent.txt")
    assert item.kind == "unreadable"


def test_an_empty_jsonl_file_is_a_fault(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    (fault,) = read(tmp_path / "a.jsonl")
    assert fault.kind == "empty"


def test_a_document_beyond_the_limit_is_a_fault_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MAX_BYTES", 100)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 500}) + "\n" + json.dumps({"text": "y"}) + "\n")
    fault, record = read(tmp_path / "a.jsonl")
    assert (fault.kind, record.text, record.line) == ("too-long", "y", 2)
    (tmp_path / "a.txt").write_text("x" * 500)
    assert [item.kind for item in read(tmp_path / "a.txt")] == ["too-long"]


def test_parquet_rows_and_row_groups(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "", "d", "e"], "n": range(5)}), path, row_group_size=2)
    items = list(read(path))
    assert [(item.line, getattr(item, "text", None) or item.kind) for item in items] == [
        (1, "a"),
        (2, "missing-field"),
        (3, "empty"),
        (4, "d"),
        (5, "e"),
    ]
    assert records.parquet_groups(path, "text") == [2, 2, 1]
    assert [item.line for item in records.read_range(path, "parquet", "text", 1, 3)] == [3, 4, 5]
    with pytest.raises(ConfigError, match=r"no column 'body'; it has text, n"):
        records.parquet_groups(path, "body")
    with pytest.raises(ConfigError, match=r"column 'n' is int64, not string"):
        records.parquet_groups(path, "n")
    path.write_bytes(b"PAR1 rubbish")
    assert records.parquet_groups(path, "text") is None
    assert [item.kind for item in read(path)] == ["unreadable"]


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_missing_reader_is_named_with_its_remedy(tmp_path, monkeypatch, name, module):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.parquet", None)
    with pytest.raises(ConfigError, match=rf"needs {module}.*pip install 'kumi\[data\]'"):
        list(read(tmp_path / name))


def test_a_suffix_that_says_nothing_needs_a_format(tmp_path):
    (tmp_path / "a.dat").write_text("x")
    with pytest.raises(DataPathError, match="set format"):
        list(read(tmp_path / "a.dat"))
    assert next(read(tmp_path / "a.dat", "text")).text == "x"


def test_a_parquet_row_that_names_no_entry_of_its_dictionary_is_a_fault(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["good", "bad"]}), tmp_path / "a.parquet")
    value = records._value

    def damaged(cell, key, file, row):
        if row == 2:
            raise pa.lib.ArrowIndexError("index with value of 28 is out-of-bounds for array of length 20")
        return value(cell, key, file, row)

    monkeypatch.setattr(records, "_value", damaged)
    good, fault = records.read_range(tmp_path / "a.parquet", "parquet", "text")
    assert (good.text, fault.kind, fault.line) == ("good", "unreadable", 2)
