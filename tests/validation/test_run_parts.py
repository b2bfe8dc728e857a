"""The report of a validation: parts that crash, what is left out of it, and its page."""

from __future__ import annotations

import json
import os
import platform
import socket
from importlib import import_module
from pathlib import Path

import pytest

from kumi.validation.part import Part
from kumi.validation.part_table import PARTS
from kumi.validation.run_parts import JSON_FILE, PAGE_FILE, validate
from kumi.validation.shareable import Private, frames_in, shareable
from kumi.validation.validation_page import page

HERE = Path(__file__).parent


def part(name: str, function: str, seconds: float = 60.0) -> Part:
    return Part(name, f"trial_parts:{function}", seconds, f"It is {name}.")


@pytest.fixture
def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE)}


def files(folder: Path) -> tuple[dict, str]:
    return json.loads((folder / JSON_FILE).read_text()), (folder / PAGE_FILE).read_text()


def test_a_part_that_ends_badly_costs_only_its_own_rest(tmp_path, environ):
    parts = [
        part("killed", "killed"),
        part("gone", "leaves"),
        part("hanging", "hangs", 0.5),
        part("absent", "skipped"),
        part("missing", "no_such_function"),
        part("sound", "sound"),
    ]
    lines: list[str] = []
    returned = validate(tmp_path / "out", "cpu", parts=parts, environ=environ, show=lines.append)
    report, text = files(tmp_path / "out")
    assert report == returned
    results = {result["name"]: result for result in report["parts"]}
    statuses = {name: result["status"] for name, result in results.items()}
    assert statuses == {
        "killed": "crashed",
        "gone": "crashed",
        "hanging": "late",
        "absent": "skipped",
        "missing": "failed",
        "sound": "ok",
    }
    assert [result["rows"] for result in results.values()] == [
        [{"what": "before the crash"}],
        [{"what": "before the end"}],
        [{"what": "before the wait"}],
        [],
        [],
        [{"what": "a figure", "tokens/s": 12.5}, {"what": "a device", "value": "cpu"}],
    ]
    assert results["killed"]["reason"] == "the process ended by SIGSEGV"
    assert any("kumi.validation.part_process" in place for place in results["killed"]["where"])
    assert any("kumi.validation.part_process" in place for place in results["hanging"]["where"])
    assert results["gone"]["reason"] == "the process ended with code 7"
    assert results["absent"]["reason"] == "there is no such device"
    assert "no_such_function" in results["missing"]["reason"]
    assert report["complete"]
    assert "| a figure | 12.5 |  |" in text
    assert [line.split()[0] for line in lines] == list(results)


@pytest.mark.parametrize("first", [0, 1])
def test_every_part_may_crash_and_the_others_end(first, tmp_path, environ):
    """Every second part of the table crashes, and then the others."""
    functions = ["killed" if index % 2 == first else "sound" for index in range(len(PARTS))]
    parts = [part(each.name, function) for each, function in zip(PARTS, functions)]
    report = validate(tmp_path, "cpu", parts=parts, environ=environ)
    expected = ["crashed" if function == "killed" else "ok" for function in functions]
    assert [result["status"] for result in report["parts"]] == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_parts_do_not_take_themselves_for_ranks(variables, tmp_path, environ):
    report = validate(tmp_path, "cpu", parts=[part("launched", "launched")], environ=environ | variables)
    assert report["parts"][0]["rows"] == [{"rank": False}]


def test_parts_beyond_the_time_are_named(tmp_path, environ):
    parts = [part("first", "hangs", 60.0), part("second", "sound"), part("last", "sound", 0.25)]
    report = validate(tmp_path, "cpu", parts=parts, seconds=8.0, environ=environ)
    assert [result["status"] for result in report["parts"]] == ["late", "left out", "left out"]
    assert report["parts"][1]["reason"] == "the 8 s for all parts were spent"
    assert report["seconds"] < 30


# What a machine may tell, and what it must not.
USER, HOST, HOME = "zaphod", "heart-of-gold", "/home/Zaphod Beeblebrox"
VARIABLES = {
    "HOME": HOME,
    "USER": USER,
    "HOSTNAME": f"{HOST}.example.org",
    "API_TOKEN": "canary-4711-secret",
    "SHORT_TOKEN": "qx7z",
    "LIST": "first-canary:second-canary;third-canary",
    "SENTENCE": "a canary of several words",
}
PRIVATE = [
    f"{HOME}/data/train.jsonl",
    f"file://{HOST}/share",
    "/mnt/projekt/run-17",
    "C:\\Users\\zaphod\\kumi",
    "~/models/secret",
    "data/hidden.txt",
    f"{USER}@{HOST}",
    "zaphod@example.org",
    "10.17.3.4:29500",
    "fe80::1234:5678:9abc",
    "52:54:00:12:34:56",
    "GPU-8f3c1a52-1b2c-3d4e-5f60-718293a4b5c6",
    "00000000:3B:00.0",
    "1654922003211",
    "0x7f3a2c001000",
    *VARIABLES.values(),
    "SECOND-CANARY",
]
NEEDLES = [
    "zaphod",
    "beeblebrox",
    "heart-of-gold",
    "example.org",
    "canary",
    "qx7z",
    "projekt",
    "train.jsonl",
    "hidden",
    "10.17",
    "fe80",
    "52:54",
    "8f3c1a52",
    "3b:00",
    "1654922003211",
    "7f3a2c",
]


