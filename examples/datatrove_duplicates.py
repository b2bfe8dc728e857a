"""Find near duplicates with datatrove, in many processes or on many machines, and list them for `data.exclude_rows`.

    pip install datatrove orjson regex
    python examples/datatrove_duplicates.py data/chats/*.jsonl --out rows.jsonl --work dedup --tasks 8 --workers 4
    kumi data prepare RUN.toml data.exclude_rows=rows.jsonl

Rows, words and shingles are kumi's, so conversations in any spelling are compared by the contents of their messages.
On Slurm, give each stage to `datatrove.executor.SlurmPipelineExecutor` with `depends=` the stage before; `--work` is
then a folder that all nodes see. A stage that was killed continues where it stopped, without its finished tasks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WhitespaceTokenizer

from kumi.data.hygiene.hashed_words import gram_hashes, words_of
from kumi.data.hygiene.near_duplicates import SHINGLE
from kumi.data.hygiene.row_texts import TextRow, source_rows
from kumi.data.row_list import write_row_list
from kumi.spec.data_source import Source

# A pair of similarity 0.8 shares a band with probability 1 - (1 - 0.8^8)^16 = 0.95, one of 0.6 with 0.24.
CONFIG = MinhashConfig(SHINGLE, num_buckets=16, hashes_per_bucket=8, hash_config=HashConfig(hash_fc="sha1"))


class RowReader(PipelineStep):  # type: ignore[misc]
    """Reads the rows of files as kumi does: task number `rank` has every `world_size`-th file, from that number on."""

    name = "kumi rows"

    def __init__(self, files: list[str], text_key: str) -> None:
        super().__init__()
        self.files, self.text_key = files, text_key

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Yield the documents of task `rank`, with the number of their file, their line and their digest."""
        for number, file in list(enumerate(self.files))[rank::world_size]:
            for row in source_rows(Source(file, text_key=self.text_key)):
                if isinstance(row, TextRow):
                    place = {"number": number, "file": row.file, "line": row.line, "digest": row.digest}
                    yield Document(row.text, f"{row.file}:{row.line}", metadata=place)


class Signatures(MinhashDedupSignature):  # type: ignore[misc]
    """Signatures of kumi's shingles."""

    def get_shingles(self, text: str) -> Any:
        """Return the hashes of the shingles of `text`: (shingles, 1) uint64."""
        return gram_hashes(words_of(text), SHINGLE).reshape(-1, 1)


class ClusterRows(PipelineStep):  # type: ignore[misc]
    """Writes the place of every row that is in a cluster, with the number of the cluster."""

    name = "kumi rows of clusters"

    def __init__(self, clusters: str, out: str) -> None:
        super().__init__()
        self.clusters, self.out = Path(clusters), Path(out)

    def run(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Write the rows of task `rank`, and pass all documents on."""
        path = self.clusters / f"{rank:06d}.clusters"
        pairs = np.fromfile(path, "<u4").reshape(-1, 2).tolist() if path.exists() else []
        clusters = dict(pairs)
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / f"{rank:06d}.jsonl").open("w") as out:
            for number, document in enumerate(data):
                if number in clusters:
                    out.write(json.dumps({**document.metadata, "cluster": clusters[number]}) + "\n")
                yield document


def find_duplicates(files: list[str], text_key: str, work: Path, tasks: int, workers: int) -> Iterator[dict[str, Any]]:
    """Yield an entry of a row list for each row but the first of its cluster, in the order of `files` and lines."""
    reader = RowReader(files, text_key)
    folders = {name: str(work / name) for name in ("signatures", "buckets", "clusters", "rows")}
    buckets = MinhashDedupBuckets(folders["signatures"], folders["buckets"], config=CONFIG)
    clusters = MinhashDedupCluster(folders["buckets"], folders["clusters"], config=CONFIG, save_cluster_id=True)
    stages: list[tuple[list[Any], int]] = [
        ([reader, Signatures(folders["signatures"], CONFIG, WhitespaceTokenizer())], tasks),
        ([buckets], CONFIG.num_buckets),
        ([clusters], 1),
        ([reader, ClusterRows(folders["clusters"], folders["rows"])], tasks),
    ]
    for number, (pipeline, count) in enumerate(stages):
        logs = str(work / "logs" / str(number))
        LocalPipelineExecutor(pipeline, tasks=count, workers=min(workers, count), logging_dir=logs).run()
    rows = [
        json.loads(line) for path in Path(folders["rows"]).glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    first: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["number"], row["line"])):
        original = first.setdefault(row["cluster"], row)
        if original is not row:
            of = {key: original[key] for key in ("file", "line")}
            yield {key: row[key] for key in ("file", "line", "digest")} | {"reason": "near", "of": of}


def main() -> None:
    """Find the duplicates of the files on the command line."""
    parser = argparse.ArgumentParser(description="List near duplicates with datatrove.")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--text-key", default="text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for signatures and clusters")
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    files = [str(Path(file).absolute()) for file in given.files]
    write_row_list(given.out, find_duplicates(files, given.text_key, given.work, given.tasks, given.workers))


if __name__ == "__main__":
    main()
