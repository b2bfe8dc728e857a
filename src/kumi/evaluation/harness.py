"""Tasks of lm-evaluation-harness, through its own Python interface.

The harness runs on rank 0 as a world of one; the model's ranks serve it (`kumi.evaluation.evaluated_model`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lm_eval
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import utils as harness_utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from kumi.errors import ConfigError
from kumi.evaluation.harness_tasks import check_task_folder
from kumi.evaluation.score_requests import Request
from kumi.evaluation.task_result import HARNESS_KIND, Metric, TaskResult
from kumi.evaluation.text_model import TextModel
from kumi.inference.sampling import Sampling

# Resamplings for standard errors that have no formula; 1000 determine them to a few percent.
_BOOTSTRAP = 1000
# Tokens of a reply where a task sets no limit.
_MAX_NEW_TOKENS = 256
# Keys of a task's generation_kwargs that kumi reads: those that are fields of `Sampling`, and the others.
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")
_OTHER_KEYS = ("until", "max_gen_toks", "do_sample")


@dataclass(frozen=True)
class HarnessTasks:
    """The tasks to run.

    names: of tasks and groups.
    include_path: a folder with further tasks; None for those of the harness alone.
    num_fewshot: examples before each question; None for as many as a task says.
    limit: rows of each task at most; None for all.
    chat: render prompts with the model's chat template.
    trusted: run the code of tasks.
    """

    names: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    chat: bool = False
    trusted: bool = False


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A `TextModel` with the methods that the harness calls."""

    backend = "causal"  # the harness's word for decoder-only models

    def __init__(self, model: TextModel, name: str) -> None:
        super().__init__()
        self.model, self._name = model, name

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.model.prefix_id

    @property
    def max_length(self) -> int:
        return self.model.model.max_length

    @property
    def tokenizer_name(self) -> str:
        return self._name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of `string`; see `TextModel.encode`."""
        return self.model.encode(string, special=add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the log-prob of each continuation, and whether it is the greedy one."""
        pairs = [Request(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        return [(score.log_prob, score.greedy) for score in self.model.model.score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-prob of each text, in windows as large as the model's context, as the harness has them."""
        texts = [request.args[0] for request in requests]
        scores = self.model.score_documents(texts, stride=self.max_length, special=None)
        return [log_prob for log_prob, _ in scores]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the reply to each prompt."""
        groups: dict[Sampling, list[int]] = {}
        repeated: Counter[tuple[str, str]] = Counter()
        for index, request in enumerate(requests):
            prompt, settings = request.args
            # Repetitions of a prompt are drawn with other seeds.
            seed = repeated[prompt, repr(settings)]
            repeated[prompt, repr(settings)] += 1
            groups.setdefault(_sampling(settings, seed), []).append(index)
        result = [""] * len(requests)
        for sampling, indices in groups.items():
            prompts = [requests[index].args[0] for index in indices]
            for index, reply in zip(indices, self.model.replies(prompts, sampling), strict=True):
                result[index] = reply
        return result

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation up to the reply. Raise ConfigError for a reply that is begun already."""
        if self.model.chat is None:
            raise ConfigError(f"{self._name}: has no chat template; leave --apply-chat-template out")
        if not add_generation_prompt:
            raise ConfigError(
                "a task begins the reply itself (gen_prefix), which kumi cannot render; leave --apply-chat-template out"
            )
        return self.model.chat.render(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return a name for the chat template, by which the harness tells its caches apart."""
        return self._name if chat_template else ""


def _sampling(settings: Mapping[str, Any], seed: int) -> Sampling:
    """Return the sampling of a task's `generation_kwargs`. Raise ConfigError for a key that kumi does not have."""
    settings = dict(normalize_gen_kwargs(dict(settings), _MAX_NEW_TOKENS))
    unknown = sorted(set(settings) - {*_SAMPLING_KEYS, *_OTHER_KEYS})
    if unknown:
        raise ConfigError(
            f"generation_kwargs of a task has {unknown[0]}={settings[unknown[0]]!r}; kumi generates with "
            f"{', '.join(_SAMPLING_KEYS)}, until and max_gen_toks; change the task"
        )
    options = {key: settings[key] for key in _SAMPLING_KEYS if settings.get(key) is not None}
    greedy = not options.get("temperature")
    return Sampling(
        max_new_tokens=settings["max_gen_toks"],
        stop_strings=tuple(text for text in settings["until"] if text),
        **({"temperature": 0.0} if greedy else {**options, "seed": seed}),
    )


def run_harness(tasks: HarnessTasks, model: TextModel, name: str) -> list[TaskResult]:
    """Return the results of `tasks`. Raise ConfigError for unknown tasks, and for code unless it is trusted."""
    if tasks.include_path is not None and not tasks.trusted:
        check_task_folder(tasks.include_path)
    if not tasks.trusted:
        _use_sandbox()
    if tasks.chat and model.chat is not None:
        model = replace(model, stop_ids=model.chat.stop_ids)
    # Resampling in several processes would fork this one, which has threads.
    os.environ["DISABLE_MULTIPROC"] = "1"
    manager = _manager(tasks)
    output = lm_eval.simple_evaluate(
        model=HarnessModel(model, name),
        tasks=list(tasks.names),
        task_manager=manager,
        num_fewshot=tasks.num_fewshot,
        limit=tasks.limit,
        apply_chat_template=tasks.chat,
        bootstrap_iters=_BOOTSTRAP,
        log_samples=False,
        confirm_run_unsafe_code=tasks.trusted,
    )
    return [_result(name, output) for name in output["results"]]


def _use_sandbox() -> None:
    """Let the harness render its templates in jinja2's sandbox: outside of it, a template can run any code."""
    plain = harness_utils.env
    sandboxed = SandboxedEnvironment(
        loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline
    )
    sandboxed.filters.update(plain.filters)
    harness_utils.env = sandboxed


def _manager(tasks: HarnessTasks) -> Any:
    """Return the index of tasks; the harness's own 14,000 files are read only if a task is not in `include_path`."""
    if tasks.include_path is not None:
        manager = TaskManager(include_path=str(tasks.include_path), include_defaults=False)
        if all(name in manager.all_tasks for name in tasks.names):
            return manager
    path = None if tasks.include_path is None else str(tasks.include_path)
    manager = TaskManager(include_path=path)
    unknown = [name for name in tasks.names if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"--lm-eval {unknown[0]}: lm-evaluation-harness has no such task; `lm-eval ls tasks` lists them, and "
            "--include-path names a folder with more"
        )
    return manager


def _result(name: str, output: Mapping[str, Any]) -> TaskResult:
    """Return the result of task `name`. A metric that several filters have gets the filter's name behind a comma."""
    metrics = {}
    for key, value in output["results"][name].items():
        metric, _, filter_name = key.partition(",")
        if not filter_name or metric.endswith("_stderr") or isinstance(value, str):
            continue
        error = None
        with suppress(TypeError, ValueError):  # "N/A"
            error = float(output["results"][name].get(f"{metric}_stderr,{filter_name}"))
        metrics[metric if filter_name == "none" else key] = Metric(float(value), error)
    kind = str(output.get("configs", {}).get(name, {}).get("output_type", "group"))
    count = int(output.get("n-samples", {}).get(name, {}).get("effective", 0))
    return TaskResult(name, f"{HARNESS_KIND} {kind}", count, metrics)
