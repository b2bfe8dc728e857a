"""The rollouts of a run as plain data, and as the lines of `kumi describe` and `kumi plan`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kumi.plan.estimates import Estimate
from kumi.plan.memory.device_memory import rank_generation_memory
from kumi.plan.rollout_step import rollout_step
from kumi.report import phrases
from kumi.spec.job import Job
from kumi.units import format_bytes, format_count

# Where a number of tokens comes from -> the words for it.
_PROMPTS = {
    "assumed": "assumed, as many as a row leaves beside the longest reply",
    "run file": "rollout.prompt_tokens",
    "data": "the prepared data's",
}
_REPLIES = {
    "assumed": "assumed, the bound rollout.max_new_tokens",
    "run file": "rollout.reply_tokens",
    "measured": "measured in the latest batches",
}


def rollout_data(job: Job, estimate: Estimate) -> dict[str, Any] | None:
    """Return the estimates of the rollouts of `job` as plain data, for --json; None for a run without them.

    lengths: mean tokens of prompts and replies, and where they come from.
    slots: replies that a rank generates at once. context: tokens of the longest prompt with the longest reply.
    seconds: see `kumi.plan.rollout_step.RolloutStep`; None if the device's speed is unknown. `positions` in it counts
        those of all rows of the first update; batch.tokens_per_step should be close to it.
    memory: bytes of a rank while it generates: weights (with ZeRO also gathered ones), gradients that stay, optimizer
        states, reference, reward models, states of the critic, cache, the rest.
    kinds: the same bytes by field of `MemoryEstimate`.
    """
    spec = job.rollout
    if spec is None:
        return None
    memory, seconds = rank_generation_memory(job, estimate.layout), rollout_step(job, estimate.layout)
    named = {
        "weights": memory.params + memory.gathered + memory.weights,
        "gradients": memory.grads,
        "optimizer": memory.optimizer,
        "reference": memory.reference,
        "reward models": memory.reward_models,
        "critic": memory.critic,
        "cache": memory.cache,
    }
    return {
        "lengths": {
            "prompt_tokens": spec.prompt_tokens,
            "prompts_from": spec.prompts_from,
            "reply_tokens": spec.reply_tokens,
            "replies_from": spec.replies_from,
        },
        "slots": spec.rank_slots(estimate.layout),
        "context": spec.context,
        "seconds": None if seconds is None else seconds.as_dict(),
        "memory": {**named, "rest": memory.total - sum(named.values()), "total": memory.total},
        "kinds": asdict(memory),
    }


def length_line(data: dict[str, Any]) -> str:
    """Return the lengths of prompts and replies, and where they come from."""
    lengths = data["lengths"]
    return (
        f"prompts of {lengths['prompt_tokens']:,.0f} tokens ({_PROMPTS[lengths['prompts_from']]}), replies of "
        f"{lengths['reply_tokens']:,.0f} ({_REPLIES[lengths['replies_from']]})"
    )


def time_line(data: dict[str, Any]) -> str:
    """Return the seconds of generation, of reward models, of log-probs and of the updates of a rollout batch."""
    seconds = data["seconds"]
    if seconds is None:
        return "time not known, because the device's speed is not"
    count = seconds["updates"]
    log_probs = f", log-probs {phrases.seconds(seconds['log_probs'])}" if seconds["log_probs"] else ""
    scoring = f", reward models {phrases.seconds(seconds['scoring'])}" if seconds["scoring"] else ""
    updates = f"{count} updates of" if count > 1 else "training"
    rows = f"{seconds['rows']} rows of {seconds['row_tokens']:,} tokens"
    return (
        f"generation {phrases.seconds(seconds['generate'])} ({format_count(seconds['tokens_per_second'])} tokens/s)"
        f"{scoring}{log_probs}, {updates} {phrases.seconds(seconds['train_seconds'])} ({rows}): "
        f"{phrases.seconds(seconds['batch_seconds'])} a batch without {'other ' if scoring else ''}rewards, "
        f"{phrases.percent(seconds['generation_share'])} of it generation"
    )


def memory_line(data: dict[str, Any]) -> str:
    """Return the bytes of a rank while it generates."""
    memory = data["memory"]
    parts = [f"{name} {format_bytes(memory[name])}" for name in memory if name != "total" and memory[name]]
    slots = f"{data['slots']} replies of up to {data['context']:,} tokens with their prompts"
    return f"{format_bytes(memory['total'])} per rank while it generates {slots}: {', '.join(parts)}"
