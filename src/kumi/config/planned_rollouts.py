"""The rollouts of a run for the planner, with the lengths of prompts and replies: measured, given, or else the largest.

    prompts   of the prepared data; else rollout.prompt_tokens; else all that a row leaves beside the longest reply
    replies   of the run's rollouts so far; else rollout.reply_tokens; else rollout.max_new_tokens

Nothing here prepares data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kumi.config.document_lengths import prepared_store
from kumi.config.model_source import read_source_config
from kumi.config.reward_section import model_rewards
from kumi.config.rollout_section import RolloutSection
from kumi.config.schema import PlanConfig
from kumi.errors import KumiError
from kumi.files.json_lines import json_objects
from kumi.remote.cache_folder import local_run_folder
from kumi.rewards.reward_spec import ModelReward
from kumi.spec import families
from kumi.spec.model import ModelSpec
from kumi.spec.rollout import LengthSource, RolloutSpec

if TYPE_CHECKING:
    from kumi.data import Store

# The number of the latest rollout batches whose lengths of replies are averaged: the policy changes, and older batches
# say less.
_BATCHES = 10


def rollout_spec(config: PlanConfig) -> RolloutSpec | None:
    """Return the rollouts of `config`; None for a run without them."""
    section = config.rollout
    if section is None:
        return None
    mean_prompt, longest, prompts_from = _prompt_tokens(config, section)
    mean_reply, replies_from = _reply_tokens(config, section)
    return RolloutSpec(
        prompts=section.prompts,
        group_size=section.group_size,
        max_new_tokens=section.max_new_tokens,
        slots=section.slots,
        updates=section.updates,
        passes=section.passes,
        prompt_tokens=mean_prompt,
        longest_prompt=longest,
        reply_tokens=mean_reply,
        prompts_from=prompts_from,
        replies_from=replies_from,
        reference=config.objective.reads_reference and not config.off_adapters_are_reference,
        reward_models=tuple(
            (reward.name, reward_model_spec(reward, read_source_config(reward.source, key)))
            for key, reward in model_rewards(config.rewards).items()
        ),
    )


def reward_model_spec(reward: ModelReward, hf_config: Mapping[str, Any]) -> ModelSpec:
    """Return the model of `reward`, whose config.json is `hf_config`. Raise ConfigError unless it gives scores."""
    spec = families.from_hf(hf_config)
    if spec.head == "score":
        return spec
    raise reward.error(
        "source",
        reward.source,
        f"is {families.architecture(spec)}, which gives logits and no score; name a sequence classifier with one "
        "label, such as the `hf` of a run with objective.kind='reward'",
    )


def _prompt_tokens(config: PlanConfig, section: RolloutSection) -> tuple[float, int, LengthSource]:
    """Return the mean tokens of a prompt, those of the longest one, and where they come from."""
    room = config.batch.seq_len - section.max_new_tokens
    store = prepared_store(config)
    lengths = None if store is None else _prepared_prompts(store, room)
    if lengths is not None and len(lengths):
        return float(lengths.mean()), int(lengths.max()), "data"
    if section.prompt_tokens is not None:
        given = min(section.prompt_tokens, room)
        return given, given, "run file"
    return room, room, "assumed"


def _prepared_prompts(store: Store, room: int) -> np.ndarray[Any, Any] | None:
    """Return the tokens of the prepared prompts of at most `room` tokens; None if they cannot be read."""
    try:
        columns = [store.open_units(source, "train").columns["tokens"] for source in store.sources if source.train]
    except (KumiError, OSError, KeyError):
        return None  # training reports why
    lengths = np.concatenate([np.array(column) for column in columns]) if columns else np.zeros(0)
    return lengths[lengths <= room]


def _reply_tokens(config: PlanConfig, section: RolloutSection) -> tuple[float, LengthSource]:
    """Return the mean tokens of a reply, and where the number comes from."""
    measured = _measured_replies(config)[-_BATCHES:]
    if measured:
        return min(float(np.mean(measured)), section.max_new_tokens), "measured"
    if section.reply_tokens is not None:
        return min(section.reply_tokens, section.max_new_tokens), "run file"
    return section.max_new_tokens, "assumed"


def _measured_replies(config: PlanConfig) -> list[float]:
    """Return the mean tokens of a reply of each rollout batch in the run folder."""
    if config.train is None:
        return []
    try:
        entries = list(json_objects(local_run_folder(config.train.out) / "metrics.jsonl"))
    except (KumiError, OSError):
        return []  # training reports why
    lengths = [entry.get("rollout/length") for entry in entries]
    return [float(length) for length in lengths if isinstance(length, int | float) and length > 0]
