"""A chat model as a judge: it gets a message with the reply, and writes a score."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kumi.files.untrusted import brief
from kumi.rewards.http_request import RequestError, bearer, post_json
from kumi.rewards.reward_spec import JudgeReward
from kumi.rewards.templates import fill


def judge(spec: JudgeReward) -> Callable[[str, str, Mapping[str, Any]], float]:
    """Return the function that asks the judge for the reward of a reply: the judge's score divided by `scale`.

    The function raises RequestError if the judge does not answer, or writes no score from 0 to `scale`. Raise
    ConfigError if the key of the service is not in the environment.
    """
    headers = bearer(spec.key_variable, f"reward {spec.name!r}")
    pattern = re.compile(spec.pattern)

    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float:
        values = {**row, "prompt": prompt, "reply": reply}
        content = {
            "model": spec.model,
            "messages": [{"role": "user", "content": fill(spec.prompt, lambda name: str(values[name]))}],
            "temperature": 0.0,
            "max_tokens": spec.max_tokens,
        }
        answer = post_json(spec.url, content, headers, spec.timeout_s, spec.attempts)
        text = _text(answer)
        if text is None:
            raise RequestError(f"{spec.url} answered {brief(answer)}, which has no choices[0].message.content")
        return _score(text, pattern, spec)

    return reward


def _text(answer: Any) -> str | None:
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else None


def _score(text: str, pattern: re.Pattern[str], spec: JudgeReward) -> float:
    matches = list(pattern.finditer(text))
    try:
        score = float(matches[-1][1])
    except (IndexError, TypeError, ValueError):
        raise RequestError(f"the judge wrote no score: {brief(text[-200:])}") from None
    if not 0 <= score <= spec.scale:
        raise RequestError(f"the judge wrote the score {score:g}, outside of 0 to scale={spec.scale:g}")
    return score / spec.scale
