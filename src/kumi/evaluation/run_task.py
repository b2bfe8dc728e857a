"""kumi's own tasks: perplexity of texts, multiple choice, exact match, problems of reasoning-gym.

task = encode_prompts(open_task(section), chat)     # reads and checks all rows, without a model
result = run_task(task, model)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kumi.config.task_section import TaskSection
from kumi.errors import ConfigError
from kumi.evaluation.task_result import Metric, TaskResult, mean, perplexities
from kumi.evaluation.task_rows import answers_of, choices_of, documents, problem_of, prompt_of, right_choice, rows
from kumi.evaluation.text_model import TextModel
from kumi.inference.prompt_encoder import Prompt, PromptEncoder
from kumi.inference.sampling import Sampling
from kumi.rewards.answers import is_answer
from kumi.rewards.text_rewards import text_after


@dataclass(frozen=True)
class OpenTask:
    """A task with the rows of its file, checked.

    rows: for 'perplexity' texts; for 'multiple_choice' (prompt, choices, index of the right one); for 'exact_match'
    (place in the file, prompt, answers) and for 'reasoning_gym' (place in the file, prompt, scorer), where the prompt
    is a text, or the ids of a conversation.
    stop_ids: ids that end a reply to a conversation.
    """

    section: TaskSection
    rows: Sequence[Any]
    stop_ids: frozenset[int] = frozenset()


def open_task(task: TaskSection) -> OpenTask:
    """Return `task` with its rows. Raise ConfigError for a file that cannot be read, or rows that do not fit it."""
    read, _ = _KINDS[task.kind]
    return OpenTask(task, read(task))


def encode_prompts(task: OpenTask, chat: PromptEncoder | None) -> OpenTask:
    """Return `task` with its prompts encoded as conversations, if it asks for that.

    `chat`: encodes conversations; None for a model without a chat template. Raise ConfigError if the task then asks for
    conversations, and for a prompt that the template refuses.
    """
    name = task.section.name
    if not task.section.chat:
        return task
    if chat is None:
        raise ConfigError(
            f"task {name}: chat=true, but the model has no chat template; set chat=false, or name a chat model"
        )
    rows = [
        (place, chat.encode(prompt, where=f"task {name}: {place}"), answers) for place, prompt, answers in task.rows
    ]
    return replace(task, rows=rows, stop_ids=chat.stop_ids)


def run_task(task: OpenTask, model: TextModel) -> TaskResult:
    """Return the result of `task`. Raise ConfigError for texts that do not fit the model."""
    _, score = _KINDS[task.section.kind]
    return TaskResult(task.section.name, task.section.kind, len(task.rows), score(task, model))


def _perplexity(task: OpenTask, model: TextModel) -> Mapping[str, Metric]:
    scores = model.score_documents(task.rows)
    return perplexities([score for score, _ in scores], [tokens for _, tokens in scores], task.rows)


def _questions(task: TaskSection) -> list[tuple[str, list[str], int]]:
    """Return the prompt, the choices and the index of the right one of each row."""
    return [
        (prompt_of(task, place, row), choices, right_choice(task, place, row, choices))
        for place, row in rows(task)
        for choices in [choices_of(task, place, row)]
    ]


def _multiple_choice(task: OpenTask, model: TextModel) -> Mapping[str, Metric]:
    """`acc`: the choice with the largest log-prob is the right one. `acc_norm`: the choice with the largest log-prob
    per byte of its text in UTF-8, without the separator, is the right one."""
    pairs = [(prompt, task.section.separator + choice) for prompt, choices, _ in task.rows for choice in choices]
    scores = iter(model.score_pairs(pairs))
    right, right_by_byte = [], []
    for _, choices, answer in task.rows:
        log_probs = [next(scores).log_prob for _ in choices]
        by_byte = [log_prob / len(text.encode()) for log_prob, text in zip(log_probs, choices, strict=True)]
        right.append(float(log_probs.index(max(log_probs)) == answer))
        right_by_byte.append(float(by_byte.index(max(by_byte)) == answer))
    return {"acc": mean(right), "acc_norm": mean(right_by_byte)}


def _prompts(task: TaskSection) -> list[tuple[str, str, list[str]]]:
    """Return the place, the prompt and the answers of each row."""
    return [(place, prompt_of(task, place, row), answers_of(task, place, row)) for place, row in rows(task)]


def _exact_match(task: OpenTask, model: TextModel) -> Mapping[str, Metric]:
    """`exact_match`: the greedy reply is one of the answers, white space around both left out."""
    replies = _greedy_replies(task, model)
    right = [float(is_answer(reply, answers)) for reply, (_, _, answers) in zip(replies, task.rows, strict=True)]
    return {"exact_match": mean(right)}


def _greedy_replies(task: OpenTask, model: TextModel) -> list[str]:
    """Return the most likely reply to the prompt of each row, up to a stop string."""
    section = task.section
    sampling = Sampling(max_new_tokens=section.max_new_tokens, temperature=0.0, stop_strings=section.stop)
    prompts = [prompt for _, prompt, _ in task.rows]
    if section.chat:
        return model.replies_to(prompts, replace(sampling, stop_ids=task.stop_ids))
    return model.replies(prompts, sampling)


def _problems(task: TaskSection) -> list[tuple[str, Prompt, Callable[[str], float]]]:
    """Return the place, the prompt and the scorer of each row."""
    return [(place, *problem_of(task, place, row)) for place, row in rows(task)]


def _scored_problems(task: OpenTask, model: TextModel) -> Mapping[str, Metric]:
    """`score`: of the greedy reply by the problem's own scorer. `accuracy`: share of replies with the full score, 1."""
    texts = [text_after(reply, task.section.after) or "" for reply in _greedy_replies(task, model)]
    scores = [score(text) for text, (_, _, score) in zip(texts, task.rows, strict=True)]
    return {"accuracy": mean([float(score >= 1) for score in scores]), "score": mean(scores)}


# Kind -> the function that reads its rows, and the one that scores them.
_KINDS: dict[
    str, tuple[Callable[[TaskSection], Sequence[Any]], Callable[[OpenTask, TextModel], Mapping[str, Metric]]]
] = {
    "perplexity": (documents, _perplexity),
    "multiple_choice": (_questions, _multiple_choice),
    "exact_match": (_prompts, _exact_match),
    "reasoning_gym": (_problems, _scored_problems),
}
