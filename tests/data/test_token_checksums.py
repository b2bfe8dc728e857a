"""Token files that were changed after they were prepared are refused, whatever was changed, and wherever it is read."""

import json
import shutil
import struct

import pytest

from kumi.data import Source, binfile, checksums, open_store, prepare, verify_store
from kumi.data.checksums import Guard, block_bytes, checksums_of
from kumi.errors import DataError, RefusedError

BLOCK = 1024


@pytest.fixture(scope="module")
def made(tokens, texts, write_jsonl, tmp_path_factory):
    """A prepared folder whose files have blocks of 1 KiB, and its source."""
    folder = tmp_path_factory.mktemp("made")
    source = Source(str(write_jsonl(folder / "texts.jsonl", texts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kumi.data.checksums.SMALLEST", BLOCK)
        prepare([source], tokens, folder / "store", validation=0.1, workers=1)
    return folder / "store", source


@pytest.fixture
def store(made, tmp_path):
    """A copy of the folder, to damage, and a function that prepares it again."""
    shutil.copytree(made[0], tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def again(made, store, tokens):
    return lambda: prepare([made[1]], tokens, store, validation=0.1, workers=1)


def change(path, edit):
    raw = bytearray(path.read_bytes())
    path.write_bytes(edit(raw) or raw)


def flip(place):
    def edit(raw):
        raw[place] ^= 1

    return edit


def swap(raw):
    raw[:BLOCK], raw[BLOCK : 2 * BLOCK] = raw[BLOCK : 2 * BLOCK], raw[:BLOCK]


HARMS = {
    "an id": ("bin", flip(2 * BLOCK), f"bytes from {2 * BLOCK} to {3 * BLOCK - 1} do not match their checksum"),
    "two blocks swapped": ("bin", swap, "bytes from 0 to 1023 do not match their checksum"),
    "truncated": ("bin", lambda raw: raw[:-2], "truncated"),
    "extended": ("bin", lambda raw: raw + b"\0\0", "belongs to another index"),
    "a length": ("idx", flip(34), "bytes from 0 to 1023 do not match their checksum"),
    "the last length": ("idx", lambda raw: flip(30 + 4 * (struct.unpack("<Q", raw[18:26])[0]))(raw), "match|describes"),
    "an offset": ("idx", flip(-2000), "do not match their checksum"),
    "a truncated index": ("idx", lambda raw: raw[:-8], "truncated or damaged"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_changed_file_is_refused_and_left_as_it_is(store, again, harm):
    kind, edit, sentence = HARMS[harm]
    path = next(store.glob(f"*train*.{kind}"))
    change(path, edit)
    before = path.read_bytes()
    with pytest.raises(RefusedError, match=sentence):
        again()
    assert path.read_bytes() == before


def test_of_a_large_store_each_block_is_verified_before_it_is_used(store, again, monkeypatch):
    monkeypatch.setattr(verify_store, "AT_START", 0)
    change(next(store.glob("*train*.bin")), flip(-1))
    opened = again()  # the tokens are not read
    file = opened.row_sources("train", 64, 0)[0].file
    size = file.token_count
    assert len(file.read(0, BLOCK // 2)) == BLOCK // 2
    with pytest.raises(RefusedError, match="do not match their checksum"):
        file.read(size - 1, size)
    with pytest.raises(RefusedError, match="do not match their checksum"):
        opened.mixture(64, 0).batch(0, -(-size // 64))
    change(next(store.glob("*train*.idx")), flip(34))
    with pytest.raises(RefusedError, match=r"\.idx: the bytes from 0"):
        again()


def without_checksums(store):
    """Make the folder one of a version that wrote digests only."""
    meta = json.loads((store / "meta.json").read_text())
    for entry in meta["sources"]:
        del entry["train_checksums"], entry["validation_checksums"]
    (store / "meta.json").write_text(json.dumps(meta))


def test_a_store_with_digests_only_is_verified_once_and_gets_checksums(store, again, made, monkeypatch, capsys):
    without_checksums(store)
    monkeypatch.setattr(checksums, "SMALLEST", BLOCK)
    again()
    assert "verified by its digests" in capsys.readouterr().err
    assert json.loads((store / "meta.json").read_text()) == json.loads((made[0] / "meta.json").read_text())
    again()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "place", "error", "sentence"),
    [
        ("bin", 100, RefusedError, "its documents have the digest"),
        ("idx", 34, RefusedError, "length and offset of document 1 contradict each other"),
        ("idx", -2000, RefusedError, "contradict each other"),
        ("bin", None, DataError, "is id 65535, outside the vocabulary of 0 to 599"),
    ],
)
def test_what_changed_in_a_store_with_digests_only_is_refused(store, again, kind, place, error, sentence):
    without_checksums(store)

    def beyond(raw):
        raw[10:12] = b"\xff\xff"

    change(next(store.glob(f"*train*.{kind}")), beyond if place is None else flip(place))
    with pytest.raises(error, match=sentence):
        again()


def test_an_id_beyond_the_vocabulary_is_named_when_it_is_read(store):
    prefix = open_store(store).sources[0].train
    file = binfile.open_file(prefix, vocab_size=100)
    with pytest.raises(DataError, match=r"\.bin: token \d+ is id \d+, outside the vocabulary of 0 to 99"):
        file.read(0, 1000)


def test_an_index_that_contradicts_itself_is_no_source(store, tokens, tmp_path):
    change(next(store.glob("*train*.idx")), flip(34))
    with pytest.raises(RefusedError, match="length and offset of document 0 contradict each other"):
        binfile.open_file(open_store(store).sources[0].train).document(0)


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1])
def test_checksums_of_files_of_any_size(tmp_path, size):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4 + b"\0" if size > BLOCK else b"\1" * size)
    sums = checksums_of(tmp_path / "file", BLOCK)
    assert len(sums.numbers()) == -(-size // BLOCK)
    Guard(tmp_path / "file", sums).check()


def test_all_files_of_a_store_together_have_a_bounded_number_of_blocks(
    tmp_path, texts, tokens, write_jsonl, monkeypatch
):
    """Blocks of their own for each file let a store of many sources write a meta.json too long to be read."""
    monkeypatch.setattr(checksums, "SMALLEST", 16)
    monkeypatch.setattr(checksums, "MOST", 64)
    sources = [Source(str(write_jsonl(tmp_path / f"{name}.jsonl", texts))) for name in "abcdef"]
    for _ in range(2):  # when shards are merged, and when they are added to a store that has none
        prepare(sources, tokens, tmp_path / "store", validation=0.1, workers=1)
        meta = json.loads((tmp_path / "store" / "meta.json").read_text())
        sums = [
            part
            for entry in meta["sources"]
            for side in ("train", "validation")
            for part in entry[f"{side}_checksums"].values()
        ]
        assert len(sums) == 24
        assert len({part["block"] for part in sums}) == 1
        assert sum(len(part["crc32"]) // 8 for part in sums) <= 64 + len(sums)
        without_checksums(tmp_path / "store")


def test_a_store_whose_files_have_blocks_of_several_sizes_is_read(store, again):
    meta = json.loads((store / "meta.json").read_text())
    entry = meta["sources"][0]
    entry["train_checksums"]["bin"] = checksums_of(next(store.glob("*train*.bin")), 4 * BLOCK).plain()
    (store / "meta.json").write_text(json.dumps(meta))
    again()
    assert json.loads((store / "meta.json").read_text()) == meta


def test_blocks_grow_with_the_store():
    assert [block_bytes(size) for size in (0, 64 << 30, (64 << 30) + 1, 10**12)] == [65536, 65536, 131072, 1 << 20]


def test_checksums_that_are_none_are_refused(store, again):
    for damage in (
        {"block": 0, "crc32": ""},
        {"block": BLOCK, "crc32": "xyz"},
        [],
        {"block": BLOCK, "crc32": "00" * 4},
    ):
        meta = json.loads((store / "meta.json").read_text())
        meta["sources"][0]["train_checksums"]["bin"] = damage
        (store / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(RefusedError, match="checksums"):
            again()
