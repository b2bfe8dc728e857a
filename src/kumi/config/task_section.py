"""An evaluation task: in [eval] of a run file, or in a file of tasks for `kumi eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from kumi.config.section import Positive, Section, Switch, Text
from kumi.rewards.reward_spec import GymReward
from kumi.spec.data_source import is_gym

# Descriptions of the keys that the reward of reasoning-gym has, too.
_TEXTS = {key.name: key.metadata["text"] for key in fields(GymReward)}
TASK_KINDS = ("perplexity", "multiple_choice", "exact_match", "reasoning_gym")

# The key of a task -> the kinds that use it.
_USED_BY = {
    "text_key": ("perplexity",),
    "prompt": ("multiple_choice", "exact_match"),
    "choices_key": ("multiple_choice",),
    "answer_key": ("multiple_choice", "exact_match"),
    "separator": ("multiple_choice",),
    "chat": ("exact_match", "reasoning_gym"),
    "stop": ("exact_match", "reasoning_gym"),
    "max_new_tokens": ("exact_match", "reasoning_gym"),
    "tag": ("reasoning_gym",),
    "after": ("reasoning_gym",),
}

if TYPE_CHECKING:
    TaskKind: TypeAlias = str
else:
    TaskKind = Literal[TASK_KINDS]


class TaskSection(Section):
    """One evaluation task. A key is used by the kinds that are named beside it."""

    name: Annotated[Text, Field(pattern=r"^[\w.-]+$")] = Field(
        description="Name of the task, in tables and metrics: letters, digits, '_', '.', '-'.", examples=["quiz"]
    )
    kind: TaskKind = Field(
        description="'perplexity' of texts; 'multiple_choice' by the log-probs of the choices; 'exact_match' of a "
        "greedy reply with the answer; 'reasoning_gym': the score of a greedy reply by the scorer of its problem.",
        examples=["multiple_choice"],
    )
    path: Text = Field(
        description="File of the task: JSONL, JSON, parquet, or text for perplexity; or problems of reasoning-gym, as "
        "in a data source.",
        examples=["quiz.jsonl"],
    )
    text_key: Text = Field("text", description="perplexity: column of the text.")
    prompt: Text = Field(
        "{question}",
        description="multiple_choice, exact_match: text before the reply; {column} is replaced by the row's column.",
    )
    choices_key: Text = Field("choices", description="multiple_choice: column with the list of choices.")
    answer_key: Text = Field(
        "answer",
        description="multiple_choice: column with the index of the right choice, from 0, or its text. exact_match: "
        "column with the answer, or a list of answers.",
    )
    separator: str = Field(" ", description="multiple_choice: text between the prompt and a choice.")
    chat: Switch = Field(
        False,
        description="exact_match, reasoning_gym: render a prompt that is a text as a user's message with the chat "
        "template.",
    )
    stop: tuple[Text, ...] = Field((), description="exact_match, reasoning_gym: texts that end the reply.")
    max_new_tokens: Positive = Field(64, description="exact_match, reasoning_gym: tokens of a reply at most.")
    tag: str = Field("answer", description=f"reasoning_gym: {_TEXTS['tag']}")
    after: str = Field("", description=f"reasoning_gym: {_TEXTS['after']}")

    @field_validator("path")
    @classmethod
    def _check_suffix(cls, path: str) -> str:
        if not is_gym(path) and not Path(path).suffix:
            raise ValueError(f"{path!r} has no suffix that names its format; name a file such as quiz.jsonl")
        return path

    @model_validator(mode="after")
    def _check_used(self) -> TaskSection:
        """Refuse keys that the kind does not use."""
        for key in sorted(self.model_fields_set & set(_USED_BY)):
            # The configuration in a run folder gives every key, so a key with its default value counts as not given.
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.kind not in _USED_BY[key]:
                raise ValueError(
                    f"{key} is not used by kind={self.kind!r}, only by {' and '.join(_USED_BY[key])}; remove it"
                )
        return self


def check_unique(tasks: Sequence[TaskSection]) -> None:
    """Raise ValueError if two of `tasks` have the same name."""
    names = [task.name for task in tasks]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(f"two tasks have the name {double[0]!r}; give each its own")
