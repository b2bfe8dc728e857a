"""The bundled conversations and their tokenizer are as their script makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "chat"


def test_the_script_makes_the_committed_files(tmp_path):
    subprocess.run([sys.executable, FOLDER / "make_chats.py", tmp_path], check=True)
    for name in ("chats.jsonl", "pairs.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
    vocabularies = [json.loads((place / "tokenizer.json").read_text())["model"] for place in (tmp_path, FOLDER)]
    assert vocabularies[0] == vocabularies[1]


def test_there_are_200_with_tools_and_thoughts():
    rows = [json.loads(line) for line in (FOLDER / "chats.jsonl").read_text().splitlines()]
    thoughts = [row for row in rows if any("reasoning_content" in message for message in row["messages"])]
    assert (len(rows), sum("tools" in row for row in rows), len(thoughts)) == (200, 50, 50)


def test_there_are_120_different_pairs():
    rows = (FOLDER / "pairs.jsonl").read_text().splitlines()
    assert len(set(rows)) == len(rows) == 120
    assert all(row["chosen"] != row["rejected"] for row in map(json.loads, rows))
