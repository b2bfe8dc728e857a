"""Numbers of a rollout batch for metrics.jsonl, and the sentence of a run that cannot learn.

Keys: rollout/reward (mean over the replies that could be scored), rollout/reward/<name> (mean of one reward),
rollout/reward_std (mean over groups of the standard deviation), rollout/learnable (share of groups whose replies have
different rewards), rollout/unscored (replies that could not be scored), rollout/length and rollout/longest (tokens of
replies: mean and maximum), rollout/truncated (share of replies that were cut), rollout/entropy (mean negative log-prob
of the sampled tokens, an estimate of the policy's entropy), rollout/stale (share of replies that earlier weights
generated), rollout/tokens_per_s (of generation); rollout/rounds, rollout/dropped, rollout/spares, rollout/next_prompt,
time/generate_s, time/score_s (see `Collected`); time/log_probs_s. With a critic, critic/value and critic/return (means
over tokens before the updates), critic/explained_variance (the share of the variance of the returns that these values
explain).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np

from kumi.objectives.ppo import explained_variance
from kumi.rollout.collect_groups import Collected
from kumi.rollout.group import Group
from kumi.rollout.rollout_batch import RolloutBatch, TokenTargets


def batch_metrics(batch: RolloutBatch, collected: Collected, log_probs_s: float) -> dict[str, float]:
    """Return the metrics of a batch that was just collected."""
    replies = [reply for group in batch.groups for reply in group.replies]
    lengths, rewards = [len(reply.ids) for reply in replies], batch.rewards
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a mean over no rewards is nan, and is left out below
        values = {
            "rollout/reward": float(np.nanmean(rewards)),
            "rollout/reward_std": float(np.nanmean(np.nanstd(rewards, axis=1, ddof=1))),
            **{f"rollout/reward/{name}": mean for name, mean in _reward_means(batch.groups).items()},
        }
    values |= {
        "rollout/learnable": sum(group.differs for group in batch.groups) / len(batch.groups),
        "rollout/unscored": int(np.isnan(rewards).sum()),
        "rollout/length": float(np.mean(lengths)),
        "rollout/longest": max(lengths),
        "rollout/truncated": sum(reply.truncated for reply in replies) / len(replies),
        "rollout/entropy": -float(batch.sampler.mean()),
        "rollout/stale": sum(reply.version < batch.version for reply in replies) / len(replies),
        "rollout/rounds": collected.rounds,
        "rollout/dropped": len(collected.dropped),
        "rollout/spares": len(collected.spares),
        "rollout/next_prompt": collected.next_prompt,
        "time/generate_s": collected.generate_s,
        "time/score_s": collected.score_s,
        "time/log_probs_s": log_probs_s,
    }
    if collected.generated:
        values["rollout/tokens_per_s"] = collected.generated / max(collected.generate_s, 1e-9)
    return {name: value for name, value in values.items() if not math.isnan(value)}


def critic_metrics(batch: RolloutBatch, targets: TokenTargets) -> dict[str, float]:
    """Return the metrics of the critic before the updates with `batch`; {} without one, or without any return."""
    if targets.returns is None or batch.values is None or not np.isfinite(targets.returns).any():
        return {}
    scored = np.isfinite(targets.returns)
    values, returns = batch.values[scored], targets.returns[scored]
    explained = explained_variance(values, returns)
    means = {"critic/value": float(values.mean()), "critic/return": float(returns.mean())}
    return means if math.isnan(explained) else means | {"critic/explained_variance": explained}


def _reward_means(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of each configured reward, by its name, over the replies that it could score."""
    sums: dict[str, list[float]] = {}
    for group in groups:
        for outcome in group.outcomes:
            for name, value in outcome.parts.items():
                if value is not None:
                    sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def nothing_learned(step: int, idle: int, batch: RolloutBatch) -> str:
    """Return the sentence for a run that ends at `step`, because all advantages of `idle` updates in a row were 0.

    batch: the batch of the last of these updates.
    """
    replies, scored = batch.rewards.size, batch.rewards[~np.isnan(batch.rewards)]
    beginning = (
        f"step {step}: nothing can be learned, because all advantages were 0 in {idle} updates in a row "
        f"(rollout.stop_after): "
    )
    if not any(outcome.parts for group in batch.groups for outcome in group.outcomes):  # a run without rewards
        return (
            f"{beginning}the teacher gives all {batch.tokens} tokens of the last batch the policy's own log-probs; set "
            f"reference.model to another model"
        )
    if not len(scored):
        reason = f"none of the {replies} replies of the last batch could be scored; see the notes on rewards above"
    elif scored.min() == scored.max():
        reason = f"all {len(scored)} scored replies of the last batch have the reward {scored[0]:g}"
    else:
        reason = (
            f"all replies to a prompt have the same reward, between {scored.min():g} and {scored.max():g} over the "
            f"prompts of the last batch"
        )
    return (
        f"{beginning}{reason}; look at the replies in samples/, give prompts that the model sometimes "
        f"solves, or raise rollout.group_size"
    )
