"""The files of a run's reward models: checked before the run starts, and recognised when it resumes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.config import ResolvedRun
from kumi.config.planned_rollouts import reward_model_spec
from kumi.config.reward_section import model_rewards
from kumi.convert.base_digest import base_digest
from kumi.convert.hf import read_folder
from kumi.data import load_tokenizer
from kumi.data.chat.template import find_template
from kumi.data.tokenizer import Tokenizer
from kumi.files.untrusted import brief
from kumi.paths import shown_path
from kumi.rewards.reward_spec import ModelReward
from kumi.spec import families
from kumi.spec.data_source import ChatOptions
from kumi.spec.model import ModelSpec
from kumi.train.prepare_data import chat_options, tokenizer_folder

# The key of a checkpoint's metadata for `reward_model_identities`.
REWARD_MODELS = "reward_models"


@dataclass(frozen=True)
class RewardModelFiles:
    """A checked reward model on disk.

    padding: the id of its padding token, by which transformers finds the last token of a sequence.
    reads: one of `kumi.rewards.reward_spec.READINGS`; "" if it depends on the run's tokenizer, not trained yet.
    """

    reward: ModelReward
    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    padding: int
    reads: str


def open_reward_models(run: ResolvedRun) -> list[RewardModelFiles]:
    """Return the reward models of `run`, without weights. Raise ConfigError or ModelError for one that cannot score."""
    folders = run.reward_folders
    return [_open(run, reward, folders[reward.name]) for reward in model_rewards(run.config.rewards).values()]


def check_reward_models(run: ResolvedRun) -> None:
    """Raise ConfigError or ModelError for a reward model of `run` that cannot score."""
    open_reward_models(run)


def reward_model_identities(run: ResolvedRun) -> dict[str, dict[str, str]]:
    """Return for each reward model of `run`, by name, its folder and a digest of its weights, tokenizer and
    template."""
    return {
        name: {"folder": str(folder.resolve()), "digest": _digest(folder)}
        for name, folder in run.reward_folders.items()
    }


def _digest(folder: Path) -> str:
    """Return a digest of the weights, the tokenizer and the chat template in `folder`."""
    template = find_template(ChatOptions(), folder)
    parts = [base_digest(folder), load_tokenizer(folder).digest, "" if template is None else template.digest]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def _open(run: ResolvedRun, reward: ModelReward, folder: Path) -> RewardModelFiles:
    """Return the reward model of `reward` in `folder`. Raise ConfigError or ModelError if it cannot score."""
    if not (folder / "config.json").is_file():
        raise reward.error(
            "source",
            reward.source,
            f"has no config.json in {shown_path(str(folder))}; name the Hugging Face folder of a reward model, such as "
            "the `hf` of a run with objective.kind='reward'",
        )
    config = families.read_config(folder)
    spec = reward_model_spec(reward, config)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > spec.vocab_size:
        raise reward.error(
            "source",
            reward.source,
            f"has a tokenizer of {tokenizer.vocab_size} entries for a model with vocab_size={spec.vocab_size}; restore "
            "the tokenizer with which it was trained",
        )
    padding = _padding(reward, config, spec)
    read_folder.locate_params_by_headers(folder, spec)
    return RewardModelFiles(reward, folder, spec, tokenizer, padding, _reads(run, reward, tokenizer))


def _padding(reward: ModelReward, config: dict[str, Any], spec: ModelSpec) -> int:
    """Return pad_token_id of `config`. Raise ConfigError unless it is an id of the vocabulary."""
    token_id = config.get("pad_token_id")
    if type(token_id) is int and 0 <= token_id < spec.vocab_size:
        return token_id
    shown = "no pad_token_id" if token_id is None else f"pad_token_id {brief(token_id)}"
    raise reward.error(
        "source",
        reward.source,
        f"has {shown} in its config.json, so that transformers does not know which token of a padded sequence is the "
        f"last, whose score counts; set it to the id, below {spec.vocab_size}, of a token that stands in no text",
    )


def _reads(run: ResolvedRun, reward: ModelReward, tokenizer: Tokenizer) -> str:
    """Return what the reward model with `tokenizer` reads: `reward.reads`, or by default what suits both tokenizers.

    While the run's own tokenizer is not trained yet, the default stays "". Raise ConfigError if `reward.reads` is
    "tokens" and the run has another tokenizer than the reward model.
    """
    folder = tokenizer_folder(run)
    if not (folder / "tokenizer.json").is_file():
        return reward.reads
    own = load_tokenizer(folder)
    if own.digest != tokenizer.digest:
        if reward.reads == "tokens":
            raise reward.error(
                "reads",
                reward.reads,
                f"needs the policy's tokenizer, but {tokenizer.folder} has another one than "
                f"{folder}; use 'reply' or 'whole', which render the text again",
            )
        return reward.reads or "reply"
    theirs, template = find_template(ChatOptions(), tokenizer.folder), find_template(chat_options(run), folder)
    # A reward model without a template has no rendering of its own, and reads the policy's.
    is_same_rendering = theirs is None or (template is not None and theirs.digest == template.digest)
    return reward.reads or ("tokens" if is_same_rendering else "reply")
