"""The benchmark of chat data on few conversations, and its figures on the page."""

from __future__ import annotations

import json
from pathlib import Path

import chat_data

from kumi.data import load_tokenizer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "chat"
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "chat_data.json").read_text())


def test_conversations_are_rendered_and_tokenised():
    rows = list(chat_data.conversations(TEXT, 4, chat_data.LONG))
    assert rows == list(chat_data.conversations(TEXT, 4, chat_data.LONG))
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"] * 5
    tokens = load_tokenizer(MODEL)
    path = chat_data.row_path(tokens, rows[0])
    result = chat_data.render_case(path, rows)
    assert result["conversations_per_cpu_second"] > 0
    assert result["characters_of_samples"] > sum(len(message["content"]) for message in rows[0]["messages"])
    assert chat_data.plain_seconds(path, tokens, rows) > 0


def test_the_whole_command_is_measured(tmp_path):
    spent = chat_data.prepare_case(tmp_path / "run", MODEL, chat_data.conversations(TEXT, 8, chat_data.SHORT))
    assert list((tmp_path / "run" / "out").rglob("*_train_text_document.bin"))
    assert spent.cpu > 0
    assert spent.parent_mib > 1
    assert spent.worker_mib > 1


def test_the_page_has_the_figures_that_were_measured():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    render, prepare, memory = (RESULTS[part] for part in ("render", "prepare", "memory"))
    assert f"{render['conversations_per_cpu_second']:.0f} conversations a CPU second" in page
    assert f"{prepare['speed_of_plain']:.2f} of the speed of plain tokenising" in page
    for row in memory:
        cells = (f"{row['conversations']:,}", f"{row['parent_mib']:.0f}", f"{row['worker_mib']:.0f}")
        assert f"| {' | '.join(cells)} |" in page
    for name, result in RESULTS.items():
        if name.startswith("megatron"):
            for values in result["rounds"]:
                assert values["preprocess_data.py"]["equal"]
                assert f"{values['preprocess_data.py']['cpu_times_kumi']:.2f}" in page
