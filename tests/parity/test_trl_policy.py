"""Policy gradients against the GRPO and RLOO trainers of TRL 1.16: losses, and gradients of all parameters, from equal
weights, tokens and log-probs, in float64 but for norms and RoPE of transformers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl", reason="needs trl, the oracle of losses; it is in the extra dev")
    import trl_oracle

from text_units import add_gradients, load_model

from kumi.objectives.policy_gradient import PolicyGradient
from kumi.objectives.policy_presets import POLICY_GRADIENTS
from reply_rows import Reply, make_rows

# TRL and transformers warn of their own deprecated names.
pytestmark = pytest.mark.filterwarnings("ignore")
LOSS, GRADIENT = 2e-6, 2e-5
LENGTHS, LONGEST, PROMPT = (6, 3, 5, 2), 6, 3


class PlainK3(PolicyGradient):
    """A k3 term without its ratio, which TRL has as an option, and kumi not: its gradient is that of no divergence."""

    def _kl_terms(self, tokens, batch):
        gap = batch["reference_log_probs"].double() - tokens.log_probs
        return gap.exp() - gap - 1


@dataclass(frozen=True)
class Case:
    """A preset of kumi with `options`, and the options of TRL's trainer."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    their_options: dict[str, Any] = field(default_factory=dict)
    spread: float = 0.3  # of log-probs that differ from the policy's

    @property
    def objective(self) -> PolicyGradient:
        options = {"correction": "none", **self.options}
        if self.kind == "plain k3":
            return PlainK3(average="sequences", clip_high=0.2, kl="k3", **options)
        return POLICY_GRADIENTS[self.kind](**options)


CASES = {
    "grpo": Case("grpo", {}, {"loss_type": "grpo"}),
    "plain k3": Case("plain k3", {"beta": 0.04}, {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}),
    "k3": Case("grpo", {"kl": "k3", "beta": 0.04}, {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True}),
    "bnpo": Case("grpo", {"average": "tokens"}, {"loss_type": "bnpo"}),
    "dapo": Case("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": Case("dr_grpo", {"constant": 8.0}, {"loss_type": "dr_grpo"}),
    "gspo": Case(
        "gspo",
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        spread=1e-3,
    ),
    "cispo 5": Case("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo 1.2": Case("cispo", {"cap": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    "delta": Case("grpo", {"average": "tokens", "delta": 1.25}, {"loss_type": "bnpo", "delta": 1.25}),
    "gspo, means over tokens": Case(
        "gspo",
        {"average": "tokens", "clip_low": 0.1, "clip_high": 0.1},
        {"loss_type": "bnpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.1},
    ),
    "negative limit": Case(
        "dapo", {"negative_limit": 0.05}, {"loss_type": "dapo", "epsilon_high": 0.28, "off_policy_mask_threshold": 0.05}
    ),
    "rloo": Case("rloo", {"clip_low": 0.5, "clip_high": 0.5}, {"epsilon": 0.5, "epsilon_high": 0.5, "beta": 0.0}),
}


@dataclass(frozen=True)
class Tokens:
    """Four replies with advantages, and log-probs (4, LONGEST) near those of the policy."""

    prompts: torch.Tensor
    replies: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor


def _tokens(folder, spread):
    random, model = torch.Generator().manual_seed(1), load_model(folder / "policy", "fp64")
    prompts, replies = (torch.randint(0, 250, (4, size), generator=random) for size in (PROMPT, LONGEST))
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()
    rows = torch.cat([prompts, replies], 1)
    with torch.no_grad():
        ours = model(rows[:, :-1], labels=rows[:, 1:])[:, PROMPT - 1 :]
    old, reference = (ours + spread * torch.randn(ours.shape, generator=random) for _ in range(2))
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return Tokens(prompts, replies, mask, advantages, old, reference)


def _batch(tokens: Tokens):
    """Return the replies in kumi's rows, two in each."""
    replies = []
    for number, length in enumerate(LENGTHS):
        values = {
            "advantages": np.full(length, tokens.advantages[number].item()),
            "old_log_probs": tokens.old[number, :length].double().numpy(),
            "sampler_log_probs": tokens.old[number, :length].double().numpy(),
            "reference_log_probs": tokens.reference[number, :length].double().numpy(),
        }
        replies.append(Reply(tokens.prompts[number].numpy(), tokens.replies[number, :length].numpy(), values))
    return make_rows(replies, [[2, 0], [1, 3]], 24)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_of_policies(name, trl_models):
    case = CASES[name]
    tokens = _tokens(trl_models, case.spread)
    trainer = trl_oracle.make_policy_trainer("rloo" if name == "rloo" else "grpo", trl_models, **case.their_options)
    sums = (tokens.old * tokens.mask).sum(1)
    old = {"old_logps": sums} if name == "rloo" else {"old_per_token_logps": tokens.old}
    columns = {**old, "ref_per_token_logps": tokens.reference, "advantages": tokens.advantages}
    trainer.model.double()
    expected = trl_oracle.policy_loss(trainer, tokens.prompts, tokens.replies, tokens.mask, **columns)
    expected.backward()

    model = load_model(trl_models / "policy", "fp64")
    loss = add_gradients(model, case.objective, _batch(tokens))
    assert loss == pytest.approx(expected.item(), abs=LOSS)
    theirs = dict(trainer.model.named_parameters())
    difference = whole = 0.0
    for parameter_name, parameter in model.named_parameters():
        other = theirs[parameter_name].grad.double()
        difference += (parameter.grad.double() - other).square().sum().item()
        whole += other.square().sum().item()
    assert whole > 0
    assert difference**0.5 <= GRADIENT * whole**0.5


def test_the_cases_differ(trl_models):
    """The clips, terms and averages of the cases are at work: no two have the same loss."""
    losses = []
    for case in CASES.values():
        batch = _batch(_tokens(trl_models, case.spread))
        losses.append(add_gradients(load_model(trl_models / "policy", "fp64"), case.objective, batch))
    assert len({round(loss, 7) for loss in losses}) == len(losses)
