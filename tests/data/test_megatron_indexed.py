"""kumi and megatron-core's own classes read each other's token files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from forked import run_forked
from kumi.data import Source, prepare
from kumi.data.binfile import open_file, open_writer, token_dtype

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install -e '.[export-check]'"
)

# Documents of sequences; Megatron's own tools write one of several where a document is split into sentences.
DOCUMENTS = [[[5, 6, 7]], [[8], [9, 10]], [[11, 12, 13, 14]], [[3, 4]]]


def megatron(read: str, write: list[tuple[str, int, list[list[list[int]]]]]) -> list[dict[str, object]]:
    """Return what Megatron-Core reads in `read`, after it has written each (prefix, vocabulary, documents)."""
    # In a process of its own: importing Megatron-Core changes PyTorch.
    code, stdout, stderr = run_forked(read_and_write, read, write)
    assert code == 0, stderr[-3000:]
    results: list[dict[str, object]] = json.loads(stdout.splitlines()[-1])
    return results


def read_and_write(read: str, write: list[tuple[str, int, list[list[list[int]]]]]) -> None:
    """Print what Megatron-Core reads in `read`, with and without a memory map, as JSON; write the documents."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    results = []
    for mmap in (True, False):
        data = IndexedDataset(read, multimodal=False, mmap=mmap)
        entry = {"sequences": [data[i].tolist() for i in range(len(data))], "dtype": data.index.dtype.__name__}
        entry |= {"documents": data.document_indices.tolist(), "part": data.get(0, offset=1, length=2).tolist()}
        results.append(entry)
    for prefix, vocab, documents in write:
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(vocab))
        for sequences in documents:
            builder.add_document(
                [token for sequence in sequences for token in sequence], [len(sequence) for sequence in sequences]
            )
        builder.finalize(prefix + ".idx")
    print(json.dumps(results))


def test_both_write_and_read_the_same(tokens, tmp_path: Path) -> None:
    whole = [[token for one in sequences for token in one] for sequences in DOCUMENTS]
    with open_writer(tmp_path / "ours", token_dtype(600)) as append:
        append(np.concatenate(whole).astype(token_dtype(600)), np.array([len(ids) for ids in whole]))
    small, large, same = (str(tmp_path / name) for name in ("small", "large", "same"))
    write = [(small, 600, DOCUMENTS), (large, 70_000, DOCUMENTS), (same, 600, [[ids] for ids in whole])]
    for result in megatron(str(tmp_path / "ours"), write):
        assert result == {"sequences": whole, "dtype": "uint16", "documents": [0, 1, 2, 3, 4], "part": [6, 7]}
    for prefix in (small, large):
        theirs = open_file(prefix)
        assert [theirs.document(number).tolist() for number in range(theirs.document_count)] == whole
        assert theirs.lengths.tolist() == [len(one) for sequences in DOCUMENTS for one in sequences]
    for suffix in (".bin", ".idx"):
        assert Path(same + suffix).read_bytes() == (tmp_path / f"ours{suffix}").read_bytes()
    store = prepare([Source(small, format="indexed")], tokens, tmp_path / "prepared", workers=1)
    stored_file = open_file(store.sources[0].train)
    assert sorted(stored_file.document(number).tolist() for number in range(4)) == sorted(
        [*ids, tokens.eos_id] for ids in whole
    )


def test_megatron_reads_the_tokens_of_examples(stored_chats) -> None:
    (source,) = stored_chats.sources
    units = stored_chats.open_units(source, "train")
    whole = [units.file.document(number).tolist() for number in range(units.file.document_count)]
    for result in megatron(str(source.train), []):
        assert result["sequences"] == whole
        assert result["documents"] == list(range(len(whole) + 1))
