"""Prompts of conversations, by the chat template of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.data.chat.masked import RowRefused
from kumi.data.chat.sandbox import Renderer
from kumi.data.chat.template import find_template, load_tokens
from kumi.errors import ConfigError
from kumi.evaluation.text_model import RenderChat
from kumi.spec.data_source import ChatOptions


def chat_renderer(options: ChatOptions, tokenizer_folder: Path) -> RenderChat | None:
    """Return the function that renders messages up to the reply; None for a model without a chat template.

    The template is that of `options`, else that of the tokenizer.

    Raise ConfigError for a template that cannot be compiled; the function raises it for messages that the template
    refuses.
    """
    template = find_template(options, tokenizer_folder)
    if template is None:
        return None
    renderer = Renderer(
        template,
        load_tokens(tokenizer_folder),
        options.template_kwargs,
        options.date,
        timeout_s=options.timeout_s,
        memory_gib=options.memory_gib,
    )

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            renderer.limits.start()
            return renderer.render(messages, prompt=True)
        except RowRefused as refused:
            raise ConfigError(
                f"{template.origin}: cannot render a prompt: {refused.reason}; set chat=false, or correct the template"
            ) from None
        finally:
            renderer.limits.end()

    return render
