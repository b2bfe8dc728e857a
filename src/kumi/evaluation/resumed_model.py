"""A model for an evaluation that can be resumed: it reads recorded scores and replies, and records new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from kumi.evaluation.evaluated_model import EvaluatedModel
from kumi.evaluation.recorded_scores import RecordedScores, request_key
from kumi.evaluation.score_requests import Request, Score
from kumi.inference.batched_decoder import Reply
from kumi.inference.sampling import Sampling
from kumi.progress import Update, show_progress


class ResumedModel:
    """Has `model` compute only the scores and replies that `recorded` lacks, and adds them to `recorded`.

    recorded: the file of scores and replies; None records nothing.
    title: of the progress bar; None shows no progress.
    check: called after every unit of work; it may raise to end the evaluation.
    """

    def __init__(
        self,
        model: EvaluatedModel,
        recorded: RecordedScores | None = None,
        *,
        title: str | None = "evaluating",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.recorded, self.title, self.check = model, recorded, title, check

    @property
    def max_length(self) -> int:
        """The number of tokens that the model reads at most."""
        return self.model.max_length

    def _progress(self, total: int, name: str) -> AbstractContextManager[Update]:
        enabled = self.title is not None
        return show_progress(self.title or "", total, lambda count: f"{count:.0f} {name}", enabled=enabled)

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the scores of `requests`."""
        stored = {} if self.recorded is None else self.recorded.values
        keys = [request_key("score", request.context, request.continuation) for request in requests]
        missing = [index for index, key in enumerate(keys) if key not in stored]
        result = [Score(*stored[key]) if key in stored else None for key in keys]
        done = len(requests) - len(missing)
        with self._progress(len(requests), "requests") as update:

            def record(indices_in_missing: Sequence[int], scores: Sequence[Score]) -> None:
                nonlocal done
                if self.recorded is not None:
                    new = {keys[missing[index]]: score for index, score in zip(indices_in_missing, scores, strict=True)}
                    self.recorded.add(list(new), list(new.values()))
                done += len(scores)
                update(done)
                self.check()

            computed = self.model.score([requests[index] for index in missing], record)
            for index, score in zip(missing, computed, strict=True):
                result[index] = score
        return [score for score in result if score is not None]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Return the token ids of the reply to each of `prompts`."""
        stored = {} if self.recorded is None else self.recorded.values
        settings = repr(replace(sampling, stop_ids=frozenset())) + repr(sorted(sampling.stop_ids))
        keys = [request_key("generate", prompt, settings) for prompt in prompts]
        missing = [index for index, key in enumerate(keys) if key not in stored]
        result: list[list[int]] = [list(stored.get(key, ())) for key in keys]
        done = len(prompts) - len(missing)
        with self._progress(len(prompts), "replies") as update:

            def record(replies: Sequence[Reply]) -> None:
                nonlocal done
                if self.recorded is not None:
                    # `reply.prompt` is the index of the prompt in `missing`.
                    new = {keys[missing[reply.prompt]]: reply.ids for reply in replies}
                    self.recorded.add(list(new), list(new.values()))
                done += len(replies)
                update(done)
                self.check()

            for reply in self.model.generate([prompts[index] for index in missing], sampling, record):
                result[missing[reply.prompt]] = reply.ids
        return result
