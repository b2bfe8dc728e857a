"""A run of PPO, whose numbers are computed again with numpy and with the models of its checkpoints, reply by reply."""

import contextlib
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from tests.rollout.conftest import rollout_file, train, write_data
from tests.train.conftest import metrics

from kumi.cli import main
from kumi.config import load
from kumi.config.resolve import open_run
from kumi.config.run_length import run_mixture
from kumi.convert.open_model import open_source
from kumi.rollout.group import as_array
from kumi.rollout.prompt_sampler import PromptSampler
from kumi.storage.checkpoint import open as open_checkpoint
from kumi.train.prepare_data import open_data

BETA, GAMMA, LAMBDA, VALUE_CLIP = 0.2, 0.97, 0.9, 0.01
GROUPS, SIZE = 6, 6
SETTINGS = {
    "batch": {"seq_len": 64, "tokens_per_step": 512},
    "objective": {"kind": "ppo", "beta": BETA, "gamma": GAMMA, "gae_lambda": LAMBDA},
    "critic": {"lr": 2e-3, "grad_clip": 0.5, "value_clip": VALUE_CLIP},
    "rollout": {"prompts": GROUPS, "group_size": SIZE, "max_new_tokens": 56, "updates": 2, "samples_every": 0},
    "rewards": [{"kind": "function", "name": "some", "file": "reward.py:at_times"}],
    "train": {"steps": 2, "out": "run", "doctor": False},
    "checkpoint": {"every": 1, "keep": 9},
    "optim": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two updates with one batch, and a checkpoint after each."""
    folder = tmp_path_factory.mktemp("critic")
    write_data(folder)
    assert train(folder, **SETTINGS) == 0
    return folder


def checkpoint_of(folder, step):
    return folder / "run" / "checkpoints" / f"step_{step:06d}"


class Batch:
    """The replies of the batch in the checkpoint after step 1, with their rewards and log-probs, and what PPO makes of
    them by loops over single tokens."""

    def __init__(self, folder):
        state = open_checkpoint(checkpoint_of(folder, 1)).meta["rollouts"]
        with contextlib.chdir(folder):
            run = open_run(load(rollout_file(folder, **SETTINGS)))
            store = open_data(run)
            sampler = PromptSampler(run_mixture(run.config, store), store.train_names)
            self.prompts = [list(sampler.prompt(group["prompt"]).ids) for group in state["groups"] for _ in range(SIZE)]
        self.replies = [as_array(reply["ids"]) for group in state["groups"] for reply in group["replies"]]
        self.rewards = [reward for group in state["groups"] for reward in group["rewards"]]
        cuts = np.cumsum([len(reply) for reply in self.replies])[:-1]
        self.old, self.reference, self.values = (
            np.split(as_array(state[name]), cuts) for name in ("old", "reference", "values")
        )
        self.advantages, self.returns = self._targets()

    def _targets(self):
        plain, returns = [], []
        for reward, old, reference, values in zip(self.rewards, self.old, self.reference, self.values, strict=True):
            if reward is None:
                plain.append(None)
                returns.append(None)
                continue
            rewards = [-BETA * (ours - theirs) for ours, theirs in zip(old, reference, strict=True)]
            rewards[-1] += reward
            later = [*values[1:], 0.0]
            deltas = [r + GAMMA * after - now for r, now, after in zip(rewards, values, later, strict=True)]
            steps = range(len(deltas))
            gae = [sum((GAMMA * LAMBDA) ** (k - t) * deltas[k] for k in steps[t:]) for t in steps]
            plain.append(np.array(gae))
            returns.append(np.array(gae) + values)
        every = np.concatenate([gae for gae in plain if gae is not None])
        mean, spread = every.mean(), np.sqrt(every.var(ddof=1) + 1e-8)
        zeros = [np.zeros(len(reply)) for reply in self.replies]
        white = [zero if gae is None else (gae - mean) / spread for gae, zero in zip(plain, zeros, strict=True)]
        return white, returns

    def part(self, update):
        """The numbers of the replies that an update trains."""
        half = GROUPS * SIZE // 2
        return range(update * half, (update + 1) * half)

    def outputs(self, decoder, number):
        """What `decoder` says before each token of a reply, in a row of its own."""
        prompt, reply = self.prompts[number], self.replies[number]
        with torch.no_grad():
            output = decoder(torch.tensor([[*prompt, *reply[:-1].tolist()]]))[0, len(prompt) - 1 :]
        if output.ndim == 1:
            return output.numpy()
        chosen = torch.from_numpy(reply.astype(np.int64))
        return output.log_softmax(-1).gather(1, chosen[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def batch(trained):
    return Batch(trained)


def policy_loss(batch, update, log_probs):
    """The loss of the policy by loops over tokens, given a function from a reply's number to its log-probs."""
    terms = []
    for number in batch.part(update):
        ratios = np.exp(log_probs(number) - batch.old[number])
        for ratio, advantage in zip(ratios, batch.advantages[number], strict=True):
            terms.append(-min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage))
    return np.mean(terms)


