"""The rewards that a run can have: a frozen dataclass for each kind, whose fields are the keys of a table [[rewards]].

Every kind has `name`, `weight` and `timeout_s`. `columns` names the columns of a row that the reward reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kumi.errors import ConfigError
from kumi.rewards.templates import names_in
from kumi.spec.field_docs import described

_NAME = re.compile(r"[\w.-]+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_AFTER = described("Judge only the text after the last occurrence of this one; a reply without it scores 0.", "")
_KEY_VARIABLE = described("Environment variable with the key that is sent as `Authorization: Bearer`.", "")


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """A configured reward.

    `kind`: the value of its key `kind`.
    `in_worker`: True if it runs in a worker process.
    """

    kind: ClassVar[str]
    in_worker: ClassVar[bool] = True

    name: str = described("Name in metrics; by default the kind.", "")
    weight: float = described("Factor of the reward in the sum of all rewards; with 0 it is only reported.", 1.0)
    timeout_s: float = described("Seconds after which the call for a reply is ended.", 10.0)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.kind)
        if not _NAME.fullmatch(self.name):
            raise self.error("name", self.name, "is not a name; use letters, digits, '_', '.' and '-'")
        if not 0 < self.timeout_s <= 86400:
            raise self.error("timeout_s", self.timeout_s, "is not a time; use more than 0 and at most 86400 seconds")
        self.check()

    def check(self) -> None:
        """Raise ConfigError if the keys of this kind contradict each other."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns of a row that the reward reads, by default the one that the key `column` names; None for all."""
        column: str = getattr(self, "column", "")
        return (column,) if column else ()

    def error(self, key: str, value: Any, reason: str) -> ConfigError:
        """Return the error that `key` has a wrong value."""
        return ConfigError(f"reward {self.name!r}: {key}={value!r} {reason}")


