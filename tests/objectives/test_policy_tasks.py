"""Every preset, and PPO with a critic, solves a bandit and a task of short replies whose best policies are known.

The policy is a table of logits for each prompt, position and token before. A batch is used for two updates, and its
sampler differs a little from the policy, so that ratios, clips and corrections are at work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kumi.objectives import IGNORED
from kumi.objectives.advantages import group_advantages, rewards_with_kl, teacher_advantages
from kumi.objectives.policy_gradient import PolicyGradient
from kumi.objectives.policy_presets import POLICY_GRADIENTS
from kumi.objectives.ppo import ValueLoss, gae, moments, token_rewards, whitened
from reply_rows import row_sums

SEEDS, GROUP, UPDATES, END = 5, 32, 2, 0
MISMATCH = 0.1  # standard deviation of the sampler's logits from the policy's


@dataclass(frozen=True)
class Task:
    """Prompts with replies of at most `length` tokens of `vocab`; the token 0 ends a reply."""

    prompts: int
    length: int
    vocab: int
    steps: int

    def rewards(self, prompts, tokens, trained):
        """Return the rewards in [0, 1] of replies: the share of the positions with the token that the prompt names.

        In a bandit, an arm's reward grows with the distance from the prompt's worst arm.
        """
        if self.length == 1:
            return ((tokens[:, 0] - prompts) % self.vocab / (self.vocab - 1)).double()
        return ((tokens == self.target(prompts)) & trained).double().mean(1)

    def target(self, prompts):
        """Return the best replies: tokens that are not the end, and the end."""
        places = torch.arange(self.length)
        tokens = 1 + (prompts[:, None] + places) % (self.vocab - 1)
        return tokens.masked_fill(places == self.length - 1, END)


TASKS = {"bandit": Task(2, 1, 6, 25), "replies": Task(2, 4, 5, 40)}
# A mean over the seeds. RLOO's best policy is not that of its rewards alone, but within 0.005 of it.
SOLVED, NEAR_TEACHER = 0.95, 0.02
PPO = PolicyGradient(advantage="gae", clip_high=0.2)
SETTINGS = {
    **{name: kind() for name, kind in POLICY_GRADIENTS.items()},
    "dr_grpo": POLICY_GRADIENTS["dr_grpo"](constant=4.0),
    "grpo of the paper": POLICY_GRADIENTS["grpo"](kl="k3", beta=0.01),
    "k2": POLICY_GRADIENTS["dapo"](kl="k2", beta=0.01, advantage="batch_std"),
    "reinforce": PolicyGradient(advantage="group", ratio="none", clip="none"),
    "icepop": POLICY_GRADIENTS["dapo"](correction="mask"),
    "ppo": PPO,
}


class Table:
    """Logits, or values, of each prompt, position and token before."""

    def __init__(self, task, width, seed, spread=0.0):
        random = torch.Generator().manual_seed(seed)
        shape = (task.prompts, task.length, task.vocab, width)
        self.entries = (spread * torch.randn(shape, generator=random, dtype=torch.float64)).requires_grad_()

    def at(self, prompts, tokens):
        """Return the entries (N, T, width) at each position of `tokens` (N, T)."""
        before = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=END)
        places = torch.arange(tokens.shape[1])
        return self.entries[prompts[:, None], places, before]

    def log_probs(self, prompts, tokens, trained):
        """Return the log-probs (N, T) of `tokens`, 0 where nothing is trained."""
        chosen = self.at(prompts, tokens).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        return chosen * trained


def sample(task, table, prompts, random):
    """Return replies (N, T), which positions they have, and the sampler's log-probs."""
    noise = MISMATCH * torch.randn(table.entries.shape, generator=random, dtype=torch.float64)
    logits = table.entries.detach() + noise
    tokens = torch.zeros(len(prompts), task.length, dtype=torch.int64)
    trained = torch.zeros_like(tokens, dtype=torch.bool)
    log_probs = torch.zeros(tokens.shape, dtype=torch.float64)
    running, before = torch.ones(len(prompts), dtype=torch.bool), torch.full((len(prompts),), END)
    for place in range(task.length):
        chances = logits[prompts, place, before].log_softmax(-1)
        drawn = torch.multinomial(chances.exp(), 1, generator=random)[:, 0]
        tokens[:, place] = before = torch.where(running, drawn, END)
        trained[:, place] = running
        log_probs[:, place] = chances.gather(1, drawn[:, None])[:, 0] * running
        running = running & (drawn != END)
    return tokens, trained, log_probs