def test_the_report_tells_nothing_private(tmp_path, monkeypatch, environ):
    for module, name in ((platform, "node"), (socket, "gethostname")):
        monkeypatch.setattr(module, name, lambda: f"{HOST}.example.org")
    monkeypatch.setenv("HOME", HOME)
    told = " | ".join(f"cannot read '{word}', {word}: no such thing ({word})" for word in PRIVATE)
    (tmp_path / "told").write_text(told)
    hostile = {**environ, **VARIABLES, "TOLD": str(tmp_path / "told")}
    parts = [part("telling", "tells_everything"), part("sound", "sound")]
    lines: list[str] = []
    out = tmp_path / "out"
    validate(out, "cpu", parts=parts, environ=hostile, show=lines.append)
    written = "".join(file.read_text() for file in out.iterdir()).lower() + "".join(lines).lower()
    assert [needle for needle in NEEDLES if needle in written] == []
    assert str(HERE).lower() not in written
    assert "valueerror: cannot read" in written


def test_figures_and_sentences_stay():
    private = Private({"A": "1", "B": "12.6", "C": "cu", "PATH": "/usr/bin:/bin"}, ["box"])
    for text in (
        "NVIDIA H100 80GB HBM3, 79.2 GiB free, 3.4 TB/s and 12,345 tokens/s",
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
        "torch 2.13.0+cu126 for 12.6, NCCL 2.28.9, driver 570.86.15",
        "kumi.nn.rope:62 _turn",
        "the boxes took 1e-05 of 100000000 tokens",
    ):
        assert shareable(text, private) == text
    assert shareable({"a /tmp/x b": ["on box"]}, private) == {"a [removed] b": ["on [removed]"]}
    assert len(shareable("word " * 1000, private)) < 320


def test_words_of_the_report_itself_stay():
    values = {"MODE": "none", "KIND": "copy", "BACKEND": "cuda", "LIST": "profile:checkpoint", "TOKEN": "swordfish"}
    private = Private(values, ["zaphod"])
    for text in (
        "There should be none.",
        "copy within the device",
        "CUDA",
        "Steps while a checkpoint is written: how long training waits for the copy",
        "nvjet_tst_320x128_64x3_1x2_h_bz_coopB_TNT",
    ):
        assert shareable(text, private) == text
    assert shareable("Swordfish of zaphod at 0x7f3a", private) == "[removed] of [removed] at [removed]"
    assert shareable("ptr=0xABC", private) == "ptr=[removed]"
    assert shareable("none", Private({}, ["none"])) == "[removed]"  # a name is private whatever it is


def test_places_are_those_of_packages():
    stack = (
        'File "/home/zaphod/kumi/src/kumi/nn/rope.py", line 62, in _turn\n'
        'File "/opt/secret/lib/python3.11/site-packages/torch/nn/module.py", line 5, in __call__\n'
        'File "/home/zaphod/torch/mine.py", line 5, in train\n'
        'File "/home/zaphod/mine.py", line 7 in <module>\n'
    )
    assert frames_in(stack) == ["kumi.nn.rope:62 _turn", "torch.nn.module:5 __call__"]
    assert frames_in(f"Current thread (most recent call first):\n{stack}", most=1) == ["kumi.nn.rope:62 _turn"]


def test_the_page_has_a_table_for_each_part():
    rows = [{"kind": "a|b<c>", "ms": 0.123456, "near": True}, {"kind": "other", "count": 12345, "ms": None}]
    result = {"name": "fp8", "needs": "Why.", "status": "ok", "reason": "", "seconds": 1.0, "where": [], "rows": rows}
    text = page({"device": "cuda", "kumi": "1", "seconds": 3.0, "complete": False, "parts": [result]})
    assert "| kind | ms | near | count |\n|---|---|---|---|\n| a\\|b&lt;c> | 0.1235 | yes |  |\n" in text
    assert "| other |  |  | 12,345 |" in text
    assert "It is not complete" in text


@pytest.mark.parametrize("each", PARTS, ids=lambda each: each.name)
def test_parts_have_functions(each):
    module, _, name = each.function.partition(":")
    assert callable(getattr(import_module(module), name))


@pytest.mark.exhaustive
def test_the_whole_validation_runs_on_a_cpu(tmp_path):
    report = validate(tmp_path, "cpu")
    ended = {result["name"]: result["status"] for result in report["parts"]}
    reasons = {result["name"]: result["reason"] for result in report["parts"] if result["reason"]}
    assert ended.pop("fp8") == "skipped"
    assert set(ended.values()) == {"ok"}, reasons
    assert "no float8 matmuls" in reasons["fp8"]
    assert report["complete"]
    rows = {result["name"]: result["rows"] for result in report["parts"]}
    assert all(row["near"] for row in rows["numbers"])
    for row in rows["several devices"]:
        assert row.get("near", True)
        assert row["result"].startswith(("ok", "rank 1 was killed")), row
    assert [row["exit code"] for row in rows["run"] if "exit code" in row] == [143, 0]
    assert {"what": "exit code", "value": 5} in rows["out of memory"]
