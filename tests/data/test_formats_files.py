"""Rows of JSON, JSONL, parquet and Arrow files: all of them, in order, and a broken one as a fault with its row."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kumi.data import DataPathError, Fault, Source, expand, json_rows, record_files, records
from kumi.data.arrow_rows import group_rows
from kumi.data.row_files import read_rows

ROWS = [{"id": n, "messages": [{"role": "user", "content": f'é \\ " {n} [{{' * n}], "none": None} for n in range(40)]


def items(path, fmt, **options):
    return list(read_rows(path, fmt, **options))


def kinds(path, fmt="json"):
    """Return the row, or the kind of the fault, for each item of `path`."""
    return [(i.line, i.kind) if isinstance(i, Fault) else i for i in items(path, fmt)]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_is_read_in_blocks_of_any_size(tmp_path, monkeypatch, block, indent):
    monkeypatch.setattr(json_rows, "BLOCK", block)
    path = tmp_path / "a.json"
    rows = ROWS[:12]
    path.write_text("\ufeff " + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    assert items(path, "json") == list(enumerate(rows, 1))
    path.write_text("\n".join(json.dumps(row, indent=indent) for row in rows))
    assert items(path, "json") == list(enumerate(rows, 1))


def test_a_compressed_json_list_is_read(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    assert items(path, "json") == list(enumerate(ROWS, 1))


@pytest.mark.parametrize("block", [3, 1 << 20])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [(1, "empty")]),
        ("[ ]", [(1, "empty")]),
        ('[{"a": 1}, 7, {"a": 2}]', [(1, {"a": 1}), (2, "not-an-object"), (3, {"a": 2})]),
        ('[{"a": 1, "a": 2}, {"b": "]}"}]', [(1, "broken-json"), (2, {"b": "]}"})]),
        ('[{"a": tru, "b": "x\\"]"}, {"b": 2}]', [(1, "broken-json"), (2, {"b": 2})]),
        ("[nope, {}]", [(1, "broken-json"), (2, {})]),
        ("[" + "[" * 5000 + "]" * 5000 + ', {"b": 2}]', [(1, "broken-json"), (2, {"b": 2})]),
        ('[{"n": ' + "9" * 5000 + '}, {"b": 2}]', [(1, "broken-json"), (2, {"b": 2})]),
        ('[{"a": 1}, {"b": ', [(1, {"a": 1}), (2, "unreadable")]),
        ('[{"a": 1}', [(1, {"a": 1}), (2, "unreadable")]),
        ('[{"a": 1} {"b": 2}]', [(1, {"a": 1}), (2, "unreadable")]),
        ('{"a": 1}\n{"b": 2}', [(1, {"a": 1}), (2, {"b": 2})]),
        ("]", [(1, "unreadable")]),
        ('["a", "b"]', [(1, "not-an-object"), (2, "not-an-object")]),
    ],
)
def test_a_broken_object_is_a_fault_and_the_next_is_read(tmp_path, monkeypatch, block, text, expected):
    monkeypatch.setattr(json_rows, "BLOCK", block)
    path = tmp_path / "a.json"
    path.write_text(text)
    assert kinds(path) == expected


@given(st.text(alphabet='[]{}",:\\ \n1ae', max_size=40))
def test_no_json_text_ends_in_an_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(text)
    for item in items(path, "json"):
        assert isinstance(item, Fault) or isinstance(item[1], dict)


def test_bytes_that_are_not_utf_8_end_a_json_file_with_a_fault(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1}, {"b": "\xff"}]')
    (fault,) = items(path, "json")
    assert (fault.kind, "0xff" in fault.reason) == ("unreadable", True)


def test_the_memory_of_a_json_list_does_not_grow_with_it(tmp_path):
    path = tmp_path / "a.json"
    row = json.dumps({"text": "x" * 10_000})
    path.write_text("[" + ",".join([row] * 4000) + "]")
    tracemalloc.start()
    assert sum(1 for _ in read_rows(path, "json")) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4


def test_an_object_beyond_the_limit_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MAX_BYTES", 1000)
    monkeypatch.setattr(json_rows, "BLOCK", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": 1}, {"a": "x" * 5000}, {"a": 2}]))
    assert kinds(path) == [(1, {"a": 1}), (2, "unreadable")]
    path.write_text(json.dumps([{"a": 1}, {"a": ["x" * 50] * 100}, {"a": 2}]))
    assert kinds(path) == [(1, {"a": 1}), (2, "too-long"), (3, {"a": 2})]


def test_jsonl_rows_count_their_lines_from_the_start_of_a_range(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n[]\n{"a": 2}\n')
    assert kinds(path, "jsonl") == [(1, {"a": 1}), (3, "not-an-object"), (4, {"a": 2})]
    assert items(path, "jsonl", start=1) == [
        Fault(str(path), 2, "not-an-object", "a JSON list where an object was expected"),
        (3, {"a": 2}),
    ]


UNIFIED = [
    {"messages": [{"role": "user", "content": "a", "tool_calls": None}], "tools": None},
    {
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Paris", "zip": None}}}],
            }
        ],
        "tools": [{"name": "f", "enum": None}],
    },
    {"messages": None, "tools": []},
]
CLEAN = [
    {"messages": [{"role": "user", "content": "a"}], "tools": None},
    {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Paris", "zip": None}}}],
            }
        ],
        "tools": [{"name": "f"}],
    },
    {"messages": None, "tools": []},
]


def write_table(path, table, batch):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=batch)
        return
    new = pa.ipc.new_file if path.stem == "file" else pa.ipc.new_stream
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_keys_that_a_schema_fills_with_null_are_left_out_but_not_in_arguments(tmp_path, name):
    path = tmp_path / name
    schema = pa.schema(
        [
            (
                "messages",
                pa.list_(
                    pa.struct(
                        {
                            "role": pa.string(),
                            "content": pa.string(),
                            "tool_calls": pa.list_(
                                pa.struct(
                                    {
                                        "function": pa.struct(
                                            {
                                                "name": pa.string(),
                                                "arguments": pa.struct({"city": pa.string(), "zip": pa.string()}),
                                            }
                                        )
                                    }
                                )
                            ),
                        }
                    )
                ),
            ),
            ("tools", pa.list_(pa.struct({"name": pa.string(), "enum": pa.string()}))),
        ]
    )
    write_table(path, pa.Table.from_pylist(UNIFIED * 5, schema=schema), 4)
    fmt = "parquet" if name.endswith("parquet") else "arrow"
    assert items(path, fmt) == list(enumerate(CLEAN * 5, 1))
    assert group_rows(path, fmt) == [4, 4, 4, 3]
    assert items(path, fmt, start=1, end=3) == list(enumerate(CLEAN * 5, 1))[4:12]
    assert items(path, fmt, columns=["tools", "absent"])[1] == (2, {"tools": [{"name": "f"}]})
    if fmt == "arrow":
        faults = list(records.read_range(path, fmt, "tools"))
        assert [fault.kind for fault in faults[:3]] == ["missing-field", "not-a-string", "not-a-string"]


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_dates_are_text_and_slices_of_columns_are_right(tmp_path, name):
    import datetime

    path = tmp_path / name
    rows = [{"when": datetime.date(2025, 1, 1 + n % 28), "x": {"y": [n] * (n % 3)}} for n in range(700)]
    write_table(path, pa.Table.from_pylist(rows), 700)
    fmt = "parquet" if name.endswith("parquet") else "arrow"
    expected = [{"when": f"2025-01-{1 + n % 28:02}", "x": {"y": [n] * (n % 3)}} for n in range(700)]
    assert items(path, fmt) == list(enumerate(expected, 1))


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_damaged_tables_are_faults(tmp_path, name):
    path = tmp_path / name
    fmt = "parquet" if name.endswith("parquet") else "arrow"
    write_table(path, pa.Table.from_pylist([{"text": "a" * 100, "n": [n]} for n in range(200)]), 50)
    raw = path.read_bytes()
    for damaged in (
        b"",
        raw[: len(raw) // 2],
        raw[:20],
        b"x" * 500,
        *(raw[:n] + b"\xff\xff\xff" + raw[n + 3 :] for n in range(0, len(raw), 97)),
    ):
        path.write_bytes(damaged)
        for item in items(path, fmt):
            assert isinstance(item, Fault) or isinstance(item[1], dict)
        group_rows(path, fmt)
    path.write_bytes(raw[: len(raw) // 2])
    assert items(path, fmt)[-1].kind == "unreadable"


def test_a_value_that_is_not_utf_8_costs_its_row(tmp_path):
    path = tmp_path / "a.parquet"
    column = pa.array([b"a", b"\xff", b"c"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), path)
    assert kinds(path, "parquet") == [(1, {"text": "a"}), (2, "encoding"), (3, {"text": "c"})]


def save_dataset(folder, tables, **state):
    """Write a folder as `datasets` does."""
    folder.mkdir(parents=True)
    files = [f"data-{n:05}-of-{len(tables):05}.arrow" for n in range(len(tables))]
    for file, rows in zip(files, tables, strict=True):
        write_table(folder / file, pa.Table.from_pylist(rows), 2)
    (folder / "cache-1234.arrow").write_bytes(b"another program's")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in files], **state}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_of_datasets_gives_its_arrow_files(tmp_path):
    parts = [[{"text": "a"}, {"text": "b"}, {"text": "c"}], [{"text": "d"}]]
    save_dataset(tmp_path / "saved", parts)
    files = expand(Source(str(tmp_path / "saved")))
    assert [file.name for file in files] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert [record.text for file in files for record in records.read(file)] == ["a", "b", "c", "d"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataPathError, match=r"has several splits \('train', 'test'\); name the folder of one"):
        expand(Source(str(tmp_path)))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"_data_files": []}, "lists no data files"),
        ({"_data_files": [7]}, "lists no data files"),
        ({"_data_files": {}}, "lists no data files"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "not a plain file name"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "selection of rows that an older"),
    ],
)
def test_a_damaged_folder_of_datasets_is_refused(tmp_path, state, words):
    save_dataset(tmp_path / "saved", [[{"text": "a"}]], **state)
    with pytest.raises(DataPathError, match=words):
        expand(Source(str(tmp_path / "saved")))


@pytest.mark.exhaustive
def test_a_folder_that_datasets_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(CLEAN[:2]).save_to_disk(tmp_path / "saved")
    (file,) = expand(Source(str(tmp_path / "saved")))
    assert len(items(file, "arrow")) == 2
    datasets.DatasetDict({"train": datasets.Dataset.from_list(CLEAN[:2])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataPathError, match="several splits"):
        expand(Source(str(tmp_path / "splits")))
