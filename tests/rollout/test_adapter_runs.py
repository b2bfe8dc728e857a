"""Reinforcement learning of adapters, on matrices in four bits and on experts: on in the decoder, off in the reference.

The run learns, its log-probs are those of its models for single replies, and a resumed run is the same run.
"""

import contextlib
import shutil
from functools import cache
from importlib.util import find_spec
from itertools import chain

import numpy as np
import pytest
import torch
from tests.rollout.conftest import MOE, history, rollout_file, train, write_data
from tests.train.conftest import back_to, losses, metrics

from kumi.config import load
from kumi.config.resolve import open_run
from kumi.config.run_length import run_mixture
from kumi.convert.load_weights import load_decoder
from kumi.nn.nf4 import quantize_linears
from kumi.rollout.group import as_array
from kumi.rollout.prompt_sampler import PromptSampler
from kumi.storage.checkpoint import open as open_checkpoint
from kumi.train.prepare_data import open_data
from small_llama import SMALL_LLAMA

PACKED = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
# The base model, and the adapters.
KINDS = {
    "four bits": (SMALL_LLAMA, {"r": 8, "quantize": "nf4"}),
    "experts": (MOE, {"r": 4, "target_modules": ["q_proj", "v_proj", "experts"]}),
    "experts in four bits": (MOE, {"r": 4, "target_modules": ["o_proj", "experts"], "quantize": "nf4"}),
}
OFTEN = [pytest.param("four bits", marks=PACKED), "experts"]
EVERY = [*OFTEN, pytest.param("experts in four bits", marks=[PACKED, pytest.mark.exhaustive])]
# Two updates a batch: the checkpoint after step 13 is within the batch of the weights after 12.
STEPS, BETWEEN, WITHIN = 14, 12, 13
GROUPS, SIZE = 8, 8
SETTINGS = {
    "model": {"source": "model", "balance": "none"},
    "data__tokenizer": "model",
    "objective": {"kind": "grpo", "kl": "k3", "beta": 0.001},
    "rollout": {"prompts": GROUPS, "group_size": SIZE, "max_new_tokens": 8, "updates": 2, "samples_every": 0},
    "optim": {"lr": 5e-2, "warmup_steps": 0, "schedule": "constant"},
    "train": {"steps": STEPS, "out": "run", "doctor": False},
    "checkpoint": {"every": 1, "keep": 3},
}


def settings_of(kind):
    if "num_experts" not in KINDS[kind][0]:
        return {**SETTINGS, "model": {"source": "model"}, "lora": KINDS[kind][1]}
    return {**SETTINGS, "lora": KINDS[kind][1]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function from a kind to the folder of its base model in `model`, and of the run of its adapters."""

    @cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        write_data(folder)
        # One small update of random weights, large enough for adapters below a frozen head to change its output.
        model = {"init": "random", "config": {**KINDS[kind][0], "initializer_range": 0.8}}
        base = {"model": model, "train__steps": 1, "optim__lr": 1e-4, "export__enabled": True}
        assert train(folder, **base) == 0
        shutil.move(folder / "run" / "hf", folder / "model")
        shutil.rmtree(folder / "run")
        assert train(folder, **settings_of(kind)) == 0
        return folder

    return run


def checkpoint_of(folder, step):
    return folder / "run" / "checkpoints" / f"step_{step:06d}"


@pytest.mark.parametrize("kind", EVERY)
def test_the_reward_rises(trained, kind):
    rewards = [entry["rollout/reward"] for entry in metrics(trained(kind) / "run") if "rollout/reward" in entry]
    assert len(rewards) == STEPS // 2
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards


def batch_of(folder, kind):
    """The prompts, the replies and the sampler's log-probs of the batch in the checkpoint within one, and its state."""
    state = open_checkpoint(checkpoint_of(folder, WITHIN)).meta["rollouts"]
    assert state["version"] == BETWEEN
    with contextlib.chdir(folder):
        run = open_run(load(rollout_file(folder, **settings_of(kind))))
        store = open_data(run)
        sampler = PromptSampler(run_mixture(run.config, store), store.train_names)
        prompts = [list(sampler.prompt(group["prompt"]).ids) for group in state["groups"] for _ in range(SIZE)]
    replies = [reply for group in state["groups"] for reply in group["replies"]]
    return (
        prompts,
        [as_array(reply["ids"]) for reply in replies],
        [as_array(reply["log_probs"]) for reply in replies],
        state,
    )


@torch.no_grad()
def log_probs(decoder, prompt, reply):
    """The log-probs of the tokens of a reply, in a row of its own."""
    logits = decoder(torch.tensor([[*prompt, *reply[:-1].tolist()]]))[0, len(prompt) - 1 :]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(reply.astype(np.int64))[:, None])[:, 0].numpy()


