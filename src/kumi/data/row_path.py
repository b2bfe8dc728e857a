"""The settings that decide how rows of examples become units, for fingerprints and jobs, and functions that apply them.

A unit is what packing puts into a row of a batch as a whole: a sequence of tokens, or both sides of a preference."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.data.chat.masked import FORMAT
from kumi.data.chat.template import ChatTemplate, load_stops, load_template, load_tokens
from kumi.data.formats import Conversation, Example, Format, to_example
from kumi.data.row_files import read_rows
from kumi.data.row_guard import RowGuard
from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError
from kumi.spec.data_source import ChatOptions

if TYPE_CHECKING:
    from kumi.data.chat.encode import ConversationEncoder

# Kinds whose rows may be plain text, which no template renders.
_PLAIN = ("prompt-completion", "preference", "feedback", "prompt")

# Version of what is stored of a prompt beside its tokens.
_PROMPTS = 2


@dataclass(frozen=True)
class RowPath:
    """The functions that turn the rows of one source into units.

    kind: the kind of the rows.
    read: rows of a segment (a range of a file), by its entry in the job: (line, columns) or a Fault; returns the number
        of lines.
    convert: (row, file, line) to an example; raises RowRefused.
    encoder: `encode` gives the units of an example, or raises RowRefused; `counts` has "control_tokens_as_text".
    guarded: returns the context in which the row (segment, line) must be encoded.
    render: returns the text of a whole conversation by its template, not split into samples.
    """

    kind: str
    read: Callable[[dict[str, Any]], Any]
    convert: Callable[[dict[str, Any], str, int], Example]
    encoder: Any
    guarded: Callable[[int, int], AbstractContextManager[None]]
    render: Callable[[Conversation], str]


def chat_settings(options: ChatOptions, tokenizer: Tokenizer, kinds: Collection[str]) -> dict[str, Any]:
    """Return all settings that decide the units of rows of `kinds`, as JSON data for jobs.

    Raise ConfigError if the template or the stop tokens are missing or unusable.
    """
    return {
        "template": asdict(_template(options, tokenizer, kinds)),
        "tokens": load_tokens(tokenizer.folder),
        "kwargs": dict(options.template_kwargs or {}),
        "date": options.date,
        "stops": list(load_stops(tokenizer, options)),
        "turns": options.turns,
        "timeout_s": options.timeout_s,
        "memory_gib": options.memory_gib,
    }


def _template(options: ChatOptions, tokenizer: Tokenizer, kinds: Collection[str]) -> ChatTemplate:
    """Return the chat template; if there is none and no kind of rows needs one, one that refuses conversations."""
    try:
        return load_template(options, tokenizer.folder)
    except ConfigError as error:
        if options.template is not None or not set(kinds) <= set(_PLAIN):
            raise
        text = "{{ raise_exception(" + json.dumps(str(error)) + ") }}"
    return ChatTemplate(text, "no template", hashlib.sha256(text.encode()).hexdigest())


def settings_key(settings: Mapping[str, Any], fmt: Format) -> dict[str, Any]:
    """Return the part of `settings` and `fmt` that decides the units, for fingerprints; without the template's path."""
    key = {name: value for name, value in settings.items() if name != "template"}
    key |= {"template": settings["template"]["digest"], "version": FORMAT}
    if fmt.kind == "prompt":
        key["prompts"] = _PROMPTS
    return key | {"kind": fmt.kind, "columns": dict(fmt.columns), "forced": fmt.forced}


def open_row_path(job: dict[str, Any], tokens: Tokenizer) -> RowPath:
    """Return the functions for the rows of `job`. Raise ConfigError if the template cannot be compiled."""
    guard = RowGuard(job.get("refused_rows", ()))
    fmt = Format(**job["format"])
    with guard.compiling(job["chat"]["template"]["origin"]):
        renderer, encoder = _encoder(json.dumps(job["chat"], sort_keys=True), tokens)

    def read(segment: dict[str, Any]) -> Any:
        file = segment["file"]
        return read_rows(Path(file["path"]), file["format"], fmt.reads, segment["start"], segment["end"])

    return RowPath(
        fmt.kind,
        read,
        functools.partial(to_example, fmt),
        encoder,
        lambda segment, line: guard.rendering(segment, line, renderer.limits),
        lambda side: renderer.render(side.messages, side.tools, **side.template_kwargs),
    )


def open_encoder(options: ChatOptions, tokenizer: Tokenizer) -> ConversationEncoder:
    """Return the encoder of prompts with completions, texts or conversations, by `tokenizer` and its chat template.

    Raise ConfigError as `chat_settings` does. Without a template, the encoder refuses conversations.
    """
    settings = chat_settings(options, tokenizer, ("prompt-completion",))
    encoder: ConversationEncoder = _encoder(json.dumps(settings, sort_keys=True), tokenizer)[1]
    return encoder


@functools.lru_cache(maxsize=1)
def _encoder(settings: str, tokens: Tokenizer) -> tuple[Any, Any]:
    """Return the renderer and the encoder of `settings`, the JSON of `chat_settings`; the last ones are reused."""
    # Only processes that render need jinja2.
    from kumi.data.chat.encode import ConversationEncoder
    from kumi.data.chat.sandbox import Renderer

    chat = json.loads(settings)
    renderer = Renderer(
        ChatTemplate(**chat["template"]),
        chat["tokens"],
        chat["kwargs"],
        chat["date"],
        timeout_s=chat["timeout_s"],
        memory_gib=chat["memory_gib"],
    )
    return renderer, ConversationEncoder(renderer, tokens, chat["stops"], chat["turns"])