def critic_loss(batch, update, values):
    """The loss of the critic by loops over tokens, and the share of tokens whose value is clipped."""
    terms, clipped = [], []
    for number in batch.part(update):
        if batch.returns[number] is None:
            continue
        for value, before, target in zip(values(number), batch.values[number], batch.returns[number], strict=True):
            near = np.clip(value, before - VALUE_CLIP, before + VALUE_CLIP)
            terms.append(max((value - target) ** 2, (near - target) ** 2) / 2)
            clipped.append((near - target) ** 2 > (value - target) ** 2)
    return np.mean(terms), np.mean(clipped)


def test_the_run_has_ragged_replies_and_one_without_a_reward(batch):
    assert len({len(reply) for reply in batch.replies}) > 3
    assert 0 < sum(reward is None for reward in batch.rewards) < GROUPS * SIZE


def test_values_are_those_of_the_fresh_critic_for_single_replies(trained, batch):
    """The first update has the values with which the returns were made, so that none is clipped."""
    first = metrics(trained / "run")[0]
    loss, clipped = critic_loss(batch, 0, lambda number: batch.values[number])
    assert first["critic/loss"] == pytest.approx(loss, rel=1e-10)
    assert (first["critic/clipped"], clipped) == (0, 0)
    assert first["train/loss"] == pytest.approx(policy_loss(batch, 0, lambda number: batch.old[number]), rel=1e-9)


def test_the_second_update_has_clipped_ratios_and_values(trained, batch):
    """Both models have moved since the batch began; the checkpoint after the first update has them."""
    second, folder = metrics(trained / "run")[1], checkpoint_of(trained, 1)
    policy, critic = (open_source(folder, critic=critic).decoder(torch.float64).eval() for critic in (False, True))
    loss, clipped = critic_loss(batch, 1, lambda number: batch.outputs(critic, number))
    assert 0 < clipped < 1
    assert second["critic/loss"] == pytest.approx(loss, rel=1e-10)
    assert second["critic/clipped"] == pytest.approx(clipped, rel=1e-12)
    expected = policy_loss(batch, 1, lambda number: batch.outputs(policy, number))
    assert second["train/loss"] == pytest.approx(expected, rel=1e-9)
    assert abs(second["train/ratio"] - 1) > 1e-9


def test_the_batch_says_how_well_the_critic_knows_its_returns(trained, batch):
    first, second = metrics(trained / "run")
    scored = [number for number, returns in enumerate(batch.returns) if returns is not None]
    values, returns = (np.concatenate([each[number] for number in scored]) for each in (batch.values, batch.returns))
    assert first["critic/value"] == pytest.approx(values.mean(), rel=1e-9)
    assert first["critic/return"] == pytest.approx(returns.mean(), rel=1e-9)
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert first["critic/explained_variance"] == pytest.approx(explained, rel=1e-9)
    assert "critic/value" not in second


def test_the_critic_has_its_own_rate_clip_and_states(trained):
    for entry in metrics(trained / "run"):
        assert (entry["train/lr"], entry["critic/lr"]) == (1e-2, 2e-3)
    saved = open_checkpoint(checkpoint_of(trained, 2))
    names = [name.removeprefix("critic/") for name in saved.tensors if name.startswith("critic/")]
    of_policy = [name for name in saved.tensors if not name.startswith("critic/")]
    heads = ("model/lm_head.weight", "model/score.weight")
    assert (heads[0] in of_policy, heads[1] in names) == (True, True)
    assert sorted(name.replace("score", "lm_head") for name in names) == sorted(of_policy)
    # Adam's first moment of a first update is 0.1 of the gradient, clipped to 0.5.
    moments = [name for name in open_checkpoint(checkpoint_of(trained, 1)).tensors if name.endswith("/exp_avg")]
    read = open_checkpoint(checkpoint_of(trained, 1)).read
    norm = sum(float(read(name).square().sum()) for name in moments if name.startswith("critic/")) ** 0.5
    first = metrics(trained / "run")[0]
    assert norm == pytest.approx(0.1 * min(0.5, first["critic/grad_norm"]), rel=1e-4)


