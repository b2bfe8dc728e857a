"""The head of the model that the objective of a run file needs: logits over the vocabulary, or one score per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.config.schema import PlanConfig
from kumi.errors import ConfigError, ModelError
from kumi.objectives import OBJECTIVES
from kumi.spec import families
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec
from kumi.spec.peft import with_adapters

# The name in lora.modules_to_save of the head that a critic does not have.
_LM_HEAD = "lm_head"


def with_objective_head(config: PlanConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json `hf_config` of a model with the head that the objective of `config` needs.

    A language model becomes a reward model, which has `score.weight` in place of `lm_head`. Raise ModelError if its
    family has no reward models, ConfigError if the objective needs the logits that a reward model lacks, or if a reward
    model should continue prompts.
    """
    kind = config.objective.kind
    if OBJECTIVES[kind].head != "score":
        if families.from_hf(hf_config).head == "score":
            raise ConfigError(
                f"objective.kind={kind!r} needs a language model, but {_architecture(hf_config)} has a score head, "
                f"and no logits; name a language model, or set objective.kind = 'reward'"
            )
        return dict(hf_config)
    if config.sample.prompts:
        raise ConfigError(
            f"sample.prompts with objective.kind={kind!r}: a reward model has scores, and no logits to continue a "
            f"prompt with; remove sample.prompts"
        )
    return families.with_score_head(hf_config)


def read_model(config: PlanConfig, hf_config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that `config` trains. `hf_config`: the config.json that the run file names.

    Raise the errors of `with_objective_head`.

    If a score head replaces the `lm_head` of `hf_config`, one of the model's notes says so.
    """
    trained = with_objective_head(config, hf_config)
    model = families.from_hf(trained)
    if trained.get("architectures") == hf_config.get("architectures"):
        return model
    note = (
        f"score.weight (1, {model.hidden_size}) is the head, in place of that of {_architecture(hf_config)}: it is "
        f"new, and drawn from train.seed"
    )
    return replace(model, notes=(*model.notes, note))


def read_critic(hf_config: Mapping[str, Any], lora: Lora | None) -> ModelSpec:
    """Return the critic of a policy with this config.json and these adapters: the same model with a score head.

    It is trained in full, or has adapters where the policy has them. Raise ConfigError if its family has no score
    heads.
    """
    try:
        critic = families.from_hf(families.with_score_head(hf_config))
    except ModelError as error:
        raise ConfigError(
            f"objective.advantage='gae' trains a critic, which is the policy with a score head: {error}; or use an "
            f"advantage of groups, such as 'group_std'"
        ) from None
    if lora is None:
        return critic
    modules = tuple(module for module in lora.modules if module != _LM_HEAD)
    return with_adapters(critic, replace(lora, modules=modules))


def _architecture(hf_config: Mapping[str, Any]) -> str:
    """Return the name of the class of transformers that `hf_config` describes."""
    return families.architecture(families.from_hf(hf_config))
