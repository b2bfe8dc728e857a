"""A small run: two hundred short documents, a tokenizer of 300 entries, a Llama of a few thousand parameters."""

import contextlib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from kumi.cli import main
from small_llama import SMALL_LLAMA

WORDS = [
    "the",
    "a",
    "model",
    "layer",
    "token",
    "rank",
    "step",
    "loss",
    "learns",
    "reads",
    "writes",
    "splits",
    "adds",
    "of",
    "and",
    "over",
    "with",
    "small",
    "large",
    "fast",
]


def _documents(count):
    draw = random.Random(0)
    for _ in range(count):
        yield " ".join(draw.choices(WORDS, k=draw.randrange(5, 60))) + "."


def write_documents(file):
    """Write two hundred short documents to `file`, one a line."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in _documents(200)))


def run_file(folder, **changes):
    """Write run.toml for use in `folder`, where its data lies, changed by `section={...}` and
    `section__key=value`; its path."""
    sections = {
        "model": {"init": "random", "config": dict(SMALL_LLAMA)},
        "cluster": {"devices_per_node": 1},
        "batch": {"seq_len": 32, "tokens_per_step": 256},
        "data": {
            "tokenizer": {"vocab_size": 300},
            "validation": 0.1,
            "workers": 1,
            "sources": [{"path": "documents.jsonl"}],
            "cache": "tokens",
        },
        "optim": {"lr": 1e-2, "warmup_steps": 2},
        "precision": {"kind": "fp32"},
        # tests/doctor checks nodes before runs
        "train": {"steps": 6, "out": "run", "doctor": False},
        "checkpoint": {"every": 2, "keep": 9},
        "log": {"every": 1},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        node = sections
        for part in path:
            node = node[part]
        node[last] = value
    import tomli_w

    file = folder / "run.toml"
    file.write_text(tomli_w.dumps({"name": "small", **sections}))
    return file


@dataclass(frozen=True)
class Small:
    """A folder with data and a run that has finished, made once; tests take copies."""

    folder: Path

    def copy(self, target):
        shutil.copytree(self.folder, target, dirs_exist_ok=True)
        return target


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_documents(folder / "documents.jsonl")
    with contextlib.chdir(folder):
        assert main(["train", str(run_file(folder))]) == 0
    return Small(folder)


def metrics(out):
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    """Step to training loss. Every step has one line, however often the run began again."""
    trained = [entry for entry in metrics(out) if "train/loss" in entry]
    assert [entry["step"] for entry in trained] == list(range(1, len(trained) + 1))
    return {entry["step"]: entry["train/loss"] for entry in trained}


def back_to(out, step):
    """Undoes a finished run to its state after `step` steps, as if it had been killed then."""
    for folder in (Path(out) / "checkpoints").glob("step_*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    shutil.rmtree(Path(out) / "hf", ignore_errors=True)
    (Path(out) / "probe.safetensors").unlink(missing_ok=True)