def test_the_critic_is_exported_and_another_run_begins_from_it(trained, tmp_path, capsys):
    exported = tmp_path / "critic"
    assert main(["convert", str(trained / "run"), str(exported), "--critic", "--verify"]) == 0
    assert "verified against" in capsys.readouterr().out
    shutil.copytree(trained, tmp_path / "next", ignore=shutil.ignore_patterns("run"))
    assert main(["convert", str(trained / "run"), str(tmp_path / "next" / "policy")]) == 0
    changes = {"model": {"source": "policy"}, "data__tokenizer": "policy", "critic": {"model": str(exported)}}
    steps = {"steps": 1, "out": "run", "doctor": False}
    settings = {**SETTINGS, **changes, "train": steps, "checkpoint": {"every": 1}}
    # Two updates a batch: the checkpoint after the first has the values.
    assert train(tmp_path / "next", **settings) == 0
    state = open_checkpoint(checkpoint_of(tmp_path / "next", 1)).meta["rollouts"]
    begun = Batch.__new__(Batch)
    begun.replies = [as_array(reply["ids"]) for group in state["groups"] for reply in group["replies"]]
    with contextlib.chdir(tmp_path / "next"):
        run = open_run(load(rollout_file(tmp_path / "next", **settings)))
        store = open_data(run)
        sampler = PromptSampler(run_mixture(run.config, store), store.train_names)
        begun.prompts = [list(sampler.prompt(group["prompt"]).ids) for group in state["groups"] for _ in range(SIZE)]
    decoder = open_source(exported).decoder(torch.float64).eval()
    values = np.concatenate([begun.outputs(decoder, number) for number in range(GROUPS * SIZE)])
    assert as_array(state["values"]) == pytest.approx(values, rel=1e-6, abs=1e-9)


def test_a_run_without_a_critic_has_none_to_export(tmp_path, capsys):
    write_data(tmp_path)
    assert train(tmp_path, train={"steps": 1, "out": "run", "doctor": False}) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "critic"), "--critic"]) == 2
    assert "has no critic, as its run trained none" in capsys.readouterr().err


def test_a_folder_without_a_model_of_the_policy_s_shape_is_no_critic(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    settings = {**SETTINGS, "critic": {"model": "nothing"}}
    assert train(tmp_path, **settings) == 2
    assert "critic.model: " in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_critic_of_a_policy_with_adapters_has_adapters(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    assert main(["convert", str(trained / "run"), str(tmp_path / "base"), "--to", "hf"]) == 0
    changes = {"model": {"source": "base"}, "data__tokenizer": "base", "lora": {"r": 4, "modules_to_save": ["lm_head"]}}
    assert train(tmp_path, **SETTINGS, **changes) == 0
    first, second = metrics(tmp_path / "run")
    # Adapters begin without effect, and the reference is the policy without them.
    assert first["critic/clipped"] == 0
    assert second["critic/loss"] > 0
    saved = open_checkpoint(checkpoint_of(tmp_path, 2))
    names = {name.partition("/")[2] for name in saved.tensors if name.startswith("critic/model/")}
    assert "model/score.weight" in names
    assert all("lora" in name or "score" in name for name in names)
    with contextlib.chdir(tmp_path):
        assert main(["convert", "run", "adapters", "--critic", "--verify"]) == 0
        assert main(["convert", "run", "merged", "--critic", "--to", "hf", "--verify"]) == 0
    assert "adapters merged, logits within" in capsys.readouterr().out
    assert open_source(tmp_path / "merged").spec.head == "score"


# Tokens of a reply -> updates, and the mean reward over five seeds that PPO reaches. Replies of lowercase letters have
# the reward 1, and 0.1 more if they begin with the letter of their row, which the prompt does not tell.
TASKS = {1: (80, 0.95), 4: (100, 0.9)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", TASKS)
def test_ppo_solves_a_bandit_and_short_replies(tmp_path, length):
    steps, solved = TASKS[length]
    write_data(tmp_path)
    rewards = []
    for seed in range(5):
        settings = {
            "objective": {"kind": "ppo", "beta": 0.01},
            "critic": {"lr": 1e-2},
            "precision": {"kind": "fp32"},
            "rollout": {"prompts": 32, "group_size": 1, "max_new_tokens": length, "updates": 2, "passes": 2},
            "optim": {"lr": 1e-2, "warmup_steps": 1, "schedule": "constant"},
            "checkpoint": {"every": 0},
            "train": {"steps": steps, "out": f"run{seed}", "seed": seed, "doctor": False},
        }
        assert train(tmp_path, **settings) == 0
        of_batches = [entry for entry in metrics(tmp_path / f"run{seed}") if "rollout/reward" in entry]
        rewards.append(np.mean([entry["rollout/reward"] for entry in of_batches[-3:]]))
        assert abs(of_batches[-1]["critic/value"] - of_batches[-1]["critic/return"]) < 0.2
    assert np.mean(rewards) > solved, rewards


def test_copies_of_the_weights_change_no_bit(trained, tmp_path):
    """On a GPU without FSDP the linear layers of both models have copies, which each update fills again."""
    losses = []
    for copies in (False, True):
        folder = tmp_path / str(copies)
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("run"))
        with mock.patch("kumi.parallel.build.uses_weight_copies", return_value=copies):
            assert train(folder, **SETTINGS, precision={"kind": "bf16"}) == 0
        losses.append([(entry["train/loss"], entry["critic/loss"]) for entry in metrics(folder / "run")])
    plain, copied = losses
    assert copied == plain
