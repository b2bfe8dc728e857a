"""kumi's own tasks: perplexity of texts, multiple choice, exact match."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kumi.config.task_section import TaskSection
from kumi.errors import ConfigError
from kumi.evaluation.task_result import Metric, TaskResult, mean, perplexities
from kumi.evaluation.task_rows import answers_of, choices_of, documents, prompt_of, right_choice, rows
from kumi.evaluation.text_model import TextModel
from kumi.inference.sampling import Sampling


def run_task(task: TaskSection, model: TextModel) -> TaskResult:
    """Return the result of `task`. Raise ConfigError for rows that do not fit it."""
    count, metrics = _KINDS[task.kind](task, model)
    return TaskResult(task.name, task.kind, count, metrics)


def _perplexity(task: TaskSection, model: TextModel) -> tuple[int, Mapping[str, Metric]]:
    texts = documents(task)
    scores = model.score_documents(texts)
    return len(texts), perplexities([score for score, _ in scores], [tokens for _, tokens in scores], texts)


def _multiple_choice(task: TaskSection, model: TextModel) -> tuple[int, Mapping[str, Metric]]:
    """`acc`: the choice with the largest log-prob is the right one. `acc_norm`: that with the largest log-prob per byte
    of UTF-8, without the separator."""
    questions = [
        (prompt_of(task, place, row), choices, right_choice(task, place, row, choices))
        for place, row in rows(task)
        for choices in [choices_of(task, place, row)]
    ]
    pairs = [(prompt, task.separator + choice) for prompt, choices, _ in questions for choice in choices]
    scores = iter(model.score_pairs(pairs))
    right, right_by_byte = [], []
    for _, choices, answer in questions:
        log_probs = [next(scores).log_prob for _ in choices]
        by_byte = [log_prob / len(text.encode()) for log_prob, text in zip(log_probs, choices, strict=True)]
        right.append(float(log_probs.index(max(log_probs)) == answer))
        right_by_byte.append(float(by_byte.index(max(by_byte)) == answer))
    return len(questions), {"acc": mean(right), "acc_norm": mean(right_by_byte)}


def _exact_match(task: TaskSection, model: TextModel) -> tuple[int, Mapping[str, Metric]]:
    """`exact_match`: the greedy reply is one of the answers, white space around both left out."""
    questions = [(prompt_of(task, place, row), answers_of(task, place, row)) for place, row in rows(task)]
    prompts = [prompt for prompt, _ in questions]
    if task.chat:
        if model.render_chat is None:
            raise ConfigError(
                f"task {task.name}: chat=true, but the model has no chat template; set chat=false, or name a chat model"
            )
        prompts = [model.render_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    sampling = Sampling(max_new_tokens=task.max_new_tokens, temperature=0.0, stop_strings=task.stop)
    replies = model.replies(prompts, sampling)
    right = [
        float(reply.strip() in {answer.strip() for answer in answers})
        for reply, (_, answers) in zip(replies, questions, strict=True)
    ]
    return len(questions), {"exact_match": mean(right)}


_KINDS: dict[str, Callable[[TaskSection, TextModel], tuple[int, Mapping[str, Metric]]]] = {
    "perplexity": _perplexity,
    "multiple_choice": _multiple_choice,
    "exact_match": _exact_match,
}
