"""A small run of reinforcement learning: sixty prompts, a reward for lowercase letters, a Llama of a few thousand
parameters in float64."""

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest
import tomli_w

from kumi.cli import main
from small_llama import SMALL_LLAMA

REWARD = '''
def letters(prompt, reply, row):
    """The share of lowercase letters, and a little for the first letter of the row."""
    return sum(char.islower() for char in reply) / max(1, len(reply)) + 0.1 * reply.startswith(row["answer"])


def any_letter(prompt, reply, row):
    return float(any(char.islower() for char in reply))


def length(prompt, reply, row):
    return float(len(reply))


def same(prompt, reply, row):
    return 0.5


def at_times(prompt, reply, row):
    """Like `letters`, but a reply of a multiple of five characters cannot be scored."""
    return None if len(reply) % 5 == 0 else letters(prompt, reply, row)


def unscored(prompt, reply, row):
    return None
'''
MOE = {
    **SMALL_LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.fixture
def begun(uninterrupted, tmp_path):
    """A folder with the data of the module's `uninterrupted`, without its run."""
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run")
    return tmp_path


def write_data(folder):
    """Write the prompts and the rewards."""
    draw = random.Random(0)
    rows = [{"prompt": f"say {draw.choice('abcdefgh')} {n}:", "answer": draw.choice("abcdefgh")} for n in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def rollout_file(folder, **changes):
    """Write run.toml for use in `folder`, changed by `section={...}` and `section__key=value`; its path.

    A section that is None is left out.
    """
    sections = {
        "model": {"init": "random", "config": dict(SMALL_LLAMA)},
        "cluster": {"devices_per_node": 1},
        "batch": {"seq_len": 32, "tokens_per_step": 256},
        "objective": {"kind": "grpo"},
        "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 8, "samples_every": 2},
        "rewards": [{"kind": "function", "name": "letters", "file": "reward.py:letters"}],
        "data": {
            "tokenizer": {"vocab_size": 300},
            "validation": 0.0,
            "workers": 1,
            "sources": [{"path": "prompts.jsonl"}],
            "cache": "tokens",
        },
        "optim": {"lr": 3e-3, "warmup_steps": 1, "schedule": "constant"},
        "precision": {"kind": "fp64"},
        "train": {"steps": 6, "out": "run", "doctor": False},
        "checkpoint": {"every": 2, "keep": 9},
        "log": {"every": 1},
        "export": {"enabled": False},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        node = sections
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    file = folder / "run.toml"
    written = {name: section for name, section in sections.items() if section is not None}
    file.write_text(tomli_w.dumps({"name": "small", **written}))
    return file


def train(folder, *words, **changes):
    """Run `kumi train` in `folder`; return its exit code."""
    path = rollout_file(folder, **changes)
    with contextlib.chdir(folder):
        return main(["train", str(path), *words])


def history(out):
    """The entries of rollouts.jsonl."""
    return [json.loads(line) for line in (Path(out) / "rollouts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """A folder with the data, whose tokens are prepared by the first run."""
    folder = tmp_path_factory.mktemp("prompts")
    write_data(folder)
    return folder
