"""Hostile files of every kind are refused in a sentence, or read as valid, at little cost and without side effects."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KINDS = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "weights",
    "index",
    "torch .bin",
    "pytorch_model.bin",
    "adapter_config.json",
    "adapter weights",
    "checkpoint meta",
    "checkpoint index",
    "megatron metadata",
    "store meta",
    "store .idx",
    "store .bin",
    "run file",
    "cluster file",
    "jsonl",
    "jsonl.gz",
    "jsonl.zst",
    "parquet",
    "txt",
}


@pytest.mark.parametrize("count", [9, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_hostile_files_are_refused_or_valid(count, tmp_path):
    pytest.importorskip("pyarrow")
    pytest.importorskip("zstandard")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    ended = subprocess.run(
        [sys.executable, HERE / "attack.py", tmp_path, str(count)],
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    results = defaultdict(list)
    for line in ended.stdout.splitlines():
        result = json.loads(line)
        results[result["kind"]].append(result)
    assert results.keys() == KINDS
    assert not (tmp_path / "owned").exists()
    for kind, outcomes in results.items():
        assert len(outcomes) == count
        for result in outcomes:
            assert result["verdict"] in ("refused", "accepted"), result
            assert result["outside"] == [], result
            assert result["mib"] < 300, result
            assert result["seconds"] < 2, result
            assert "\n" not in result["reason"], result
        assert sum(result["verdict"] == "refused" for result in outcomes) >= count / 2, kind