@dataclass(frozen=True, kw_only=True)
class FunctionReward(RewardSpec):
    """A Python function `reward(prompt, reply, row)` that returns a number, or None for "cannot be scored"."""

    kind: ClassVar[str] = "function"
    file: str = described("The function, as `path/to/file.py:name`; it runs in worker processes.", "")

    def check(self) -> None:
        path, colon, function = self.file.rpartition(":")
        if not (path.endswith(".py") and colon and function.isidentifier()):
            raise self.error("file", self.file, "does not name a function; write file = 'rewards.py:function'")

    @property
    def columns(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class _AnswerReward(RewardSpec):
    """A reward that compares the reply with a column of the row."""

    column: str = described("Column with the answer, or a list of answers that count as right.", "answer")
    after: str = _AFTER


@dataclass(frozen=True, kw_only=True)
class ExactReward(_AnswerReward):
    """1 if the reply is one of the answers, white space around both left out; else 0."""

    kind: ClassVar[str] = "exact"


@dataclass(frozen=True, kw_only=True)
class NumberReward(_AnswerReward):
    """1 if the last number of the reply equals the last number of an answer; else 0."""

    kind: ClassVar[str] = "number"
    tolerance: float = described("Relative difference up to which numbers are equal.", 0.0)

    def check(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise self.error("tolerance", self.tolerance, "is not a relative difference; use at least 0 and below 1")


# The values of the key `compare`.
COMPARISONS = ("own", "math-verify")


@dataclass(frozen=True, kw_only=True)
class BoxedReward(NumberReward):
    r"""1 if the last `\boxed{}` of the reply equals an answer, as a number or as LaTeX; else 0."""

    kind: ClassVar[str] = "boxed"
    compare: str = described(
        "'own' compares numbers and normalised LaTeX; 'math-verify' also algebra, with the package of that name.",
        "own",
        COMPARISONS,
    )

    def check(self) -> None:
        super().check()
        if self.compare not in COMPARISONS:
            raise self.error("compare", self.compare, f"is unknown; use one of {', '.join(COMPARISONS)}")


@dataclass(frozen=True, kw_only=True)
class RegexReward(_AnswerReward):
    """1 if the pattern occurs in the reply, and its first group is an answer where `column` is set; else 0."""

    kind: ClassVar[str] = "regex"
    pattern: str = described("Regular expression of Python that is searched in the reply.", "")
    column: str = described("Column with the answer that the last match's first group must be; unset: none.", "")

    def check(self) -> None:
        groups = check_pattern(self, self.pattern)
        if self.column and groups < 1:
            raise self.error("pattern", self.pattern, f"has no group to compare with column {self.column!r}; add one")


@dataclass(frozen=True, kw_only=True)
class JsonSchemaReward(RewardSpec):
    """1 if the reply is JSON that is valid under a schema; else 0."""

    kind: ClassVar[str] = "json-schema"
    schema_file: str = described("File with the JSON schema.", "")
    column: str = described("Column with the JSON schema of the row, instead of `schema_file`.", "")
    after: str = _AFTER

    def check(self) -> None:
        if bool(self.schema_file) == bool(self.column):
            reason = f"and column={self.column!r}: give one of them, the file or the column of a schema"
            raise self.error("schema_file", self.schema_file, reason)


@dataclass(frozen=True, kw_only=True)
class GymReward(RewardSpec):
    """The score of a problem of reasoning-gym by the scorer of its task, usually 0 to 1."""

    kind: ClassVar[str] = "reasoning-gym"
    tag: str = described("Judge the last text between <tag> and </tag>; empty: the whole reply.", "answer")
    after: str = _AFTER

    @property
    def columns(self) -> Sequence[str]:
        return ("reasoning_gym",)


@dataclass(frozen=True, kw_only=True)
class LengthReward(RewardSpec):
    """0 for a short reply, falling to -1 for one of `max_tokens` (DAPO, arXiv:2503.14476, equation 13)."""

    kind: ClassVar[str] = "length"
    in_worker: ClassVar[bool] = False
    max_tokens: int | None = described(
        "Tokens at which the reward is -1; by default those that a reply may have.", None
    )
    soft_tokens: int | None = described(
        "Tokens before `max_tokens` over which it falls; by default a fifth of them.", None
    )

    def check(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise self.error("max_tokens", self.max_tokens, "is not a number of tokens; use at least 1")
        if self.soft_tokens is not None and self.soft_tokens < 1:
            raise self.error("soft_tokens", self.soft_tokens, "is not a number of tokens; use at least 1")


# The values of the key `reads`.
READINGS = ("tokens", "reply", "whole")


@dataclass(frozen=True, kw_only=True)
class ModelReward(RewardSpec):
    """The score of a reward model: a sequence classifier of transformers with one label."""

    kind: ClassVar[str] = "model"
    in_worker: ClassVar[bool] = False
    source: str = described("Folder or hub id of the reward model, such as the `hf` of a run that trained one.", "")
    reads: str = described(
        "What the reward model reads. 'tokens': those of the policy. 'reply': its own tokens of the rendering by its "
        "chat template, up to the token that ends the reply, on which kumi trains reward models. 'whole': all of the "
        "rendering, as transformers' apply_chat_template. Unset: 'tokens' if tokenizer and template are the policy's, "
        "else 'reply'.",
        "",
        READINGS,
    )

    def check(self) -> None:
        if not self.source:
            raise self.error("source", self.source, "is empty; name the folder of a reward model")
        if self.reads and self.reads not in READINGS:
            raise self.error("reads", self.reads, f"is unknown; use one of {', '.join(READINGS)}")


@dataclass(frozen=True, kw_only=True)
class JudgeReward(RewardSpec):
    """The score that a chat model gives, by HTTP."""

    kind: ClassVar[str] = "judge"
    in_worker: ClassVar[bool] = False
    timeout_s: float = described("Seconds for all attempts to score a reply.", 60.0)
    url: str = described("URL of an endpoint of OpenAI's kind, which ends in /chat/completions.", "")
    model: str = described("Name of the judge's model, as its server has it.", "")
    prompt: str = described(
        "Message to the judge; {prompt}, {reply} and {column} are replaced by those of the reply and its row.", ""
    )
    pattern: str = described(
        "Regular expression whose first group is the score in the judge's text; the last match counts.",
        r"(-?\d+(?:\.\d+)?)",
    )
    scale: float = described("Best score that the prompt asks for; the reward is the score divided by it.", 1.0)
    max_tokens: int = described("Tokens that the judge may write.", 1024)
    key_variable: str = _KEY_VARIABLE
    attempts: int = described("Requests for a reply, if the first ones fail.", 4)
    concurrency: int = described("Requests at a time.", 16)

    def check(self) -> None:
        check_http(self, "url", self.url)
        check_variable(self, self.key_variable)
        if not self.model:
            raise self.error("model", self.model, "is empty; name the model that the judge's server has")
        if "reply" not in names_in(self.prompt):
            raise self.error("prompt", self.prompt, "has no {reply}; write the message to the judge with it")
        if check_pattern(self, self.pattern) < 1:
            raise self.error("pattern", self.pattern, "has no group for the score; add one")
        for key, low in (("scale", 1e-9), ("max_tokens", 1), ("attempts", 1), ("concurrency", 1)):
            if getattr(self, key) < low:
                raise self.error(key, getattr(self, key), f"is too small; use at least {low:g}")

    @property
    def columns(self) -> Sequence[str]:
        return tuple(name for name in names_in(self.prompt) if name not in ("prompt", "reply"))


# The values of the keys `tests` and `score`.
TESTS, SCORES = ("assert", "stdin"), ("all", "share")


@dataclass(frozen=True, kw_only=True)
class CodeReward(RewardSpec):
    """Runs the last code block of the reply with the tests of the row, in a sandbox: 1 if they pass, else 0."""

    kind: ClassVar[str] = "code"
    timeout_s: float = described("Seconds for all tests of a reply; tests that have not run by then fail.", 10.0)
    column: str = described("Column with the tests.", "tests")
    tests: str = described(
        "'assert': a list of Python statements, or a text of them, that run after the reply's code; 'stdin': a list of "
        "{input, output}, texts for a program's standard input and output.",
        "assert",
        TESTS,
    )
    score: str = described("'all' is 1 if every test passes; 'share' is the share of tests that pass.", "all", SCORES)
    memory_mb: int = described("MiB of memory of a program, with the files that it writes.", 512)
    processes: int = described("Processes and threads of a program.", 32)
    files_mb: int = described("MiB of files that a program may write.", 16)
    output_kb: int = described("KiB of output of a program; more ends it.", 256)
    python: str = described("Python interpreter of the programs; by default kumi's own, without its packages.", "")
    service: str = described(
        "URL of your own sandbox service, which then runs the programs instead of bwrap on this machine.", ""
    )
    key_variable: str = _KEY_VARIABLE

    def check(self) -> None:
        for key, choices in (("tests", TESTS), ("score", SCORES)):
            if getattr(self, key) not in choices:
                raise self.error(key, getattr(self, key), f"is unknown; use one of {', '.join(choices)}")
        for key, low, high in (
            ("memory_mb", 64, 2**20),
            ("processes", 1, 4096),
            ("files_mb", 1, 2**20),
            ("output_kb", 1, 2**20),
        ):
            if not low <= getattr(self, key) <= high:
                raise self.error(key, getattr(self, key), f"is out of range; use {low} to {high}")
        if self.service:
            check_http(self, "service", self.service)
        check_variable(self, self.key_variable)

    @property
    def columns(self) -> Sequence[str]:
        return (self.column,)


def check_pattern(spec: RewardSpec, pattern: str) -> int:
    """Return the number of groups of `pattern`. Raise ConfigError unless it is a regular expression."""
    if not pattern:
        raise spec.error("pattern", pattern, "is empty; write a regular expression")
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise spec.error("pattern", pattern, f"is not a regular expression ({error}); correct it") from None


def check_http(spec: RewardSpec, key: str, url: str) -> None:
    """Raise ConfigError unless `url` begins with http:// or https:// and has no user and no password."""
    if not re.match(r"https?://[^/@\s]+(/[^\s]*)?$", url):
        raise spec.error(key, url, "is not a URL of http:// or https:// without a user and a password; correct it")


def check_variable(spec: RewardSpec, variable: str) -> None:
    """Raise ConfigError unless `variable` is the name of an environment variable, or empty."""
    if variable and not _VARIABLE.fullmatch(variable):
        # The value is not shown: it may be the key itself.
        raise ConfigError(
            f"reward {spec.name!r}: key_variable is not the name of an environment variable; put the key into a "
            "variable of the environment, and name that variable"
        )


# The value of the key `kind` -> the class of such rewards.
REWARD_KINDS: dict[str, type[RewardSpec]] = {
    spec.kind: spec
    for spec in (
        FunctionReward,
        ExactReward,
        NumberReward,
        BoxedReward,
        RegexReward,
        JsonSchemaReward,
        GymReward,
        LengthReward,
        ModelReward,
        JudgeReward,
        CodeReward,
    )
}


def spec_from(written: Mapping[str, Any]) -> RewardSpec:
    """Return the reward of `written`, its keys with `kind`. Raise ConfigError for values that it refuses."""
    keys = dict(written)
    return REWARD_KINDS[keys.pop("kind")](**keys)


def check_rewards(rewards: Sequence[RewardSpec]) -> None:
    """Raise ConfigError unless there are rewards, their names differ, and at least one has a weight other than 0."""
    if not rewards:
        raise ConfigError("no reward is configured; add a table [[rewards]]")
    names = [spec.name for spec in rewards]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ConfigError(f"two rewards have the name {double!r}; give each its own `name`")
    if not any(spec.weight for spec in rewards):
        raise ConfigError("every reward has weight=0, so nothing is rewarded; give one a weight")