def loaded(source, kind):
    """The model in `source`, without layouts, with matrices in four bits if those of the run are."""
    decoder = load_decoder(source, dtype=torch.float64).eval()
    if "quantize" in KINDS[kind][1]:
        quantize_linears(decoder, torch.float64)
    return decoder


@pytest.mark.parametrize("kind", EVERY)
def test_adapters_are_on_in_the_decoder_and_off_in_the_reference(trained, kind):
    folder = trained(kind)
    prompts, replies, sampled, state = batch_of(folder, kind)
    old, reference = as_array(state["old"]), as_array(state["reference"])
    # The first of two updates has its old log-probs itself, so the batch has those of the other half of the replies.
    stored = ~np.isnan(old)
    assert stored.sum() == len(old) // 2
    assert np.concatenate(sampled)[stored] == pytest.approx(old[stored], abs=1e-9)
    base, adapted = (loaded(source, kind) for source in (folder / "model", checkpoint_of(folder, BETWEEN)))
    # Adapters are loaded in float32.
    saved = open_checkpoint(checkpoint_of(folder, BETWEEN))
    names = [name for name in saved.tensors if name.startswith("model/")]
    missing = adapted.load_state_dict({name.removeprefix("model/"): saved.read(name) for name in names}, strict=False)
    assert not missing.unexpected_keys
    for decoder, expected in ((base, reference), (adapted, np.concatenate(sampled))):
        own = [log_probs(decoder, prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
        assert np.concatenate(own) == pytest.approx(expected, abs=1e-9)
    # Adapters that have learned make a difference.
    assert np.abs(old - reference)[stored].mean() > 0.05


@pytest.mark.parametrize("kind", EVERY)
def test_a_resumed_run_is_the_same_run(trained, tmp_path, kind):
    shutil.copytree(trained(kind), tmp_path, dirs_exist_ok=True)
    back_to(tmp_path / "run", WITHIN)
    assert train(tmp_path, **settings_of(kind)) == 0
    assert losses(tmp_path / "run") == losses(trained(kind) / "run")
    assert history(tmp_path / "run") == history(trained(kind) / "run")


LAYOUTS = {
    "four bits": ({"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 1}),
    "experts": ({"dp_shard": 2, "zero": 3, "ep": 2}, {"tp": 2}, {"dp_shard": 2, "zero": 3}),
    "experts in four bits": ({"dp_shard": 2, "zero": 3, "ep": 2},),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(
            kind,
            layout,
            id="-".join([kind, *map(str, chain(*layout.items()))]),
            marks=[PACKED] if "quantize" in KINDS[kind][1] else [],
        )
        for kind, layouts in LAYOUTS.items()
        for layout in layouts
    ],
)
def test_a_layout_has_the_results_of_one_process(trained, tmp_path, kind, layout):
    shutil.copytree(trained(kind), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    steps = {"steps": 6, "out": "run", "doctor": False}
    devices = {"cluster": {"devices_per_node": 2}, "layout": layout}
    assert train(tmp_path, **{**settings_of(kind), "train": steps}, **devices) == 0
    alone = history(trained(kind) / "run")
    assert history(tmp_path / "run") == [entry for entry in alone if entry["step"] < 6]
    expected = {step: loss for step, loss in losses(trained(kind) / "run").items() if step <= 6}
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-8, abs=1e-10)
