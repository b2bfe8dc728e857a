"""The tasks of [eval], scored by the model in training, on the ranks and with the layout that train it.

Only rank 0 has the rows. It broadcasts units of work, batches of requests or prompts, which all ranks compute together
(`kumi.evaluation.evaluated_model`). Scores come from the forward pass of training in its dtype, so they are those of
`kumi eval` on the run's checkpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import nn

from kumi.config import ResolvedRun
from kumi.convert.hf.write_folder import read_generation
from kumi.data import load_tokenizer
from kumi.data.chat.template import load_template
from kumi.evaluation.evaluated_model import EvaluatedModel, lead, lead_and_share
from kumi.evaluation.load_on_mesh import context_length
from kumi.evaluation.resumed_model import ResumedModel
from kumi.evaluation.run_task import OpenTask, encode_prompts, open_task, run_task
from kumi.evaluation.task_result import TaskResult
from kumi.evaluation.text_model import TextModel
from kumi.inference.model_files import reply_ends
from kumi.inference.prompt_encoder import conversation_encoder
from kumi.parallel.mesh import Mesh
from kumi.train.prepare_data import chat_options, tokenizer_folder


class _FirstUnitDoneError(Exception):
    """Ends a task after its first unit of work."""


class RunTasks:
    """The tasks of a run on one rank, and its model.

    A batch has at most as many tokens as a microbatch of training, so that it fits into the same memory, unless
    eval.max_length asks for longer rows.
    """

    def __init__(self, run: ResolvedRun, model: nn.Module, mesh: Mesh) -> None:
        """Read all rows, on rank 0. Raise ConfigError if a file, a row or a prompt does not fit its task."""
        seq_len = run.batch.seq_len
        folder = tokenizer_folder(run)
        self._tokenizer = load_tokenizer(folder)
        self._model = EvaluatedModel(
            model,
            mesh,
            max_length=context_length(run.model, run.config.eval.max_length or seq_len),
            tokens=run.layout.microbatch * seq_len,
            decode_text=self._tokenizer.decode,
        )
        chat = chat_options(run)
        settings = read_generation(folder) or {}
        self._stop_ids = reply_ends(self._tokenizer, settings, chat, run.model.vocab_size, folder)
        self._encodings: dict[tuple[str, bool], array[int]] = {}
        self._tasks: list[OpenTask] = []
        if mesh.rank == 0:
            tasks = run.config.eval.tasks
            has_conversations = any(task.chat for task in tasks)
            encoder = conversation_encoder(self._tokenizer, chat, self._stop_ids) if has_conversations else None
            self._tasks = [encode_prompts(open_task(task), encoder) for task in tasks]

    def evaluate(self) -> list[TaskResult]:
        """Return the results of all tasks, on every rank. Every rank must call it."""
        return lead_and_share(self._model, lambda model: [run_task(task, self._texts(model)) for task in self._tasks])

    def compute_first_units(self) -> None:
        """Compute the first unit of work of each task, which has its longest rows. Every rank must call it.

        Raise ConfigError for a text that is longer than the model's context.
        """
        lead(self._model, self._compute_first_units)

    def _compute_first_units(self, model: EvaluatedModel) -> None:
        """Run each task on rank 0, until `ResumedModel` calls `stop` after the first unit of work."""

        def stop() -> None:
            raise _FirstUnitDoneError

        for task in self._tasks:
            with suppress(_FirstUnitDoneError):
                run_task(task, self._texts(model, stop))

    def _texts(self, model: EvaluatedModel, check: Callable[[], None] = lambda: None) -> TextModel:
        """Return `model` as a model of texts, which `run_task` needs. `check` is called after every unit of work."""
        # Without recorded scores, a ResumedModel computes all scores. It is used for its calls of `check`.
        scored = ResumedModel(model, title=None, check=check)
        return TextModel(scored, self._tokenizer, stop_ids=self._stop_ids, encodings=self._encodings)


def task_values(results: Sequence[TaskResult]) -> dict[str, float]:
    """Return the metrics of `results` under `<task>/<metric>`."""
    return {f"{result.name}/{name}": metric.value for result in results for name, metric in result.metrics.items()}


def task_errors(results: Sequence[TaskResult]) -> dict[str, float]:
    """Return the standard errors of the metrics of `results` under `<task>/<metric>_stderr`."""
    return {
        f"{result.name}/{name}_stderr": metric.stderr
        for result in results
        for name, metric in result.metrics.items()
        if metric.stderr is not None
    }


def check_tasks(run: ResolvedRun) -> None:
    """Raise ConfigError unless the files of all tasks have rows that fit them, and a chat template if they need one."""
    for task in run.config.eval.tasks:
        open_task(task)
        if task.chat:
            load_template(chat_options(run), tokenizer_folder(run))
