"""Compressed files are read in bounded memory, to their last good byte, whatever they expand to."""

import gzip
import random
import subprocess
import sys
import zlib

import pytest

from kumi.data import records

zstandard = pytest.importorskip("zstandard")

_MEASURE = """
import resource, sys
from kumi.data import records
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
items = list(records.read(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - before) // 1024, len(items), getattr(items[0], "reason", ""))
"""


def _frames(data: bytes) -> dict[str, list[bytes]]:
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    half = len(data) // 2
    pieces = [compressor.compress(data[:half]), compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    pieces += [compressor.compress(data[half:]), compressor.flush()]
    return {
        "a.zst": [
            b"".join(pieces),
            b"\x50\x2a\x4d\x18\x05\0\0\0abcde",
            zstandard.ZstdCompressor(level=19).compress(data),
        ],
        "a.gz": [gzip.compress(data), bytes(70_000), gzip.compress(data, 9)],
    }


@pytest.mark.parametrize("name", ["a.zst", "a.gz"])
@pytest.mark.parametrize("size", [0, 1, 3_000_000])
@pytest.mark.parametrize("content", ["random", "zeros"])
def test_frames_are_joined_and_a_cut_end_is_noticed(name, size, content, tmp_path):
    data = random.Random(0).randbytes(size) if content == "random" else bytes(size)
    frames = _frames(data)[name]
    (tmp_path / name).write_bytes(b"".join(frames) + bytes(100))
    with records.open_bytes(tmp_path / name) as stream:
        assert stream.read() == data + data
    (tmp_path / name).write_bytes(b"".join(frames)[:-1])
    with records.open_bytes(tmp_path / name) as stream, pytest.raises(EOFError):
        stream.read()


@pytest.mark.parametrize("name", ["bomb.jsonl.zst", "bomb.jsonl.gz", "bomb.txt.zst"])
def test_a_bomb_takes_little_memory_and_is_a_fault(name, tmp_path):
    made = zstandard.ZstdCompressor().compressobj() if name.endswith("zst") else zlib.compressobj(9, wbits=31)
    block = b" " * (1 << 20)
    with (tmp_path / name).open("wb") as file:
        for _ in range(200):
            file.write(made.compress(block))
        file.write(made.flush())
    ended = subprocess.run(
        [sys.executable, "-c", _MEASURE, tmp_path / name], capture_output=True, text=True, check=True
    )
    mib, count, item = ended.stdout.split(maxsplit=2)
    assert int(mib) < 160
    assert int(count) == 1
    assert "far more than the size of its compressed file suggests" in item


def test_a_long_record_of_a_small_compressed_file_is_read(tmp_path):
    text = "A table whose rows are all alike.\n" * 1_000_000
    (tmp_path / "a.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    assert (tmp_path / "a.txt.zst").stat().st_size < 100_000
    (item,) = records.read(tmp_path / "a.txt.zst")
    assert isinstance(item, records.Record)
    assert len(item.text) == len(text)


def test_text_that_compresses_well_is_read(tmp_path):
    line = b'{"text": "' + b"the same words " * 60 + b'"}\n'
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(line * 20_000))
    assert sum(isinstance(item, records.Record) for item in records.read(tmp_path / "a.jsonl.zst")) == 20_000


def test_a_dictionary_of_one_long_text_is_not_written_out(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), ["x" * (4 << 20)])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", compression="zstd")
    program = _MEASURE.replace("list(records.read(sys.argv[1]))", "[0] * sum(1 for _ in records.read(sys.argv[1]))")
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a.parquet"], capture_output=True, text=True, check=True
    )
    mib, count = ended.stdout.split()
    assert int(mib) < 250
    assert count == "1000"