def advantages_of(objective, task, prompts, tokens, trained, batch, teacher, critic):
    """Return the advantages (N, T), and the returns of a critic or None."""
    old, reference = batch["old_log_probs"].numpy(), batch["reference_log_probs"].numpy()
    if objective.advantage == "teacher":
        return teacher_advantages(teacher.log_probs(prompts, tokens, trained).detach().numpy(), old), None
    rewards, mask = task.rewards(prompts, tokens, trained).numpy(), trained.numpy()
    if objective.advantage == "gae":
        values = critic.at(prompts, tokens).detach()[..., 0].numpy() * mask
        advantages, returns = gae(token_rewards(rewards, old - reference, mask, 0.01), values, mask, 1.0, 0.95)
        return whitened(advantages, mask, moments(advantages, mask)), returns
    if objective.kl == "reward":
        rewards = rewards_with_kl(rewards, old.sum(1), reference.sum(1), objective.beta)
    return group_advantages(rewards.reshape(-1, GROUP), objective.advantage).reshape(-1, 1) * mask, None


def train(objective, task, seed):
    """Return the policy, and the teacher."""
    random = torch.Generator().manual_seed(seed)
    policy, teacher = Table(task, task.vocab, seed), Table(task, task.vocab, seed + 100, spread=1.5)
    critic, critic_loss = Table(task, 1, seed), ValueLoss()
    reference = policy.entries.detach().clone()
    optimizers = [torch.optim.Adam([table.entries], lr=0.1) for table in (policy, critic)]
    prompts = torch.arange(task.prompts).repeat_interleave(GROUP)
    for _ in range(task.steps):
        tokens, trained, sampler = sample(task, policy, prompts, random)
        batch = {
            "labels": tokens.masked_fill(~trained, IGNORED),
            "segments": torch.zeros_like(tokens),
            "trained": trained.sum(1, keepdim=True),
            "old_log_probs": policy.log_probs(prompts, tokens, trained).detach(),
            "sampler_log_probs": sampler,
        }
        frozen = Table(task, task.vocab, seed)
        frozen.entries = reference
        batch["reference_log_probs"] = frozen.log_probs(prompts, tokens, trained)
        advantages, returns = advantages_of(objective, task, prompts, tokens, trained, batch, teacher, critic)
        batch["advantages"] = torch.from_numpy(np.ascontiguousarray(advantages))
        if returns is not None:
            batch["returns"] = torch.from_numpy(returns)
            batch["old_values"] = critic.at(prompts, tokens).detach()[..., 0] * trained
        for _ in range(UPDATES):
            loss = objective.loss(policy.log_probs(prompts, tokens, trained), batch, objective.count(batch), row_sums)
            if returns is not None:
                values = critic.at(prompts, tokens)[..., 0] * trained
                loss = loss + critic_loss.loss(values, batch, critic_loss.count(batch), row_sums)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    return policy, teacher


def expected_reward(task, policy):
    """Return the mean reward of replies of the policy, over its prompts."""
    random, prompts = torch.Generator().manual_seed(0), torch.arange(task.prompts).repeat_interleave(500)
    with torch.no_grad():
        chances = policy.entries.log_softmax(-1)
    frozen = Table(task, task.vocab, 0)
    frozen.entries = chances
    tokens, trained, _ = sample(task, frozen, prompts, random)
    return task.rewards(prompts, tokens, trained).mean().item()


def divergence(task, policy, teacher):
    """Return the mean of KL(policy || teacher) of a token, on replies of the policy."""
    random, prompts = torch.Generator().manual_seed(0), torch.arange(task.prompts).repeat_interleave(500)
    tokens, trained, _ = sample(task, policy, prompts, random)
    with torch.no_grad():
        ours, theirs = (table.at(prompts, tokens).log_softmax(-1) for table in (policy, teacher))
    return ((ours.exp() * (ours - theirs)).sum(-1))[trained].mean().item()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("task", TASKS)
def test_the_best_policy_is_learnt(task, name):
    task, objective = TASKS[task], SETTINGS[name]
    results = [train(objective, task, seed) for seed in range(SEEDS)]
    if objective.advantage == "teacher":
        ends = [divergence(task, policy, teacher) for policy, teacher in results]
        begins = [divergence(task, Table(task, task.vocab, 0), teacher) for _, teacher in results]
        assert np.mean(ends) < NEAR_TEACHER < 0.1 < np.mean(begins)
        return
    rewards = [expected_reward(task, policy) for policy, _ in results]
    assert np.mean(rewards) > SOLVED


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo"])
def test_advantages_of_the_other_sign_learn_the_worst_policy(name):
    """The tasks can fail: a loss with a wrong sign is noticed."""

    class Wrong(PolicyGradient):
        def loss(self, log_probs, batch, units, sums):
            return super().loss(log_probs, batch | {"advantages": -batch["advantages"]}, units, sums)

    objective = Wrong(**vars(SETTINGS[name]))
    task = replace(TASKS["bandit"], steps=20)
    assert np.mean([expected_reward(task, train(objective, task, seed)[0]) for seed in range(2)]) < 0.4
