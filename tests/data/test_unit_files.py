"""Units are read as they were written, in the same bytes however they were batched, and damage to a file is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from kumi.data.binfile import open_file
from kumi.data.chat.masked import EncodedUnit, MaskedSequence
from kumi.data.checksums import checksums_of
from kumi.data.encode_rows import to_arrays
from kumi.data.unit_files import UNIT_COLUMNS, UnitFile, open_units, sidecar_path, suffixes
from kumi.data.unit_writer import open_unit_writer
from kumi.errors import DataError, RefusedError

DTYPE = np.dtype(np.uint16)
BLOCK = 256


def sequence(seed: int, weighted: bool = False) -> MaskedSequence:
    draw = np.random.default_rng(seed)
    length = int(draw.integers(1, 60))
    mask, turns = draw.integers(0, 12, length), np.sort(draw.integers(0, 9, length))
    weights = draw.random(length).astype(np.float32).tolist() if weighted else None
    return MaskedSequence(draw.integers(0, 500, length).tolist(), mask.tolist(), turns.tolist(), weights)


def units_of(kind: str, count: int = 40, weighted: bool = False) -> list[EncodedUnit]:
    units = []
    for n in range(count):
        sides = tuple(sequence(2 * n + side, weighted and n == 30) for side in range(2 if kind == "preference" else 1))
        label = bool(n % 3) if kind == "feedback" and n % 4 else None
        margin = n / 7 if kind == "preference" and n % 2 else None
        units.append(EncodedUnit(sides, label, margin, {"answer": n, "tag": "ä"} if kind == "prompt" else {}))
    return units


def write(prefix: Path, kind: str, units: list[EncodedUnit], size: int) -> str:
    with open_unit_writer(prefix, DTYPE, kind) as writer:
        for start in range(0, len(units), size):
            part = units[start : start + size]
            tokens, columns = to_arrays(part, list(range(start, start + len(part))), DTYPE)
            writer.append(tokens, columns, [json.dumps(dict(unit.extra)).encode() for unit in part])
    return writer.hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


CASES = [("chat", False), ("chat", True), ("preference", False), ("feedback", False), ("prompt", False)]


@pytest.mark.parametrize(("kind", "weighted"), CASES)
def test_units_are_read_as_they_were_written(kind, weighted, tmp_path):
    units = units_of(kind, weighted=weighted)
    write(tmp_path / "a", kind, units, 7)
    assert {path.name for path in tmp_path.iterdir()} == {f"a.{suffix}" for suffix in suffixes(kind, weighted)}
    file = pickle.loads(pickle.dumps(open_units(tmp_path / "a", kind, vocab_size=500)))
    file.check_lists()
    assert (file.unit_count, file.weighted, file.kind) == (len(units), weighted, kind)
    for number, unit in enumerate(units):
        tokens, record = file.tokens_of(number), file.columns[number]
        sides = unit.sequences
        assert tokens.lengths.tolist() == [len(side.ids) for side in sides]
        assert tokens.ids.tolist() == [value for side in sides for value in side.ids]
        assert tokens.mask.tolist() == [value for side in sides for value in side.mask]
        assert tokens.turns.tolist() == [value for side in sides for value in side.turns]
        if weighted:
            assert tokens.weights is not None
            ones = [[1.0] * len(side.ids) if side.weights is None else side.weights for side in sides]
            assert tokens.weights.tolist() == [value for side in ones for value in side]
        assert int(record["trained"]) == sum(value & 1 for side in sides for value in side.mask)
        assert (int(record["tokens"]), int(record["digest"])) == (len(tokens.ids), number)
        assert int(record["label"]) == (-1 if unit.label is None else unit.label)
        margin = np.float32("nan") if unit.margin is None else np.float32(unit.margin)
        assert np.array_equal(record["margin"], margin, equal_nan=True)
        assert file.extra_of(number) == unit.extra
    documents = open_file(tmp_path / "a")  # the token file alone is that of any reader of Megatron's format
    assert documents.document_count == sum(len(unit.sequences) for unit in units)
    blocks = list(file.blocks())
    assert [first for first, _ in blocks[1:]] == [last for _, last in blocks[:-1]]


@pytest.mark.parametrize(("kind", "weighted"), CASES)
def test_the_bytes_do_not_depend_on_the_batches(kind, weighted, tmp_path):
    units = units_of(kind, weighted=weighted)
    for size in (1, 40):
        (tmp_path / str(size)).mkdir()
    digests = {write(tmp_path / str(size) / "a", kind, units, size) for size in (1, 40)}
    assert len(digests) == 1
    assert contents(tmp_path / "1") == contents(tmp_path / "40")
    assert digests != {write(tmp_path / "less", kind, units[:-1], 9)}


@pytest.fixture
def made(tmp_path):
    """Units with weights in a folder, and a function that opens them with their checksums."""
    write(tmp_path / "a", "preference", units_of("preference", weighted=True), 40)
    checksums = {
        suffix: checksums_of(sidecar_path(tmp_path / "a", suffix), BLOCK) for suffix in suffixes("preference", True)
    }

    def again(**options) -> UnitFile:
        return open_units(tmp_path / "a", "preference", checksums, **options)

    return tmp_path, again


@pytest.mark.parametrize("suffix", ["bin", "mask", "turn", "weight"])
def test_a_changed_value_is_refused_where_it_is_read(made, suffix):
    folder, again = made
    path = sidecar_path(folder / "a", suffix)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    file = again()
    file.tokens_of(0)
    with pytest.raises(RefusedError, match=rf"a\.{suffix}: the bytes from .* do not match their checksum"):
        file.tokens_of(file.unit_count - 1)


@pytest.mark.parametrize("suffix", ["mask", "turn", "weight"])
@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b""])
def test_a_sidecar_of_another_size_is_refused(made, suffix, change):
    folder, again = made
    path = sidecar_path(folder / "a", suffix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RefusedError, match=rf"a\.{suffix}: has \d+ bytes where \d+ tokens .* were expected"):
        again()


def test_a_missing_or_foreign_sidecar_is_refused(made, tmp_path):
    folder, again = made
    (folder / "a.mask").unlink()
    with pytest.raises(RefusedError, match=r"a\.mask: cannot be read \(No such file"):
        again()
    (folder / "a.mask").symlink_to("/etc/passwd")
    with pytest.raises(RefusedError, match=r"a\.mask: cannot be read"):
        again()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "its header is damaged"),
        (b"\x93NUMPY\x02\x00" + b"x" * 200, "not of version"),
        (b"\x93NUMPY\x01\x00\x10\x00__import__('os')", "its header is damaged"),
        (b"\x93NUMPY\x01\x00v\x00" + b"(" * 118, "its header is damaged"),
    ],
)
def test_a_hostile_list_of_units_is_refused(made, raw, reason):
    folder, again = made
    (folder / "a.columns.npy").write_bytes(raw)
    with pytest.raises(RefusedError, match=rf"a\.columns\.npy: is no readable list of units \(.*{reason}"):
        again()


def test_objects_in_the_list_of_units_are_never_loaded(made):
    folder, again = made
    np.save(folder / "a.columns.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(RefusedError, match="other columns than kumi writes"):
        again()
    np.save(folder / "a.columns.npy", np.zeros((2, 2), UNIT_COLUMNS))
    with pytest.raises(RefusedError, match=r"array of shape \(2, 2\)"):
        again()


@pytest.mark.parametrize(
    ("name", "value"), [("first_document", -1), ("first_document", 1 << 40), ("documents", 0), ("tokens", 1)]
)
def test_records_that_contradict_the_index_are_refused(made, name, value):
    folder, again = made
    columns = np.load(folder / "a.columns.npy")
    columns[name][5] = value
    np.save(folder / "a.columns.npy", columns)
    file = again()
    for read in (lambda: file.tokens_of(5), file.check_lists):
        with pytest.raises(RefusedError, match="the record of unit 5 contradicts the index"):
            read()


def test_units_that_leave_out_documents_are_refused(made):
    folder, again = made
    np.save(folder / "a.columns.npy", np.load(folder / "a.columns.npy")[:-1])
    with pytest.raises(RefusedError, match="the record of unit 38 contradicts the index"):
        again().check_lists()


def test_an_id_outside_the_vocabulary_is_refused(made):
    _, again = made
    file = again(vocab_size=100)
    with pytest.raises(DataError, match="outside the vocabulary"):
        file.tokens_between(0, file.unit_count)


def test_extra_columns_that_are_no_object_are_refused(tmp_path):
    with open_unit_writer(tmp_path / "a", DTYPE, "prompt") as writer:
        tokens, columns = to_arrays(units_of("prompt", 2), [0, 1], DTYPE)
        writer.append(tokens, columns, [b"[1]", b"{"])
    file = open_units(tmp_path / "a", "prompt")
    for unit in (0, 1):
        with pytest.raises(RefusedError, match=f"the columns of unit {unit} are no JSON object"):
            file.extra_of(unit)


def test_an_exception_leaves_no_file_with_its_final_name(tmp_path):
    def interrupted() -> None:
        with open_unit_writer(tmp_path / "a", DTYPE, "prompt") as writer:
            tokens, columns = to_arrays(units_of("prompt", 2), [0, 1], DTYPE)
            writer.append(tokens, columns, [b"{}", b"{}"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(path.name.endswith(".partial") for path in tmp_path.iterdir())
