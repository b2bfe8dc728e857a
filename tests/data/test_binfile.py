from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kumi.data import binfile
from kumi.errors import RefusedError


def write(prefix, documents, dtype=np.uint16):
    with binfile.open_writer(prefix, np.dtype(dtype)) as append:
        for ids in documents:
            append(np.array(ids, dtype), np.array([len(ids)]))


def index(code, lengths, offsets, documents, version=1, magic=b"MMIDIDX\x00\x00"):
    head = magic + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    lists = struct.pack(f"<{len(lengths)}i{len(offsets)}q{len(documents)}q", *lengths, *offsets, *documents)
    return head + lists


def test_the_bytes_written_are_the_format(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [65499], []])
    assert (tmp_path / "a.bin").read_bytes() == bytes.fromhex("0100 0200 0300 dbff")
    assert (tmp_path / "a.idx").read_bytes() == bytes.fromhex(
        "4d4d49444944580000"  # magic
        "0100000000000000"  # version
        "08"  # uint16
        "0300000000000000 0400000000000000"  # sequences, documents + 1
        "03000000 01000000 00000000"  # lengths
        "0000000000000000 0600000000000000 0800000000000000"  # offsets in bytes
        "0000000000000000 0100000000000000 0200000000000000 0300000000000000"  # documents
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_hand_built_bytes_are_read_with_documents_of_several_sequences(tmp_path):
    # Four sequences in three documents, the last document of two sequences, int32.
    (tmp_path / "a.bin").write_bytes(struct.pack("<12i", *range(1, 13)))
    (tmp_path / "a.idx").write_bytes(index(4, [5, 2, 3, 2], [0, 20, 28, 40], [0, 1, 2, 4]))
    file = binfile.open_file(tmp_path / "a")
    assert (file.token_count, file.document_count) == (12, 3)
    assert [file.document(n).tolist() for n in range(3)] == [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
    assert pickle.loads(pickle.dumps(file)).document(1).tolist() == [6, 7]


@given(st.lists(st.lists(st.integers(0, 65499), max_size=5), max_size=20), st.sampled_from([np.uint16, np.int32]))
def test_documents_come_back_and_are_found_by_position(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("bin") / "a"
    write(prefix, documents, dtype)
    file = binfile.open_file(prefix)
    assert [file.document(n).tolist() for n in range(file.document_count)] == documents
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    places = np.arange(sum(map(len, documents)))
    assert (file.document_at(places) == np.searchsorted(starts, places, side="right") - 1).all()


def test_token_dtype_is_megatrons_rule():
    assert binfile.token_dtype(65499) == np.uint16
    assert binfile.token_dtype(65500) == np.int32


@pytest.mark.parametrize(
    ("idx", "bin_bytes", "sentence"),
    [
        (index(8, [2], [0], [0, 1], magic=b"TNTIDX\x00\x00\x00"), 4, r"begins with b'TNTIDX"),
        (index(8, [2], [0], [0, 1], version=2), 4, "index version 2; only version 1"),
        (index(6, [2], [0], [0, 1]), 16, "dtype code 6: writers disagree whether it is float32 or float64"),
        (index(7, [2], [0], [0, 1]), 8, "dtype code 7"),
        (index(9, [2], [0], [0, 1]), 4, "dtype code 9: it is not defined"),
        (index(8, [2], [0], [0, 1]), 2, "has 2 bytes where its index describes 4: it is truncated"),
        (index(8, [2], [0], [0, 1]), 6, "has 6 bytes where its index describes 4"),
        (index(8, [2], [0], [0, 1])[:-3], 4, "has 59 bytes where its header describes 62"),
        (index(8, [2], [0], [0, 1]) + b"\0", 4, "list of modes"),
        (index(8, [2], [0], [0, 2]), 4, "does not run from 0 to 1"),
        (b"", 4, "begins with b''"),
    ],
)
def test_foreign_and_damaged_files_are_refused_with_the_values(tmp_path, idx, bin_bytes, sentence):
    (tmp_path / "a.idx").write_bytes(idx)
    (tmp_path / "a.bin").write_bytes(b"\0" * bin_bytes)
    with pytest.raises(RefusedError, match=sentence):
        binfile.open_file(tmp_path / "a")


def test_half_a_pair_is_refused(tmp_path):
    write(tmp_path / "a", [[1, 2]])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(RefusedError, match=r"a\.bin: no such file"):
        binfile.open_file(tmp_path / "a")


def test_a_failed_write_leaves_no_pair(tmp_path):
    def fail():
        with binfile.open_writer(tmp_path / "a", np.dtype(np.uint16)) as append:
            append(np.array([1], np.uint16), np.array([1]))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not (tmp_path / "a.bin").exists()
    assert not (tmp_path / "a.idx").exists()
