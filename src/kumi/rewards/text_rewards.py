"""The rewards that compare the text of a reply: with answers, with a regular expression, with a JSON schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files import untrusted
from kumi.files.untrusted import brief
from kumi.paths import shown_path
from kumi.rewards.answers import answers_in, is_answer
from kumi.rewards.json_schema import SchemaError, is_valid
from kumi.rewards.number_text import equal_answers, equal_numbers, last_boxed, last_number
from kumi.rewards.reward_spec import BoxedReward, ExactReward, JsonSchemaReward, NumberReward, RegexReward

# (prompt, reply, row) -> the reward; None if the reply cannot be scored.
RewardFunction = Callable[[str, str, Mapping[str, Any]], float | None]

# A reply that is a single code block.
_FENCED = re.compile(r"```[^\n]*\n(.*)```", re.DOTALL)


class RowError(ValueError):
    """A column of a row that a reward cannot read."""


def exact_reward(spec: ExactReward) -> RewardFunction:
    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float:
        text = text_after(reply, spec.after)
        return float(text is not None and is_answer(text, _answers(row, spec.column)))

    return reward


def number_reward(spec: NumberReward) -> RewardFunction:
    """Return the reward for the last number of a reply. Of an answer, too, the last number counts, as in GSM8K."""

    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float:
        answers = [(answer, last_number(answer)) for answer in _answers(row, spec.column)]
        invalid = next((answer for answer, number in answers if number is None), None)
        if invalid is not None:
            raise RowError(f"column {spec.column!r} is {brief(invalid)}, which has no number")
        number = last_number(text_after(reply, spec.after) or "")
        return float(
            number is not None
            and any(other is not None and equal_numbers(number, other, spec.tolerance) for _, other in answers)
        )

    return reward


def boxed_reward(spec: BoxedReward) -> RewardFunction:
    r"""Return the reward for the last `\boxed{}` of a reply. Of an answer, too, its last `\boxed{}` counts, if any."""
    equal = _algebraic() if spec.compare == "math-verify" else equal_answers

    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float:
        boxed = last_boxed(text_after(reply, spec.after) or "")
        if boxed is None:
            return 0.0
        answers = [last_boxed(answer) or answer for answer in _answers(row, spec.column)]
        return float(any(equal(boxed, answer, spec.tolerance) for answer in answers))

    return reward


def _algebraic() -> Callable[[str, str, float], bool]:
    """Return a comparison by kumi's own rules, then by math-verify. Raise ConfigError unless math-verify is
    installed."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ConfigError(
            "compare='math-verify' needs the package math-verify, which is not installed; "
            "pip install 'kumi[math]', or set compare='own'"
        ) from None

    def equal(reply: str, answer: str, tolerance: float) -> bool:
        if equal_answers(reply, answer, tolerance):
            return True
        # math-verify reads LaTeX between dollars, as in a \boxed{}. Its timeouts, which need signals, are off: the
        # process that computes rewards has a deadline.
        gold, target = (parse(f"${text}$", parsing_timeout=None) for text in (answer, reply))
        return bool(verify(gold, target, timeout_seconds=None))

    return equal


def regex_reward(spec: RegexReward) -> RewardFunction:
    """Return the reward for replies that match a pattern; with a column, its last match's group must be an answer."""
    pattern = re.compile(spec.pattern)

    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float:
        matches = list(pattern.finditer(text_after(reply, spec.after) or ""))
        if not matches or not spec.column:
            return float(bool(matches))
        return float(is_answer(matches[-1][1] or "", _answers(row, spec.column)))

    return reward


def json_schema_reward(spec: JsonSchemaReward, folder: Path) -> RewardFunction:
    """Return the reward for replies that are valid under a schema, whose file is relative to `folder`.

    The reply is JSON, or one block of code with it. Raise ConfigError for a file that is no schema. The reward raises
    RowError for a row whose column is no schema.
    """
    fixed = _schema(folder / Path(spec.schema_file).expanduser(), spec) if spec.schema_file else None
    source = f"column {spec.column!r}" if spec.column else f"schema_file {spec.schema_file!r}"

    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float:
        schema = fixed
        if spec.column:
            value = row[spec.column]
            schema = _parsed(value, spec.column) if isinstance(value, str) else value
        text = (text_after(reply, spec.after) or "").strip()
        fenced = _FENCED.fullmatch(text)
        try:
            parsed = untrusted.strict_json((fenced[1] if fenced else text).encode())
        except ValueError:
            return 0.0
        try:
            return float(is_valid(parsed, schema))
        except SchemaError as error:
            raise RowError(f"{source} is not a JSON schema: {error}") from None

    return reward


def _parsed(text: str, column: str) -> Any:
    try:
        return untrusted.json_record(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"column {column!r} is not a JSON schema: {error}") from None


def _schema(path: Path, spec: JsonSchemaReward) -> Any:
    try:
        schema = untrusted.strict_json(untrusted.read_regular(path, untrusted.CONFIG.size, follow=True))
        # A value of each type, because a keyword is only read for values of its type.
        examples: list[Any] = [None, True, 0, "", [], {}]
        for example in examples:
            is_valid(example, schema)
    except FileNotFoundError:
        raise ConfigError(f"reward {spec.name!r}: {shown_path(path)} does not exist; correct `schema_file`") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward {spec.name!r}: {path} is not a JSON schema ({error}); correct it") from None
    return schema


def text_after(reply: str, mark: str) -> str | None:
    """Return the text after the last `mark` in `reply`; `reply` for an empty mark; None if the mark does not occur."""
    if not mark:
        return reply
    _, separator, text = reply.rpartition(mark)
    return text if separator else None


def _answers(row: Mapping[str, Any], column: str) -> list[str]:
    answers = answers_in(row[column])
    if answers is None:
        raise RowError(f"column {column!r} is {brief(row[column])}, neither a text nor a list of texts")
    return answers
